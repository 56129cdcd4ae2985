// Pictures of numbers, as SVG elements.

import { say, set, svg } from "./dom.js";
import { brief, count, latency, rate } from "./format.js";
import { edges, Latency } from "./report.js";

const WIDTH = 300;
const HEIGHT = 48;

/** Calls/s of the last minutes: the newest at the right edge. */
export class Sparkline {
  constructor() {
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "stroke", "vector-effect": "non-scaling-stroke" });
    const box = { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    this.element = svg("svg", box, this.area, this.line);
  }

  draw(rates) {
    const most = Math.max(1, ...rates);
    const step = WIDTH / Math.max(60, rates.length - 1); // the first minute fills it from the right
    const x = (at) => (WIDTH - (rates.length - 1 - at) * step).toFixed(1);
    const points = rates.map((value, at) => `${x(at)} ${(HEIGHT - 2 - (value / most) * (HEIGHT - 6)).toFixed(1)}`);
    if (points.length === 1) points.unshift(`${x(-1)} ${points[0].split(" ")[1]}`);
    const path = `M${points.join("L")}`;
    set(this.line, "d", path);
    set(this.area, "d", `${path}V${HEIGHT}H${points[0].split(" ")[0]}Z`);
    set(
      this.element,
      "aria-label",
      `Calls a second, last ${count(rates.length)} s: now ${rate(rates.at(-1))}, at most ${rate(Math.max(0, ...rates))}`,
    );
  }
}

/** A tool's latencies in a table's cell: the shape, no numbers. */
export class Mini {
  constructor() {
    this.element = svg("svg", { class: "mini", "aria-hidden": "true" });
  }

  draw(counts) {
    const most = Math.max(...counts);
    const bars = this.element.children;
    set(this.element, "viewBox", `0 0 ${counts.length * 5} 20`);
    counts.forEach((calls, at) => {
      const bar = bars[at] ?? this.element.appendChild(svg("rect", { x: at * 5, width: 4 }));
      const height = calls && most ? Math.max(2, (18 * calls) / most) : 1;
      set(bar, "y", (20 - height).toFixed(1));
      set(bar, "height", height.toFixed(1));
      set(bar, "class", calls ? "bar" : "none");
    });
  }
}

const LOW = 24; // below the bars, for the axis
const TALL = 184;
const TOP = 34; // above them, for the marks' names

/** All latencies of a tool: a column for each bucket, in it a colour for each face. */
export class Histogram {
  constructor() {
    this.element = svg("svg", { class: "histogram", role: "img" });
  }

  draw(name, shown, faces) {
    const width = Math.max(280, this.element.parentElement?.clientWidth ?? 600);
    const columns = shown.merged();
    const [first, last] = span(columns);
    const step = width / (last - first + 1);
    const most = Math.max(1, ...columns);
    const scale = (calls) => (calls / most) * (TALL - LOW - TOP);
    const parts = [svg("line", { class: "axis", x1: 0, x2: width, y1: TALL - LOW + 0.5, y2: TALL - LOW + 0.5 })];
    for (let at = first; at <= last; at += 1) {
      const x = (at - first) * step;
      let y = TALL - LOW;
      faces.forEach((face, number) => {
        const calls = shown.faces[face]?.[at] ?? 0;
        if (!calls) return;
        const height = Math.max(1.5, scale(calls));
        y -= height;
        const [low, high] = edges(at);
        const words = at < Latency.bounds.length ? `${latency(low)} – ${latency(high)}` : `over ${latency(low)}`;
        const title = svg("title");
        say(title, `${face}, ${words}: ${count(calls)}`);
        const box = { class: `bar s${number % 6}`, x: (x + 1.5).toFixed(1), width: Math.max(1, step - 3).toFixed(1) };
        parts.push(svg("rect", { ...box, y: y.toFixed(1), height: height.toFixed(1), rx: 1.5 }, title));
      });
      if (columns[at] && step >= 34) parts.push(label(x + step / 2, y - 4, brief(columns[at]), "middle"));
      if (at < last && at < Latency.bounds.length && (/^1/.test(shortest(at)) || last - first < 6)) {
        parts.push(label(x + step, TALL - 7, latency(Latency.bounds[at]).replace(/\.0+ /, " "), "middle"));
        parts.push(svg("line", { class: "axis", x1: x + step, x2: x + step, y1: TALL - LOW, y2: TALL - LOW + 4 }));
      }
    }
    const marks = [
      ["p50", shown.percentile(0.5)],
      ["p99", shown.percentile(0.99)],
    ].filter(([, value]) => value);
    const places = marks.map(([, value]) => place(value, first, last) * step);
    const close = places.length === 2 && places[1] - places[0] < 36;
    marks.forEach(([word], number) => {
      const x = Math.min(width - 1, places[number]);
      parts.push(svg("line", { class: "mark", x1: x, x2: x, y1: 6, y2: TALL - LOW }));
      const left = close ? number === 0 : x > width - 34;
      parts.push(label(x + (left ? -4 : 4), 13, word, left ? "end" : "start"));
    });
    set(this.element, "viewBox", `0 0 ${width} ${TALL}`);
    const [p50, p99] = [0.5, 0.99].map((share) => latency(shown.percentile(share)));
    set(this.element, "aria-label", `${name}: ${count(shown.total)} calls, half within ${p50}, 99 % within ${p99}`);
    this.element.replaceChildren(...parts);
  }
}

const shortest = (at) => Latency.bounds[at].toExponential(1);

/** The columns that are drawn: those with calls, one more on each side, and at least a dozen. */
function span(columns) {
  const used = columns.flatMap((calls, at) => (calls ? [at] : []));
  if (!used.length) return [2, 14];
  let [first, last] = [Math.max(0, used[0] - 1), Math.min(columns.length - 1, used.at(-1) + 1)];
  while (last - first < 11 && (first > 0 || last < columns.length - 1)) {
    if (last < columns.length - 1) last += 1;
    if (first > 0 && last - first < 11) first -= 1;
  }
  return [first, last];
}

/** In columns from the left. */
function place(value, first, last) {
  for (let at = first; at <= last; at += 1) {
    const [low, high] = edges(at);
    if (value <= high) return at - first + Math.max(0, Math.log(value / low) / Math.log(high / low));
  }
  return last - first + 1;
}

function label(x, y, words, anchor) {
  const made = svg("text", { x: x.toFixed(1), y, "text-anchor": anchor });
  say(made, words);
  return made;
}
