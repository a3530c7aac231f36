"use strict";
/* Rollouts in readable form. Their text is hostile: it goes into text nodes only. */

/* Behind tokens: by version from light to dark; by the difference of log-probs from nothing to strong. */
const VERSION_COLORS = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#f0e442"];

class Rollouts {
  constructor(place, request, imageOf) {
    this.place = place;
    this.request = request;
    this.imageOf = imageOf;
    const input = (name, label) => {
      const field = el("input", {type: "number", "aria-label": label, step: "any"});
      field.addEventListener("change", () => this.load());
      this[name] = field;
      return field;
    };
    this.by = el("select", {"aria-label": "tokens are marked by"}, ...["version", "log-prob difference", "log-prob", "nothing"].map(one => el("option", {}, one)));
    this.by.addEventListener("change", () => this.draw());
    this.found = el("span", {class: "hint"});
    place.filters.append(el("label", {}, "version ", input("from", "from version"), " to ", input("to", "to version")),
      el("label", {}, "reward ", input("least", "least reward"), " to ", input("most", "most reward")),
      el("label", {}, "tokens marked by ", this.by), this.found);
  }

  async load() {
    const query = {from: this.from.value, to: this.to.value, least: this.least.value, most: this.most.value};
    const reply = await this.request("rollouts", query);
    if (!reply) return;
    this.reply = reply;
    this.draw();
  }

  draw() {
    if (!this.reply) return;
    const {rows, found} = this.reply, opened = new Set([...this.place.list.querySelectorAll("details[open]")].map(one => one.dataset.key));
    this.found.textContent = found > rows.length ? `the newest ${rows.length} of ${found}` : `${found}`;
    const rewards = rows.map(row => row.reward), low = Math.min(...rewards), high = Math.max(...rewards);
    this.place.list.replaceChildren(...rows.map((row, i) => this.card(row, `${row.version}/${row.ordinal}/${i}`, opened, low, high)));
    if (!rows.length) this.place.list.append(el("p", {class: "quiet"}, "None yet: the learner writes some every telemetry.rollouts_every versions."));
  }

  card(row, key, opened, low, high) {
    const place = high > low ? (row.reward - low) / (high - low) : 0.5;
    const kind = place > 0.66 ? "high" : place < 0.34 ? "low" : "";
    const line = `${asText(row.prompt).slice(-80)}  ⟶  ${asText(row.answer).slice(0, 160)}`.replace(/\s+/g, " ");
    const card = el("details", {class: "rollout"}, el("summary", {},
      el("span", {class: `reward ${kind}`}, number(row.reward)), el("span", {class: "quiet"}, `version ${row.version}, task ${row.ordinal}`),
      el("span", {class: "line"}, line), el("span", {class: "quiet"}, `${row.tokens} tokens`)));
    card.dataset.key = key;
    let filled = false;
    const fill = () => { if (card.open && !filled) { filled = true; card.append(...this.body(row)); } };
    card.addEventListener("toggle", fill);
    if (opened.has(key)) { card.open = true; fill(); }
    return card;
  }

  body(row) {
    const facts = el("div", {class: "facts"});
    const fact = (name, value) => facts.append(el("span", {}, `${name} `, el("b", {}, value)));
    fact("reward", number(row.reward));
    for (const [name, value] of Object.entries(row.parts || {})) fact(`· ${name}`, number(value));
    fact("ended by", asText(row.finish));
    const versions = row.versions || [];
    if (versions.length) fact("written by versions", versions[0] === versions[versions.length - 1] ? `${versions[0]}` : `${versions[0]} to ${versions[versions.length - 1]}`);
    fact("trained at", `${row.version}`);
    const segments = Array.isArray(row.segments) ? row.segments : [
      {prompt: row.prompt, answer: row.answer}, ...(row.later_segments || [])];
    const parts = [facts, ...segments.map((segment, i) => this.segment(segment, i, segments.length))];
    const images = (row.images || []).map(path => el("img", {src: this.imageOf(String(path)), loading: "lazy", alt: "picture of the rollout"}));
    if (images.length) parts.push(el("div", {class: "pictures"}, ...images));
    return parts;
  }

  segment(segment, at, count) {
    const box = el("div", {class: "text"});
    if (count > 1) box.append(el("div", {class: "quiet"}, `segment ${at + 1} of ${count}`));
    if (!Array.isArray(segment)) {
      box.append(el("span", {class: "prompt"}, asText(segment.prompt)), el("span", {}, asText(segment.answer)));
      return box;
    }
    for (const piece of segment) box.append(piece.by ? el("span", {class: piece.by === "prompt" ? "prompt" : "environment"}, asText(piece.text)) : this.token(piece));
    return box;
  }

  token(piece) {
    const made = el("span", {class: "token"}, asText(piece.text));
    const off = piece.logprob != null && piece.learner_logprob != null ? piece.learner_logprob - piece.logprob : null;
    made.title = [`version ${piece.version}`, piece.logprob != null ? `log-prob ${number(piece.logprob)}` : "",
      off != null ? `learner ${number(piece.learner_logprob)}, difference ${number(off)}` : ""].filter(Boolean).join("\n");
    const by = this.by.value;
    if (by === "version" && piece.version != null) made.style.borderColor = VERSION_COLORS[((piece.version % 7) + 7) % 7];
    else if (by === "log-prob difference" && off != null) made.style.background = tint(off > 0 ? "#0072b2" : "#d55e00", Math.min(1, Math.abs(off)));
    else if (by === "log-prob" && piece.logprob != null) made.style.background = tint("#8c4b92", Math.min(1, -piece.logprob / 5));
    return made;
  }
}

const tint = (color, part) => `color-mix(in srgb, ${color} ${Math.round(70 * part)}%, transparent)`;
const asText = value => value == null ? "" : typeof value === "string" ? value : JSON.stringify(value);
