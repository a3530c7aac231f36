"use strict";
/* The page: requests what is new every few seconds and hands it to its parts. A report has the answers in itself. */

const POLL_MS = 2000;
const byId = id => document.getElementById(id);
const embedded = byId("embedded") ? JSON.parse(byId("embedded").textContent) : null;

class Page {
  constructor() {
    this.at = 0;
    this.states = [];
    this.charts = new Charts(byId("charts"));
    this.lanes = new Lanes({lanes: byId("lanes"), tools: byId("tools"), legend: byId("legend"), tip: byId("tip")},
      (path, parameters) => this.request(path, parameters), (reply, view) => this.figures(reply, view));
    this.rollouts = new Rollouts({filters: byId("filters"), list: byId("rollouts")}, (path, parameters) => this.request(path, parameters), path => this.image(path));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.charts.theme(); this.lanes.draw(); this.plotted = null; if (this.lanes.reply) this.figures(this.lanes.reply, this.lanes.view); });
  }

  async request(path, parameters = {}, run = this.at) {
    if (embedded) return fromReport(path, parameters, run);
    const query = new URLSearchParams({run, ...parameters});
    try {
      const reply = await fetch(`api/${path}?${query}`);
      if (!reply.ok) throw new Error((await reply.text()).trim());
      byId("connection").textContent = "";
      return run === this.at || path === "state" ? await reply.json() : null;
    } catch (error) {
      byId("connection").textContent = error instanceof TypeError ? "the server of this page does not answer" : error.message;
      return null;
    }
  }

  image(path) {
    if (embedded) return embedded.runs[this.at].images[path] || "data:,";
    return `api/image?${new URLSearchParams({run: this.at, path})}`;
  }

  async begin() {
    this.names = await this.request("runs", {}, 0);
    if (!this.names) { setTimeout(() => this.begin(), POLL_MS); return; }
    await this.poll();
    await this.show(0);
    byId("runs").dataset.ready = "yes";
    if (!embedded) this.again();
  }

  async again() {
    for (;;) {
      await new Promise(done => setTimeout(done, document.hidden ? 4 * POLL_MS : POLL_MS));
      await this.poll();
      this.update();
    }
  }

  async poll() {
    for (let run = 0; run < this.names.length; run++) {
      const before = this.states[run], last = before ? before.metrics.version : null;
      const reply = await this.request("state", before ? {epoch: before.epoch, after: last && last.length ? last[last.length - 1] : 0} : {}, run);
      if (!reply) continue;
      reply.at = run;
      if (before && before.epoch === reply.epoch) reply.metrics = appended(before.metrics, reply.metrics);
      this.states[run] = reply;
    }
  }

  async show(run) {
    this.at = run;
    this.tabs();
    if (!this.states[run]) return;
    this.seen = -1;
    this.update();
    this.lanes.begin(this.states[run].bounds);
  }

  update() {
    const state = this.states[this.at];
    if (!state) return;
    document.title = `${state.name} · asyncrl`;
    this.progress(state);
    this.findings(state);
    this.tiles(state);
    this.charts.draw(this.states.filter(Boolean));
    this.weights(state.weights);
    this.events(state);
    this.lanes.events = state.events;
    if (this.lanes.view && !embedded) this.lanes.setBounds(state.bounds);
    if (state.rollouts !== this.seen) { this.seen = state.rollouts; this.rollouts.load(); }
  }

  tabs() {
    byId("runs").replaceChildren(...this.names.map((run, i) => {
      if (this.names.length === 1) return el("span", {}, run.name);
      const tab = el("button", {type: "button", title: run.folder, "aria-pressed": String(i === this.at)}, run.name);
      tab.style.borderColor = runColor(i);
      tab.addEventListener("click", () => this.show(i));
      return tab;
    }));
  }

  progress({overview}) {
    const known = overview.versions != null, badge = el("span", {class: `state ${overview.state}`}, {done: "done", target: "done: target reached", exhausted: "done: no tasks left"}[overview.state] || overview.state);
    const bar = known ? el("progress", {max: overview.versions, value: overview.version}) : null;
    const words = [`version ${overview.version}${known ? ` of ${overview.versions}` : ""}`];
    if (overview.pace) words.push(overview.pace >= 0.1 ? `${number(overview.pace)} versions/s` : `${seconds(1 / overview.pace)} a version`);
    if (overview.left_s != null) words.push(`${seconds(overview.left_s)} left`);
    byId("progress").replaceChildren(badge, ...(bar ? [bar] : []), el("span", {}, words.join(" · ")), el("span", {class: "quiet"}, overview.bottleneck));
  }

  findings({findings = []}) {
    byId("findings").replaceChildren(...findings.map(one => el("div", {class: `finding ${one.severity}`},
      el("b", {}, {wrong: "Wrong", warning: "Look here", note: "Note"}[one.severity] || one.severity), one.sentence,
      ...[one.evidence && `${one.evidence}.`, one.remedy].filter(Boolean).map(text => el("span", {class: "remedy"}, ` ${text}`)))));
  }

  /* A tile is bad on what a stranger should see first; the limits are coarse. */
  tiles({metrics, evaluations, overview, weights}) {
    const tiles = [], of = (table, key) => (table[key] || []).filter(value => value != null);
    const add = (name, value, note, bad = false) => tiles.push(el("div", {class: bad ? "tile bad" : "tile"}, el("div", {class: "name"}, name), el("div", {class: "value"}, value), el("div", {class: "note"}, note || " ")));
    const ends = (table, key, count) => { const values = of(table, key); return values.length ? [mean(values.slice(0, count)), mean(values.slice(-count))] : null; };
    const percent = value => `${Math.round(100 * value)} %`;
    const reward = ends(metrics, "rollout/reward/mean", 5);
    if (reward) add("Reward", number(reward[1]), `at first ${number(reward[0])}`);
    const score = Object.keys(evaluations).find(key => key === "eval/accuracy") || Object.keys(evaluations).find(key => key.startsWith("eval/") && !key.includes("unscored"));
    const held = score && ends(evaluations, score, 1);
    if (held) {
      const falls = held[1] < held[0] - 0.05, hacked = falls && reward && reward[1] > reward[0];
      add(`Held-out ${score.slice(5)}`, number(held[1]), `at first ${number(held[0])}${hacked ? ": it falls while the reward rises" : ""}`, falls);
    }
    const stale = of(metrics, "train/staleness/max"), middle = of(metrics, "train/staleness/mean");
    if (stale.length) add("Staleness, mean", number(mean(middle.slice(-5))), `at most ${Math.max(...stale)}${overview.bound != null ? ` of ${overview.bound} allowed` : ""}`);
    const size = of(metrics, "train/effective_sample_size"), least = [...size.slice(-20), 1].sort((a, b) => a - b)[Math.min(2, size.length)];  // two outliers are none
    if (size.length) add("Effective sample size", percent(mean(size.slice(-20))), least < 0.5 ? `down to ${percent(least)}: old data hardly counts` : "of the tokens trained on", least < 0.5);
    const made = weights.filter(row => row.groups).sort((a, b) => a.groups - b.groups);
    if (made.length > 1) {
      const [slow] = made, share = slow.groups / made[made.length - 1].groups;
      add("Slowest generator", percent(share), `${slow.generator}, of the fastest one's groups`, share < 0.5);
    }
    for (const [name, key] of [["Learner busy", "perf/busy/learner"], ["Generators busy", "perf/busy/generator"]]) {
      const [values, took] = [key, "perf/step_s"].map(column => (metrics[column] || []).slice(-10));
      const known = values.map((value, i) => [value, took[i]]).filter(([value, s]) => value != null && s > 0);
      const whole = known.reduce((sum, [, s]) => sum + s, 0);
      if (whole) add(name, percent(known.reduce((sum, [value, s]) => sum + value * s, 0) / whole), "of the time of the last 10 versions");
    }
    const speed = of(metrics, "perf/generator/tokens_per_s"), count = of(metrics, "rollout/generators");
    if (speed.length) add("Tokens a second", number(mean(speed.slice(-5))), count.length ? `by ${count[count.length - 1]} generator${count[count.length - 1] === 1 ? "" : "s"}` : "");
    byId("tiles").replaceChildren(...tiles);
  }

  /* The queue over time, right below the lanes and as wide. */
  figures({figures}, view) {
    const keys = ["queue/ready", "queue/leased", "queue/pending", "queue/claimed", "queue/lacking_columns"].filter(key => (figures[key] || []).some(value => value > 0));
    const place = byId("queue");
    if (!keys.length) { place.replaceChildren(); this.plotted = null; return; }
    const ages = "queue/oldest_lease_s", oldest = Math.ceil(Math.max(0, ...(figures[ages] || []))), aged = oldest > 0;
    const data = [figures.times, ...keys.map(key => figures[key]), ...(aged ? [figures[ages]] : [])];
    const shape = keys.join() + oldest, width = this.lanes.width() + GUTTER + 8;
    if (this.plotted && this.plot.shape === shape && this.plot.width === width) {
      this.plot.setData(data, false);
      this.plot.setScale("x", {min: view[0], max: view[1]});
      return;
    }
    place.replaceChildren();
    const zero = () => this.lanes.bounds[0], line = (label, i, extra) => ({label, stroke: runColor(i), width: 1.5, points: {show: false}, spanGaps: true, value: (_, v) => number(v), ...extra});
    this.plot = new uPlot({
      width, height: 130,
      series: [{label: "queue at", value: (_, v) => v == null ? "–" : clock(v - zero(), 0.1)}, ...keys.map((key, i) => line(`groups ${key.slice(6)}`, i)), ...(aged ? [line(`oldest lease, s (dashed, at most ${oldest})`, 5, {scale: "s", dash: [4, 3]})] : [])],
      scales: {x: {time: false, range: () => this.lanes.view}, y: {range: (_, lo, hi) => [0, Math.max(1, hi * 1.05)]}, s: {range: (_, lo, hi) => [0, Math.max(1, hi * 1.05)]}},
      axes: [axis({show: false}), axis({size: GUTTER, label: "groups in the queue", labelSize: 130, labelFont: "12px system-ui, sans-serif"})],
      cursor: {drag: {x: false}}, padding: [6, 8, 2, 0],
    }, data, place);
    this.plot.shape = shape;
    this.plotted = true;
  }

  weights(rows) {
    if (!rows.length) { byId("weights").replaceChildren(el("p", {class: "quiet"}, "No trace of generators: telemetry.trace_mb is 0, or they have not begun.")); return; }
    table(byId("weights"), ["generator", "holds version", "behind", "fetch", "flip", "size", "groups"], rows.map(row => [row.generator,
      row.held ?? "–", {text: row.lag ?? "–", late: row.lag > 2}, row.fetch_ms == null ? "–" : seconds(row.fetch_ms / 1e3), row.flip_ms == null ? "–" : seconds(row.flip_ms / 1e3), row.bytes == null ? "–" : bytes(row.bytes), row.groups]));
  }

  events({events, bounds}) {
    if (!events.length) { byId("events").replaceChildren(el("p", {class: "quiet"}, "Nobody has joined, left or been refused.")); return; }
    table(byId("events"), ["at", "process", "event", ""], [...events].reverse().map(event => [clock(event.time - bounds[0], 0.1), event.process,
      {text: event.event, late: isBad(event)}, {text: Object.entries(event.about).map(([key, value]) => `${key} ${asText(value)}`).join(", "), wide: true}]), 0);
  }
}

