"use strict";
/* The timeline: the server reduces spans to shares of each pixel column, this draws them. A column is filled from below by
   the shares of its names, work first, so that a narrow wait between two steps is a narrow stripe and never lost. */

const WORK = {
  compute: "#2a78b8", "compute/forward_backward": "#1f6fae", "compute/optimizer": "#5fb3e6", "compute/pack": "#7a6fc4",
  "compute/predict": "#37469b", generate: "#2a78b8", evaluate: "#7a6fc4", fetch: "#138a6b", flip: "#4a2d8f", verify: "#63bda4", score: "#8e6bb5",
};
const WAITS = {
  "wait/groups": "#d4571b", "wait/tasks": "#e8930c", "wait/weights": "#f2cb30", "wait/publish": "#c9a227", "wait/queue": "#f0b27a",
  "wait/ranks": "#b5651d", "wait/checkpoint": "#a84300", "wait/pool": "#dd7733",
};
const MORE_WORK = ["#1f6fae", "#138a6b", "#7a6fc4", "#5fb3e6", "#37469b", "#63bda4"], MORE_WAITS = ["#d4571b", "#e8930c", "#f2cb30", "#b5651d"];
const isWait = name => name.startsWith("wait/");
const rank = name => name === "other" ? 2 : isWait(name) ? 1 : 0;

function laneColor(name) {
  if (name === "other") return css("--line");
  const known = WORK[name] || WAITS[name];
  if (known) return known;
  const choice = isWait(name) ? MORE_WAITS : MORE_WORK;
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.charCodeAt(0)) >>> 0;
  return choice[sum % choice.length];
}

const GUTTER = 190, AXIS = 24, ROW = 18, THIN = 9, GAP = 5, HEAD = 20;

class Lanes {
  constructor(place, request, onView) {
    this.box = place.lanes;
    this.canvas = this.box.querySelector("canvas");
    this.place = place;
    this.request = request;  // (path, parameters) ▸ promise
    this.onView = onView;
    this.view = null;
    this.mode = "all";  // all · follow · fixed
    this.opened = new Set();
    this.events = [];
    this.busy = false;
    this.wanted = false;
    this.drawn = [];
    this.buttons();
    this.pointer();
    new ResizeObserver(() => this.load()).observe(this.box);
  }

  buttons() {
    const make = (label, title, act) => {
      const button = el("button", {type: "button", title}, label);
      button.addEventListener("click", act);
      return button;
    };
    this.pressed = {
      all: make("Whole run", "From the first to the last moment", () => this.setMode("all")),
      follow: make("Follow", "The last minute, as it passes", () => this.setMode("follow")),
    };
    this.place.tools.append(this.pressed.all, this.pressed.follow,
      make("−", "Zoom out", () => this.zoom(2)), make("+", "Zoom in", () => this.zoom(0.5)),
      make("◂", "Earlier", () => this.pan(-0.3)), make("▸", "Later", () => this.pan(0.3)),
      el("span", {class: "hint"}, "drag: zoom · shift-drag: move · ctrl-wheel, or wheel after a click: zoom · double-click: whole run"));
    this.press();
  }

  press() {
    for (const [mode, button] of Object.entries(this.pressed)) button.setAttribute("aria-pressed", mode === this.mode);
  }

  setMode(mode) {
    this.mode = mode;
    this.press();
    this.fit();
    this.load();
  }

  begin(bounds) { this.mode = "all"; this.reply = null; this.opened.clear(); this.press(); this.setBounds(bounds); }

  setBounds(bounds) {
    this.bounds = bounds[1] > bounds[0] ? bounds : [bounds[0], bounds[0] + 1];
    this.fit();
    if (this.mode !== "fixed" || !this.reply) this.load();
  }

  fit() {
    const [start, end] = this.bounds;
    if (this.mode === "all" || !this.view) this.view = [start, end];
    else if (this.mode === "follow") this.view = [Math.max(start, end - 60), end];
  }

  move(start, end) {
    const least = 1e-3, [first, last] = this.bounds, whole = last - first;
    let size = Math.min(Math.max(end - start, least), whole * 1.02);
    start = Math.min(Math.max(start, first - whole * 0.01), last + whole * 0.01 - size);
    this.view = [start, start + size];
    this.mode = "fixed";
    this.press();
    this.draw();
    this.load();
  }

  zoom(factor, at = 0.5) {
    const [start, end] = this.view, middle = start + (end - start) * at, size = (end - start) * factor;
    this.move(middle - size * at, middle + size * (1 - at));
  }

