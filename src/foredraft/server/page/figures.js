// The panel of figures: what the server says of speculation, as numbers and small charts.

const SVG = "http://www.w3.org/2000/svg";
const SECONDS = 60;
const SLICE = 0.5;
const WIDTH = 240;
const HEIGHT = 56;
const NUM_PATTERNS = 4;

const byId = (id) => document.getElementById(id);

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

// Fills that differ in more than colour: solid, stripes, dots, bars.
function patterns() {
  const defs = shape("defs", {});
  const marks = [
    [shape("rect", { width: 4, height: 4 })],
    [shape("path", { d: "M-1 1L1 -1M0 4L4 0M3 5L5 3", class: "stroke" })],
    [shape("circle", { cx: 2, cy: 2, r: 1.3 })],
    [shape("rect", { width: 4, height: 2 })],
  ];
  marks.forEach((shapes, index) => {
    const pattern = shape("pattern", { id: `fill-${index}`, width: 4, height: 4, patternUnits: "userSpaceOnUse" });
    pattern.classList.add(`series-${index}`);
    pattern.append(...shapes);
    defs.append(pattern);
  });
  return defs;
}

export class Figures {
  #plain = [];

  show(state) {
    this.#numbers(state);
    this.#rate(state);
    this.#drafts(state);
    acceptance(state.acceptance_per_position);
  }

  unreachable(message) {
    byId("reason").textContent = message;
    for (const id of ["rate", "plain-rate", "speedup"]) byId(id).textContent = "–";
    byId("live-line").textContent = "";
  }

  #numbers(state) {
    const isBusy = state.tokens_per_second > 0;
    byId("model").textContent = state.model;
    byId("rate").textContent = isBusy ? state.tokens_per_second.toFixed(1) : "–";
    byId("plain-rate").textContent = isBusy ? state.plain_tokens_per_second.toFixed(1) : "–";
    byId("speedup").textContent = isBusy ? `${state.speedup_estimate.toFixed(2)} ×` : "–";
    byId("reason").textContent = `Speculation is ${state.state}. ${state.reason}`;
    byId("running").textContent = state.running;
    byId("waiting").textContent = state.waiting;
    const used = Math.round(100 * state.kv_usage);
    byId("kv").textContent = `${used} % used`;
    byId("kv-bar").style.width = `${used}%`;
    byId("pass-ms").textContent = isBusy ? `${state.pass_ms.toFixed(1)} ms` : "–";
    byId("draft-ms").textContent = isBusy ? `${state.draft_ms.toFixed(2)} ms` : "–";
    byId("exactness").textContent =
      state.exactness === "bitwise" ? "bit for bit the same as plain" : "the same as plain up to rounding";
    byId("live-line").textContent = isBusy
      ? `${state.tokens_per_second.toFixed(1)} tokens/s · plain ≈ ${state.plain_tokens_per_second.toFixed(1)} · ` +
        `K ${state.k.toFixed(1)} · ${state.drafter}`
      : "";
  }

  #rate(state) {
    const since = state.now - SECONDS;
    this.#plain = this.#plain.filter((point) => point.t >= since);
    if (state.tokens_per_second > 0) this.#plain.push({ t: state.now, value: state.plain_tokens_per_second });
    // The last stretch has only begun, so its sum is too small yet.
    const rate = state.history
      .filter((part) => part.t >= since && state.now - part.t >= SLICE)
      .map((part) => ({ t: part.t, value: part.tokens_per_second }));
    const top = roundUp(Math.max(1, ...rate.map((point) => point.value), ...this.#plain.map((point) => point.value)));
    byId("rate-top").textContent = `0–${top}`;
    const chart = byId("rate-chart");
    chart.replaceChildren(
      ...lines(this.#plain, state.now, top, "line plain-line"),
      ...lines(rate, state.now, top, "line rate-line"),
    );
    chart.setAttribute("aria-label", `Tokens per second over the last minute, at most ${top}`);
  }

  #drafts(state) {
    const names = state.methods.filter((name) => name !== "auto" && name !== "none");
    const parts = state.history.filter((part) => part.t >= state.now - SECONDS && part.k > 0);
    const top = Math.max(4, Math.ceil(Math.max(0, ...parts.map((part) => part.k))));
    const seen = [...new Set(parts.map((part) => part.drafter))];
    for (const name of seen) if (!names.includes(name)) names.push(name);
    const patternOf = (name) => names.indexOf(name) % NUM_PATTERNS;
    const bars = parts.map((part) => {
      const height = (HEIGHT * part.k) / top;
      const x = place(part.t, state.now);
      const width = (WIDTH * SLICE) / SECONDS;
      return shape("rect", { x, y: HEIGHT - height, width, height, fill: `url(#fill-${patternOf(part.drafter)})` });
    });
    byId("k-top").textContent = state.k > 0 ? `now ${state.k.toFixed(1)} of 0–${top}` : `0–${top}`;
    const chart = byId("k-chart");
    chart.replaceChildren(patterns(), ...bars);
    chart.setAttribute("aria-label", `Mean draft length K over the last minute, now ${state.k.toFixed(1)}`);
    byId("drafters").replaceChildren(...seen.map((name) => drafterItem(name, patternOf(name))));
  }
}

function drafterItem(name, pattern) {
  const item = document.createElement("li");
  const swatch = shape("svg", { viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true" });
  swatch.append(shape("rect", { width: 12, height: 12, fill: `url(#fill-${pattern})` }));
  item.append(swatch, name);
  return item;
}

function place(t, now) {
  return WIDTH * (1 - (now - t) / SECONDS);
}

// Polylines through points, with a gap wherever the engine had nothing to do.
function lines(points, now, top, className) {
  const runs = [];
  let before = -Infinity;
  for (const point of points) {
    if (point.t - before > 4 * SLICE) runs.push([]);
    runs.at(-1).push(`${place(point.t, now).toFixed(1)},${(HEIGHT - 1 - ((HEIGHT - 2) * point.value) / top).toFixed(1)}`);
    before = point.t;
  }
  return runs.map((run) => shape("polyline", { points: run.join(" "), class: className }));
}

function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return Math.ceil(value / unit) * unit;
}

function acceptance(shares) {
  byId("no-acceptance").hidden = shares.length > 0;
  byId("acceptance").replaceChildren(
    ...shares.map((share, index) => {
      const item = document.createElement("li");
      const bar = document.createElement("span");
      bar.className = "bar";
      bar.style.height = `${(100 * share).toFixed(1)}%`;
      const column = document.createElement("span");
      column.className = "column";
      column.setAttribute("aria-hidden", "true");
      column.append(bar);
      const percent = document.createElement("span");
      percent.textContent = `${Math.round(100 * share)}%`;
      const position = document.createElement("span");
      position.className = "muted";
      position.textContent = index + 1;
      position.setAttribute("aria-hidden", "true");
      item.append(percent, column, position);
      return item;
    }),
  );
}
