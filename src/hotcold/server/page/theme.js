// Before anything is drawn: the colours that were chosen here the last time.
try {
  const chosen = localStorage.getItem("hotcold.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* nothing is kept in this browser */ }