  pan(part) {
    const [start, end] = this.view, by = (end - start) * part;
    this.move(start + by, end + by);
  }

  width() { return Math.max(120, this.box.clientWidth - GUTTER - 8); }

  /* One request at a time; the newest viewport follows. */
  async load() {
    if (!this.view) return;
    if (this.busy) { this.wanted = true; return; }
    this.busy = true;
    try {
      do {
        this.wanted = false;
        const parameters = {from: this.view[0], to: this.view[1], pixels: Math.min(4000, Math.round(this.width())), open: [...this.opened].join(",")};
        const reply = await this.request("lanes", parameters);
        if (reply) this.take(reply);
      } while (this.wanted);
    } finally { this.busy = false; }
  }

  take(reply) {
    byId("untraced").hidden = reply.lanes.length > 0;
    for (const lane of reply.lanes) for (const row of lane.rows) {
      row.names = Object.keys(row.shares).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
      row.columns = row.names.map(name => Uint8Array.from(atob(row.shares[name]), letter => letter.charCodeAt(0)));
    }
    this.reply = reply;
    this.draw();
    this.legend();
    this.onView(reply, this.view);
  }

  legend() {
    const names = new Set(this.reply.lanes.flatMap(lane => Object.keys(lane.totals)));
    const sorted = [...names].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
    this.place.legend.replaceChildren(...sorted.map(name => {
      const swatch = el("span", {class: "swatch"});
      swatch.style.background = laneColor(name);
      return el("span", {}, swatch, name);
    }));
  }

  /* Where everything goes: [{lane, top, heights}], and the whole height. */
  layout() {
    let top = AXIS, before = null;
    const placed = [];
    for (const lane of this.reply.lanes) {
      if (lane.process !== before) { top += placed.length ? GAP : 0; placed.push({head: lane, top}); top += HEAD; before = lane.process; }
      const thin = lane.rows.length > 1;
      const heights = lane.rows.map(row => thin && row.at_once <= 1 ? THIN : ROW);
      placed.push({lane, top, heights});
      top += heights.reduce((sum, h) => sum + h + 1, 0) + 3;
    }
    return [placed, top + 4];
  }

