// The broker's report, in the form that the panels want it; and what two reports say that one alone does not.

const HISTORY = 300; // seconds of calls/s
const WINDOW = 60; // seconds that "recent" means

export class History {
  constructor() {
    this.forget();
  }

  forget() {
    this.pid = null;
    this.rates = [];
    this.shots = []; // what was counted when, for a minute
  }

  /** A report as it came, to one that has rates, and latencies of the last minute beside those since the start. */
  add(report, at = performance.now() / 1000) {
    if (this.pid !== report.pid) {
      this.forget();
      this.pid = report.pid;
    }
    Latency.bounds = report.bounds_seconds;
    const tools = report.tools.map((tool) => ({ ...tool, latency: Latency.of(tool) }));
    this.rates.push(report.calls_per_second ?? 0);
    if (this.rates.length > HISTORY) this.rates.shift();
    const last = this.shots.at(-1);
    this.shots.push({ at, tools: new Map(tools.map((tool) => [tool.aid, tool])) });
    while (this.shots.length > 1 && at - this.shots[1].at > WINDOW) this.shots.shift();
    const first = this.shots[0];
    for (const tool of tools) {
      const before = last?.tools.get(tool.aid);
      tool.rate = last && at > last.at ? Math.max(0, tool.calls - (before?.calls ?? 0)) / (at - last.at) : 0;
      const then = first.tools.get(tool.aid);
      tool.lately = this.shots.length > 1 ? tool.latency.since(then?.latency) : tool.latency;
    }
    return {
      ...report,
      at,
      tools,
      rates: this.rates,
      lately: Latency.sum(tools.map((tool) => tool.lately)),
      latency: Latency.sum(tools.map((tool) => tool.latency)),
      paused: new Set(report.paused),
    };
  }
}

/** How many calls took how long, by face: the broker's buckets, each up to a bound, the last one without any. */
export class Latency {
  constructor(faces) {
    this.faces = faces;
  }

  static bounds = []; // seconds, as the last report has them

  static of({ latency }) {
    return new Latency(Object.fromEntries(Object.entries(latency).map(([face, { buckets }]) => [face, buckets])));
  }

  get total() {
    return this.merged().reduce((sum, calls) => sum + calls, 0);
  }

  merged() {
    const all = new Array(Latency.bounds.length + 1).fill(0);
    for (const counts of Object.values(this.faces)) counts.forEach((calls, at) => (all[at] += calls));
    return all;
  }

  since(before) {
    if (!before) return this;
    const left = {};
    for (const [face, counts] of Object.entries(this.faces)) {
      const then = before.faces[face] ?? [];
      left[face] = counts.map((calls, at) => Math.max(0, calls - (then[at] ?? 0)));
    }
    return new Latency(left);
  }

  static sum(many) {
    const faces = {};
    for (const one of many) {
      for (const [face, counts] of Object.entries(one.faces)) {
        const sum = (faces[face] ??= new Array(counts.length).fill(0));
        counts.forEach((calls, at) => (sum[at] += calls));
      }
    }
    return new Latency(faces);
  }

  /** In seconds, as `broker status` has it: as if calls were spread evenly over their bucket. Null of no calls. */
  percentile(share) {
    const counts = this.merged();
    const total = counts.reduce((sum, calls) => sum + calls, 0);
    if (!total) return null;
    let left = share * total;
    let below = 0;
    for (const [at, bound] of Latency.bounds.entries()) {
      if (counts[at] && left <= counts[at]) return below + ((bound - below) * left) / counts[at];
      left -= counts[at];
      below = bound;
    }
    return below; // longer than all bounds: nobody knows how much
  }
}

/** From where to where a bucket goes; the outermost ones are drawn as long as their neighbours. */
export function edges(at) {
  const bounds = Latency.bounds;
  const high = at < bounds.length ? bounds[at] : bounds.at(-1) * 2;
  return [at > 0 ? bounds[at - 1] : high / 2, high];
}
