// The neurons on a canvas: a column for each layer, its cells from hot at the top to cold at the bottom.

const RESTS = 16, GLOWS = 20; // shades of each kind
const AFTERGLOW = 0.42; // of the previous token's neurons
const AFTERGLOW_MS = 240; // time until it has faded to a third

export class Picture {
  constructor(stage, map, bloom) {
    this.stage = stage;
    this.map = map;
    this.bloom = bloom;
    this.layout = null;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.running = false;
    new ResizeObserver(() => this.arrange()).observe(stage);
  }

  /** Sets the meaning of the cells; `layout` comes from the server. */
  setLayout(layout) {
    this.layout = layout;
    this.count = layout.cells.reduce((sum, n) => sum + n, 0);
    this.kind = new Uint8Array(this.count); // 1: cold
    this.rest = new Uint8Array(this.count).fill(layout.firing ? 0 : 2);
    this.glow = new Float32Array(this.count);
    this.shown = new Int16Array(this.count).fill(-1);
    let at = 0;
    layout.cells.forEach((n, layer) => {
      this.kind.fill(1, at + layout.hot_cells[layer], at + n);
      at += n;
    });
    if (layout.firing) {
      const firing = bytes(layout.firing);
      for (let i = 0; i < this.count; i++) this.rest[i] = Math.round((RESTS - 1) * Math.sqrt(firing[i] / 255));
    }
    this.arrange();
  }

  /** Returns the active part of each cell, 0 to 1, from the bytes of a frame. */
  parts(frame) {
    const found = new Float32Array(this.count);
    if (this.layout.bits === 1) for (let i = 0; i < this.count; i++) found[i] = (frame[i >> 3] >> (i & 7)) & 1;
    else for (let i = 0; i < this.count; i++) found[i] = ((frame[i >> 1] >> (4 * (i & 1))) & 15) / 15;
    return found;
  }

  get tokenBytes() { return Math.ceil((this.count * this.layout.bits) / 8); }

  /** Lights the active cells of a frame; earlier ones fade. */
  light(frame) {
    if (!this.layout) return;
    this.held = null;
    const parts = this.parts(frame);
    for (let i = 0; i < this.count; i++) {
      this.glow[i] = Math.max(Math.min(this.glow[i], AFTERGLOW), parts[i]);
    }
    this.fresh = true;
    this.run();
  }

  /** Shows one token's cells until the next light(), or until it is called with null. */
  hold(frame) {
    if (!this.layout) return;
    this.held = frame && this.parts(frame);
    if (!frame) this.glow.fill(0);
    this.run();
  }

  dark() {
    if (!this.layout) return;
    this.held = null;
    this.glow.fill(0);
    this.run();
  }

  run() {
    if (this.running) return;
    this.running = true;
    this.last = performance.now();
    requestAnimationFrame((now) => this.step(now));
  }

  step(now) {
    const fade = Math.exp(-Math.min(now - this.last, 100) / AFTERGLOW_MS);
    this.last = now;
    let lit = false;
    if (this.held) this.glow.set(this.held);
    else if (this.fresh) lit = !this.still.matches;
    else if (!this.still.matches) {
      for (let i = 0; i < this.count; i++) {
        if (this.glow[i] === 0) continue;
        this.glow[i] = this.glow[i] < 0.02 ? 0 : this.glow[i] * (this.glow[i] > AFTERGLOW ? fade : fade ** 1.3);
        lit = true;
      }
    }
    this.fresh = false;
    this.paint();
    if (lit && !this.held) requestAnimationFrame((next) => this.step(next));
    else this.running = false;
  }

  /** Places each cell, for the current size of the stage. */
  arrange() {
    if (!this.layout) return;
    const dpr = devicePixelRatio || 1;
    const width = Math.round(this.map.clientWidth * dpr), height = Math.round(this.map.clientHeight * dpr);
    if (!width || !height) return;
    this.map.width = width;
    this.map.height = height;
    this.bloom.width = Math.ceil(width / 3);
    this.bloom.height = Math.ceil(height / 3);
    this.boxes = new Int16Array(4 * this.count);
    const layers = this.layout.cells.length;
    const between = Math.max(2, Math.round(Math.min(0.18 * width / layers, 12 * dpr)));
    const column = Math.max(1, Math.floor((width + between) / layers - between));
    let at = 0;
    for (let layer = 0; layer < layers; layer++) {
      const left = layer * (column + between);
      this.place(at, layer, left, column, height, dpr);
      at += this.layout.cells[layer];
    }
    this.colours();
  }