  draw() {
    if (!this.reply) return;
    const [placed, height] = this.layout(), ratio = window.devicePixelRatio || 1, width = this.width();
    this.drawn = placed;
    const canvas = this.canvas;
    canvas.width = Math.round((width + GUTTER + 8) * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    this.axis(g, width, height);
    const many = new Set(this.reply.many);
    for (const {head, lane, top, heights} of placed) {
      if (head) {
        g.fillStyle = css("--text");
        g.font = "600 12px system-ui, sans-serif";
        const mark = many.has(head.role) ? (head.group ? "▸ " : "▾ ") : "";
        g.fillText(clip(g, mark + head.process, GUTTER - 8), 0, top + HEAD / 2);
        g.font = "12px system-ui, sans-serif";
        continue;
      }
      g.fillStyle = css("--quiet");
      g.fillText(clip(g, lane.lane, GUTTER - 80), 12, top + ROW / 2 - (heights[0] === THIN ? 4 : 0));
      this.share(g, lane, top + (heights[0] === THIN ? THIN / 2 : ROW / 2));
      let y = top;
      lane.rows.forEach((row, i) => { this.row(g, row, y, heights[i], width); y += heights[i] + 1; });
    }
    this.marks(g, width, height);
    canvas.dataset.drawn = "yes";
  }

  /* What a switching lane did most in this view, in the gutter. */
  share(g, lane, y) {
    const sums = Object.entries(lane.totals), all = sums.reduce((sum, [, s]) => sum + s, 0);
    if (!all || !lane.switches) return;
    const worked = sums.filter(([name]) => rank(name) === 0).reduce((sum, [, s]) => sum + s, 0);
    g.textAlign = "right";
    g.fillText(`${Math.round(100 * worked / all)} % work`, GUTTER - 10, y);
    g.textAlign = "left";
  }

  row(g, row, top, height, width) {
    const {from, to, pixels} = this.reply, [start, end] = this.view, per = (end - start) / width, one = (to - from) / pixels;
    g.fillStyle = css("--grid");
    g.fillRect(GUTTER, top, width, height);
    const names = row.names.length, shares = new Float32Array(names);
    let runFrom = 0, before = "";
    const flush = until => {
      if (!before) return;
      let y = top + height;
      const parts = before.split(",");
      for (let i = 0; i < names; i++) {
        const high = parts[i] / 64 * height;
        if (!high) continue;
        g.fillStyle = laneColor(row.names[i]);
        g.fillRect(GUTTER + runFrom, y - high, until - runFrom, high);
        y -= high;
      }
    };
    for (let x = 0; x < width; x++) {
      const a = (start + x * per - from) / one, b = Math.max(a + per / one, a + 1e-9);
      let first = Math.floor(a + 1e-6), last = Math.max(first + 1, Math.floor(b + 1e-6));
      let key = "";
      if (last > 0 && first < pixels) {
        first = Math.max(first, 0); last = Math.min(last, pixels);
        let any = false;
        for (let i = 0; i < names; i++) {
          let sum = 0;
          for (let c = first; c < last; c++) sum += row.columns[i][c];
          shares[i] = Math.ceil(sum / (last - first) / 255 * 64 - 1e-9);
          any = any || sum > 0;
        }
        key = any ? shares.join(",") : "";
      }
      if (key !== before) { flush(x); before = key; runFrom = x; }
    }
    flush(width);
    if (row.at_once > 1) {
      g.fillStyle = css("--quiet");
      g.textAlign = "right";
      g.fillText(`up to ${Math.round(row.at_once)}`, GUTTER - 10, top + height / 2);
      g.textAlign = "left";
    }
  }

  axis(g, width, height) {
    const [start, end] = this.view, zero = this.bounds[0], step = niceStep((end - start) / Math.max(2, width / 110));
    g.strokeStyle = css("--line");
    g.fillStyle = css("--quiet");
    for (let t = Math.ceil((start - zero) / step) * step; t <= end - zero; t += step) {
      const x = GUTTER + (t + zero - start) / (end - start) * width;
      g.beginPath(); g.moveTo(x + 0.5, AXIS - 6); g.lineTo(x + 0.5, height); g.stroke();
      const text = clock(t, step), fits = x + 4 + g.measureText(text).width < GUTTER + width + 8;
      g.textAlign = fits ? "left" : "right";
      g.fillText(text, fits ? x + 4 : x - 4, AXIS / 2);
      g.textAlign = "left";
    }
  }

  /* Events as triangles; losses as lines over all lanes. */
  marks(g, width, height) {
    const [start, end] = this.view;
    for (const event of this.events) {
      if (event.time < start || event.time > end) continue;
      const x = GUTTER + (event.time - start) / (end - start) * width;
      g.strokeStyle = g.fillStyle = eventColor(event);
      if (isBad(event)) { g.beginPath(); g.moveTo(x, AXIS - 4); g.lineTo(x, height); g.stroke(); }
      g.beginPath(); g.moveTo(x - 4, AXIS - 11); g.lineTo(x + 4, AXIS - 11); g.lineTo(x, AXIS - 3); g.fill();
    }
  }

  time(x) { return this.view[0] + (x - GUTTER) / this.width() * (this.view[1] - this.view[0]); }

  pointer() {
    const canvas = this.canvas, at = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    let from = null;
    canvas.addEventListener("pointerdown", event => {
      if (!this.reply) return;
      const [x, y] = at(event);
      if (x < GUTTER) { this.toggle(y); return; }
      from = {x, view: [...this.view], pan: event.shiftKey};
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", event => {
      const [x, y] = at(event);
      if (from && from.pan) {
        const by = (from.x - x) / this.width() * (from.view[1] - from.view[0]);
        this.move(from.view[0] + by, from.view[1] + by);
      } else if (from) {
        this.draw();
        const g = canvas.getContext("2d");
        g.fillStyle = "rgba(98,177,240,.3)";
        g.fillRect(Math.min(from.x, x), 0, Math.abs(x - from.x), canvas.clientHeight);
      } else this.hover(x, y, event);
    });
    canvas.addEventListener("pointerup", event => {
      const [x] = at(event);
      if (from && !from.pan && Math.abs(x - from.x) > 4) this.move(...[this.time(from.x), this.time(x)].sort((a, b) => a - b));
      from = null;
    });
    canvas.addEventListener("pointercancel", () => { from = null; });
    canvas.addEventListener("pointerleave", () => { this.place.tip.hidden = true; });
    canvas.addEventListener("dblclick", () => this.setMode("all"));
    canvas.addEventListener("wheel", event => {
      if (!this.reply || !(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return;
      event.preventDefault();
      const [x] = at(event), part = Math.min(1, Math.max(0, (x - GUTTER) / this.width()));
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / 800);
      else this.zoom(Math.exp(event.deltaY / 400), part);
    }, {passive: false});
    canvas.addEventListener("keydown", event => {
      const act = {ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.5), "-": () => this.zoom(2), "0": () => this.setMode("all")}[event.key];
      if (act) { event.preventDefault(); act(); }
    });
  }

  /* Open or close the group of a role. */
  toggle(y) {
    const found = this.drawn.find(({head, top}) => head && y >= top && y < top + HEAD);
    if (!found || !this.reply.many.includes(found.head.role)) return;
    const role = found.head.role;
    if (!this.opened.delete(role)) this.opened.add(role);
    this.load();
  }

  hover(x, y, event) {
    const tip = this.place.tip;
    const show = text => {
      tip.textContent = text;
      tip.hidden = !text;
      tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 300)}px`;
      tip.style.top = `${event.clientY + 16}px`;
    };
    if (!this.reply || x < GUTTER) { tip.hidden = true; return; }
    if (y < AXIS) {
      const near = this.events.find(one => Math.abs(GUTTER + (one.time - this.view[0]) / (this.view[1] - this.view[0]) * this.width() - x) < 6);
      show(near ? `${clock(near.time - this.bounds[0], 0.01)}  ${eventText(near)}` : "");
      return;
    }
    const found = this.drawn.find(({lane, top, heights}) => lane && y >= top && y < top + heights.reduce((sum, h) => sum + h + 1, 0));
    if (!found) { tip.hidden = true; return; }
    let row = 0, top = found.top;
    while (y >= top + found.heights[row] + 1 && row < found.heights.length - 1) top += found.heights[row++] + 1;
    const time = this.time(x), lane = found.lane, column = Math.floor((time - this.reply.from) / (this.reply.to - this.reply.from) * this.reply.pixels);
    const data = lane.rows[row], parts = data.names.map((name, i) => [name, data.columns[i][column] || 0]).filter(([, share]) => share).sort((a, b) => b[1] - a[1]);
    const head = `${lane.process} · ${lane.lane} · ${clock(time - this.bounds[0], 0.001)}`;
    show(`${head}\n${parts.map(([name, share]) => data.at_once > 1 ? `${name}: ${(share / 255 * data.at_once).toFixed(1)} at once` : `${name} ${Math.round(share / 2.55)} %`).join(", ") || "nothing"}`);
    if (embedded || lane.group || data.at_once > 1) return;
    clearTimeout(this.asked);
    this.asked = setTimeout(async () => {
      const span = await this.request("span", {process: lane.process, lane: lane.lane, row, time});
      if (!span || tip.hidden) return;
      const about = Object.entries(span.about).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
      show(`${head}\n${span.name}, ${seconds(span.end - span.start)}${about ? `\n${about}` : ""}`);
    }, 80);
  }
}

const BAD_EVENTS = /ended|refused|killed|lost|dropped|died|again|expired|fenced|failed/;
const isBad = event => BAD_EVENTS.test(event.event) && !(event.event === "ended" && event.about.code === 0) && event.about.reason !== "end";
const eventColor = event => isBad(event) ? css("--bad") : css("--good");
const eventText = event => `${event.process}: ${event.event} ${Object.entries(event.about).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")}`;

function clip(g, text, most) {
  if (g.measureText(text).width <= most) return text;
  while (text.length > 1 && g.measureText(text + "…").width > most) text = text.slice(0, -1);
  return text + "…";
}

function niceStep(least) {
  for (const step of [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400]) if (step >= least) return step;
  return Math.ceil(least / 86400) * 86400;
}

/* Seconds since the run began, as 1:02:03, 2:03 or 3.25 s. */
function clock(t, step) {
  const sign = t < 0 ? "−" : "", all = Math.abs(t);
  if (step < 1) { const digits = step < 0.01 ? 3 : step < 0.1 ? 2 : 1; return all < 60 ? `${sign}${all.toFixed(digits)} s` : `${sign}${Math.floor(all / 60)}:${(all % 60).toFixed(digits).padStart(digits + 3, "0")}`; }
  const h = Math.floor(all / 3600), m = Math.floor(all % 3600 / 60), s = Math.round(all % 60), two = n => String(n).padStart(2, "0");
  return h ? `${sign}${h}:${two(m)}:${two(s)}` : `${sign}${m}:${two(s)}`;
}

function seconds(s) {
  return s < 0.001 ? `${Math.round(s * 1e6)} µs` : s < 1 ? `${(s * 1e3).toPrecision(3)} ms` : s < 90 ? `${s.toPrecision(3)} s` : s < 5400 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s` : `${Math.floor(s / 3600)} h ${Math.round(s % 3600 / 60)} min`;
}
