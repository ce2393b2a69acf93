// Which visible texts have less contrast than WCAG 2.2 asks for (1.4.3): name and ratio of each.
function parse(colour) {
  const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = probe.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255];
}
function over(top, under) { return top.slice(0, 3).map((v, i) => v * top[3] + under[i] * (1 - top[3])); }
function ground(element) {
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.unshift(parse(getComputedStyle(e).backgroundColor));
  return layers.reduce((under, layer) => over(layer, under), [255, 255, 255]);
}
function light(c) {
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = c.map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
const found = [];
for (const element of document.querySelectorAll('body *')) {
  const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || element.disabled || !element.checkVisibility({visibilityProperty: true})) continue;
  if (element.closest('.words, .skip, canvas')) continue;
  const style = getComputedStyle(element), back = ground(element), text = over(parse(style.color), back);
  const [a, b] = [light(text), light(back)].sort((x, y) => y - x);
  const big = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.6 && style.fontWeight >= 700);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < (big ? 3 : 4.5)) found.push([element.className || element.id || element.localName, ratio]);
}
return found;
