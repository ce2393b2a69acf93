// Sets the last chosen colours before anything is drawn.
try {
  const chosen = localStorage.getItem("hotcold.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* no access to the storage */ }
