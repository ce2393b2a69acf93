// Scrolling of the text: it follows new text until the user scrolls up.

const box = document.getElementById("scroll"), button = document.getElementById("to-end");
const AT_END = 4; // pixels
let follows = true, last = 0;

const rest = () => box.scrollHeight - box.scrollTop - box.clientHeight;

function show() {
  button.hidden = follows || rest() <= AT_END;
}

box.addEventListener("scroll", () => {
  if (rest() <= AT_END) follows = true;
  else if (box.scrollTop < last) follows = false; // text that arrives never scrolls up
  last = box.scrollTop;
  show();
});
button.addEventListener("click", () => scroll(true));
new ResizeObserver(() => scroll()).observe(box);

/** Scrolls to the end, if it follows the text or if `always` is set. */
export function scroll(always = false) {
  if (always) follows = true;
  if (follows) box.scrollTop = box.scrollHeight;
  last = box.scrollTop;
  show();
}
