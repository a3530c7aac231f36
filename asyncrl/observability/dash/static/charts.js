"use strict";
/* Charts over versions. One run: all lines of a chart, the spread as a band; several: the first line of each run. */

const CHARTS = [
  ["Does it learn?"],
  {title: "Reward", about: "mean of the rollouts, and one standard deviation", keys: ["rollout/reward/mean"], spread: "rollout/reward/std"},
  {title: "Held-out scores", about: "on tasks it never trains on: must rise with the reward", prefix: "eval/", evaluations: true, not: /unscored/},
  {title: "Reward by part", about: "a part that runs away alone is a hint of a hacked reward", prefix: "rollout/reward/part/", least: 2},
  {title: "Length of rollouts", about: "policy tokens: mean, shortest and longest", keys: ["rollout/length/mean", "rollout/length/min", "rollout/length/max"]},
  {title: "Length by age", about: "of groups up to one version old, and of older ones: longer old ones are the bias of whoever finishes first", keys: ["rollout/length/fresh", "rollout/length/old"], from: 0},
  {title: "Cut off by a limit", about: "share of rollouts that a limit of tokens ended", keys: ["rollout/length/truncated"], from: 0},
  {title: "Entropy", about: "nats a token; near 0 nothing new is tried", keys: ["train/entropy"], from: 0},
  ["Is the data fit to learn from?"],
  {title: "Staleness", about: "versions between a group's oldest token and its training", keys: ["train/staleness/max", "train/staleness/mean", "train/staleness/in_flight", "train/staleness/in_queue"], bound: true, from: 0},
  {title: "Effective sample size", about: "share of tokens that count after importance weights; 1 is on-policy", keys: ["train/effective_sample_size"]},
  {title: "Approximate KL", about: "between the policy that wrote and the one that learns", keys: ["train/approx_kl"]},
  {title: "Held back by the loss", about: "shares of tokens: clipped, of weight 0, rejected", keys: ["train/clip_fraction", "train/zero_weight_fraction", "train/rejected_fraction"], from: 0},
  {title: "Log-prob gap", about: "engine against learner at the same weights; large: something is broken", keys: ["train/logprob_gap/train/max", "train/logprob_gap/train/mean"], from: 0},
  {title: "Flat groups", about: "share of groups in which all rollouts are equally good: nothing to learn", keys: ["rollout/flat_group_fraction"], from: 0},
  ["Is the hardware busy?"],
  {title: "Busy", about: "share of the time that was work", keys: ["perf/busy/learner", "perf/busy/generator"], from: 0, to: 1},
  {title: "The learner waits for", about: "share of its time", prefix: "perf/wait_fraction/", from: 0},
  {title: "Tokens a second", about: "made by generators; trained on, prompts included", keys: ["perf/generator/tokens_per_s", "perf/learner/tokens_per_s"], from: 0},
  {title: "Seconds a version", about: "", keys: ["perf/step_s"], from: 0},
  {title: "Weights on their way", about: "medians in ms: transfer, pause of decoding; the learner's copy", keys: ["sync/fetch_ms_p50", "sync/pause_ms_p50", "sync/publish_ms"], from: 0},
  {title: "Any other metric", about: "", choose: true},
];

const HEIGHT = 170;
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runColor = at => css(`--run-${at % 6}`);
const number = value => value == null ? "–" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") :
  value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : String(+value.toPrecision(3));

function axis(extra) {
  return {stroke: css("--quiet"), grid: {stroke: css("--grid"), width: 1}, ticks: {stroke: css("--grid"), size: 4},
    font: "11px system-ui, sans-serif", ...extra};
}

class Charts {
  constructor(place) {
    this.place = place;
    this.plots = new Map();
    this.cards = new Map();
    this.chosen = "";
    this.version = null;  // the x range that the user has zoomed to
    this.sizes = new ResizeObserver(entries => {
      for (const {target, contentRect} of entries) {
        const plot = this.plots.get(target.dataset.title);
        if (plot && contentRect.width > 0) plot.setSize({width: contentRect.width, height: HEIGHT});
      }
    });
    for (const chart of CHARTS) place.append(Array.isArray(chart) ? el("h3", {}, chart[0]) : this.card(chart));
  }

  card(chart) {
    const body = el("div", {});
    body.dataset.title = chart.title;
    const card = el("div", {class: "chart"}, el("h4", {}, chart.title), el("div", {class: "about"}, chart.about || " "), body);
    if (chart.choose) {
      this.choice = el("select", {"aria-label": "metric"});
      this.choice.addEventListener("change", () => { this.chosen = this.choice.value; this.draw(this.runs); });
      card.children[1].replaceChildren(this.choice);
    }
    this.cards.set(chart.title, {card, body});
    this.sizes.observe(body);
    return card;
  }

  /* runs: [{name, at, metrics, evaluations, overview}] */
  draw(runs) {
    this.runs = runs;
    const names = new Set(runs.flatMap(run => Object.keys(run.metrics)));
    if (this.choice && this.choice.options.length !== names.size) {
      this.choice.replaceChildren(...[...names].sort().map(name => el("option", {value: name}, name)));
      this.choice.value = this.chosen = names.has(this.chosen) ? this.chosen : "train/grad_norm";
    }
    for (const chart of CHARTS) if (!Array.isArray(chart)) this.drawOne(chart, runs);
  }