function table(place, heads, rows, numbersFrom = 1) {
  const top = place.firstElementChild ? place.firstElementChild.scrollTop : 0;
  const isNumber = i => numbersFrom && i >= numbersFrom;
  const body = rows.map(row => el("tr", {}, ...row.map((cell, i) => {
    const {text, late, wide} = cell !== null && typeof cell === "object" ? cell : {text: cell};
    return el("td", {class: [isNumber(i) ? "number" : "", late ? "late" : "", wide ? "wide" : ""].join(" ")}, String(text));
  })));
  place.replaceChildren(el("div", {class: "scroll"}, el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head, i) => el("th", {class: isNumber(i) ? "number" : ""}, head)))), el("tbody", {}, ...body))));
  place.firstElementChild.scrollTop = top;
}

/* Columns behind columns; a key that only one of both has is null in the other. */
function appended(before, more) {
  const old = (before.version || []).length, add = (more.version || []).length, joined = {};
  if (!add) return before;
  for (const key of new Set([...Object.keys(before), ...Object.keys(more)])) joined[key] = [...(before[key] || Array(old).fill(null)), ...(more[key] || Array(add).fill(null))];
  return joined;
}

const mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;
const bytes = n => n >= 1e9 ? `${(n / 1e9).toPrecision(3)} GB` : n >= 1e6 ? `${(n / 1e6).toPrecision(3)} MB` : `${Math.round(n / 1e3)} kB`;

/* A report answers for the server. Its lanes are one reduction of the whole run, which the canvas cuts to the viewport. */
function fromReport(path, parameters, run) {
  const data = embedded.runs[run];
  if (path === "runs") return embedded.runs.map(one => ({name: one.state.name, folder: ""}));
  if (path === "state") return data.state;
  if (path === "lanes") return data.lanes;
  if (path === "rollouts") {
    const within = (value, least, most) => (least === "" || value >= +least) && (most === "" || value <= +most);
    const rows = data.rollouts.rows.filter(row => within(row.version, parameters.from, parameters.to) && within(row.reward, parameters.least, parameters.most));
    return {found: rows.length, rows};
  }
  return null;
}

new Page().begin();