  place(at, layer, left, width, height, dpr) {
    const hot = this.layout.hot_cells[layer], all = this.layout.cells[layer], cold = all - hot;
    const gap = hot && cold ? Math.round(5 * dpr) : 0;
    const rowsOf = (across) => Math.ceil(hot / across) + Math.ceil(cold / across);
    const { wide, high, across } = cellSize(width, height - gap, rowsOf);
    const space = Math.min(wide, high) > 3 * dpr ? Math.round(dpr) : 0;
    const start = left + Math.floor((width - across * wide) / 2);
    for (let i = 0; i < all; i++) {
      const inHot = i < hot, n = inHot ? i : i - hot;
      const row = Math.floor(n / across) + (inHot ? 0 : Math.ceil(hot / across));
      const box = 4 * (at + i);
      this.boxes[box] = start + (n % across) * wide;
      this.boxes[box + 1] = row * high + (inHot ? 0 : gap);
      this.boxes[box + 2] = Math.max(1, wide - space);
      this.boxes[box + 3] = Math.max(1, high - space);
    }
  }

  /** Reads the current colours of the page, and redraws everything with them. */
  colours() {
    if (!this.layout || !this.boxes) return;
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    const ground = rgb(value("--map-ground")), least = Number(value("--rest"));
    this.shades = [];
    for (const kind of ["hot", "cold"]) {
      const colour = rgb(value(`--map-${kind}`)), lit = rgb(value(`--map-${kind}-lit`));
      for (let rest = 0; rest < RESTS; rest++) {
        const resting = mix(ground, colour, least + ((0.85 - least) * rest) / (RESTS - 1));
        for (let glow = 0; glow < GLOWS; glow++) {
          const part = glow / (GLOWS - 1);
          const warm = mix(resting, colour, Math.min(1, part * 2.2));
          this.shades.push(`rgb(${mix(warm, lit, part ** 1.5).map(Math.round)})`);
        }
      }
    }
    this.shown.fill(-1);
    this.map.getContext("2d").clearRect(0, 0, this.map.width, this.map.height);
    this.blooms = value("--bloom") !== "0";
    this.paint();
  }

  paint() {
    if (!this.boxes || !this.shades) return;
    const context = this.map.getContext("2d"), boxes = this.boxes;
    for (let i = 0; i < this.count; i++) {
      const glow = Math.round(this.glow[i] * (GLOWS - 1));
      const shade = (this.kind[i] * RESTS + this.rest[i]) * GLOWS + glow;
      if (shade === this.shown[i]) continue;
      this.shown[i] = shade;
      context.fillStyle = this.shades[shade];
      context.fillRect(boxes[4 * i], boxes[4 * i + 1], boxes[4 * i + 2], boxes[4 * i + 3]);
    }
    const light = this.bloom.getContext("2d");
    light.clearRect(0, 0, this.bloom.width, this.bloom.height);
    if (this.blooms) light.drawImage(this.map, 0, 0, this.bloom.width, this.bloom.height);
  }

  /** Returns the active share of each layer's neurons in a frame. */
  shares(frame) {
    const parts = this.parts(frame), found = [];
    let at = 0;
    for (const n of this.layout.cells) {
      let sum = 0;
      for (let i = at; i < at + n; i++) sum += this.layout.bits === 1 ? parts[i] : parts[i] ** 2;
      found.push(sum / n);
      at += n;
    }
    return found;
  }
}

/** Returns the size of a layer's cells in whole device pixels: fractions would show a false pattern. */
function cellSize(width, height, rowsOf) {
  let best = { wide: 1, high: 1, across: width, worth: -1 };
  for (let wide = 1; wide <= width; wide++) {
    const across = Math.floor(width / wide), rows = rowsOf(across), high = Math.floor(height / rows);
    if (high < 1) break;
    const filled = (across * wide * rows * high) / (width * height), slim = Math.max(wide / high, high / wide);
    const worth = filled - 0.2 * Math.log2(slim); // cells are nearly square
    if (worth > best.worth) best = { wide, high, across, worth };
  }
  // Space that is left goes between the columns, so that each ends where the axis does.
  while (best.across > 1 && rowsOf(best.across - 1) * best.high <= height) best.across--;
  return best;
}

export function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function rgb(text) {
  const full = text.length === 4 ? [...text.slice(1)].map((c) => c + c).join("") : text.slice(1);
  return [0, 2, 4].map((i) => parseInt(full.slice(i, i + 2), 16));
}

function mix(a, b, part) {
  return a.map((value, i) => value + (b[i] - value) * part);
}