  drawOne(chart, runs) {
    const {card, body} = this.cards.get(chart.title);
    const lines = runs.flatMap(run => this.lines(chart, run)).slice(0, 12);
    const shown = lines.length >= (chart.least || 1);
    card.hidden = !shown;
    if (!shown) return;
    const shared = runs.length > 1;
    const kept = shared ? runs.flatMap(run => lines.filter(line => line.run === run).slice(0, chart.prefix ? 3 : 1)) : lines;
    const banded = !shared && chart.spread && runs[0].metrics[chart.spread];
    const tables = kept.map(line => [line.x, line.y]);
    if (banded) {
      const [line] = kept, spread = runs[0].metrics[chart.spread];
      tables.push([line.x, line.y.map((y, i) => y == null ? null : y + (spread[i] ?? 0))],
        [line.x, line.y.map((y, i) => y == null ? null : y - (spread[i] ?? 0))]);
    }
    const bound = chart.bound ? runs[0].overview.bound : null;
    if (bound != null) tables.push([kept[0].x, kept[0].x.map(() => bound)]);
    const data = uPlot.join(tables);
    const series = [{label: "version"}, ...kept.map((line, i) => {
      const own = kept.filter(one => one.run === line.run);
      return this.series(line, i, shared, own.length > 1 ? own.indexOf(line) : -1);
    })];
    if (banded) series.push({label: "", stroke: "transparent", points: {show: false}}, {label: "", stroke: "transparent", points: {show: false}});
    if (bound != null) series.push({label: "bound", stroke: css("--bad"), dash: [6, 4], width: 1.5, points: {show: false}, value: (_, v) => number(v)});
    const shape = series.map(one => one.label).join("|");
    const before = this.plots.get(chart.title);
    if (before && before.shape === shape) {
      before.setData(data, !this.zoomed);
      latest(before);
      return;
    }
    if (before) before.destroy();
    const n = kept.length;
    const plot = new uPlot({
      width: body.clientWidth || 360, height: HEIGHT, series,
      bands: banded ? [{series: [n + 1, n + 2], fill: `color-mix(in srgb, ${runColor(runs[0].at)} 18%, transparent)`}] : [],
      scales: {x: {time: false}, y: {range: (_, lo, hi) => range(chart, lo, hi)}},
      axes: [axis({space: 60, size: 26}), axis({size: 52, values: (_, ticks) => ticks.map(v => v == null ? "" : number(v))})],
      cursor: {sync: {key: "version"}, drag: {x: true, y: false}, points: {size: 6}},
      legend: {live: true}, padding: [8, 8, 0, 0],
      hooks: {setSelect: [() => { this.zoomed = true; }], setCursor: [latest]},
    }, data, body);
    if (banded) [...body.querySelectorAll(".u-series")].forEach((row, i) => { if (i > n && i <= n + 2) row.classList.add("hidden"); });
    body.ondblclick = () => { this.zoomed = false; };
    latest(plot);
    plot.shape = shape;
    this.plots.set(chart.title, plot);
  }

  lines(chart, run) {
    const table = chart.evaluations ? run.evaluations : run.metrics;
    let keys = chart.choose ? [this.chosen] : chart.keys;
    if (chart.prefix) keys = Object.keys(table).filter(key => key.startsWith(chart.prefix) && !(chart.not && chart.not.test(key)));
    const cut = chart.prefix || common(keys);
    return keys.filter(key => table[key] && table[key].some(v => v != null))
      .map(key => ({run, x: table.version, y: table[key], label: chart.choose || keys.length === 1 ? key.split("/").slice(-1)[0] : key.slice(cut.length)}));
  }

  /* nth: of the lines of its run, −1 for the only one. */
  series(line, at, shared, nth) {
    const few = line.y.filter(v => v != null).length < 30;
    return {
      label: shared ? (nth < 0 ? line.run.name : `${line.run.name} ${line.label}`) : line.label,
      stroke: shared ? runColor(line.run.at) : runColor(line.run.at + at), width: at === 0 || shared ? 2 : 1.3,
      dash: shared && nth > 0 ? [nth === 1 ? 6 : 2, 3] : undefined,
      points: {show: few, size: 4}, spanGaps: true, value: (_, v) => number(v),
    };
  }

  theme() {
    for (const plot of this.plots.values()) plot.destroy();
    this.plots.clear();
    if (this.runs) this.draw(this.runs);
  }
}

/* Without a cursor the legend has the newest values. */
function latest(plot) {
  if (plot.cursor.idx == null && plot.data[0].length) plot.setLegend({idx: plot.data[0].length - 1});
}

function common(keys) {
  let cut = keys[0].slice(0, keys[0].lastIndexOf("/") + 1);
  while (cut && !keys.every(key => key.startsWith(cut))) cut = cut.slice(0, cut.slice(0, -1).lastIndexOf("/") + 1);
  return cut;
}

function range(chart, lo, hi) {
  if (lo == null) return [0, 1];
  if (chart.from != null) lo = Math.min(lo, chart.from);
  if (chart.to != null) hi = Math.max(hi, chart.to);
  const room = (hi - lo || Math.abs(hi) || 1) * 0.08;
  return [chart.from != null && lo >= chart.from ? chart.from : lo - room, hi + room];
}

/* Text is put into text nodes alone: whatever a run holds, none of it becomes markup. */
function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value != null && value !== false) made.setAttribute(name, value === true ? "" : value);
  made.append(...children.filter(child => child != null));
  return made;
}
