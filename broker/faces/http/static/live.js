// The line at the top, the banners, and the numbers that matter first.

import { Sparkline } from "./charts.js";
import { find, h, say, set } from "./dom.js";
import { age, bytes, clock, count, DASH, latency, plural, rate } from "./format.js";

const MB = 1024 ** 2;

class Tile {
  constructor(parent, name, more) {
    this.value = h("dd", { class: "value" }, DASH);
    this.note = h("dd", { class: "soft" }, "\u00a0");
    this.element = h("div", { class: "tile" }, h("dt", {}, name), this.value, this.note, more);
    parent.append(this.element);
  }

  show(value, note, tone) {
    say(this.value, value);
    say(this.note, note || "\u00a0");
    set(this.element, "data-tone", tone);
  }
}

export class Now {
  constructor() {
    const list = h("dl", { class: "tiles" });
    this.spark = new Sparkline();
    this.calls = new Tile(list, "Calls a second", this.spark.element);
    this.calls.element.classList.add("wide");
    this.half = new Tile(list, "Half of them within");
    this.most = new Tile(list, "99 % within");
    this.processes = new Tile(list, "Processes");
    this.waiting = new Tile(list, "Waiting calls");
    this.breakers = new Tile(list, "Breakers");
    find("now").append(list);
  }

  show(report) {
    const peak = Math.max(0, ...report.rates);
    this.calls.show(rate(report.calls_per_second), `peak ${rate(peak)} in ${age(report.rates.length)}`);
    this.spark.draw(report.rates);
    const recent = report.lately.total > 0;
    const shown = recent ? report.lately : report.latency;
    const when = shown.total ? (recent ? "last minute" : "since the start") : "no calls yet";
    this.half.show(latency(shown.percentile(0.5)), when);
    this.most.show(latency(shown.percentile(0.99)), when);
    const hosts = report.pools.flatMap((pool) => pool.processes);
    const memory = hosts.reduce((sum, host) => sum + host.rss_mb, 0) * MB;
    const busy = hosts.filter((host) => host.in_flight).length;
    this.processes.show(count(hosts.length), `${busy} busy · ${bytes(memory)}`);
    this.waiting.show(count(report.waiting), bytes(report.queued_bytes), report.waiting > 0 ? "busy" : null);
    const open = report.tools.filter((tool) => tool.breaker !== "closed").length;
    this.breakers.show(count(open), open ? "open, see Tools" : "open", open ? "bad" : null);
    say(
      find("facts"),
      `${report.version} · up ${age(report.uptime_seconds)} · ${plural(report.connections, "connection")}`,
    );
  }
}

/** Whether what is shown is what is. */
export class Link {
  constructor(again, resume) {
    this.seen = null;
    this.lost = banner("bad");
    this.again = h("button", { type: "button", onclick: again }, "Try now");
    this.lost.element.append(this.again);
    this.broker = banner("warn");
    this.resume = h("button", { type: "button", onclick: resume }, "Resume everything");
    this.broker.element.append(this.resume);
  }

  show({ state, retry, reason }) {
    if (state === "connecting" && document.body.dataset.link) return; // another try of what the banner says already
    document.body.dataset.link = state;
    const link = find("link");
    say(link, { connecting: "connecting", live: "live", lost: "lost", refused: "refused" }[state]);
    set(link, "data-state", state);
    if (state === "live") this.seen = Date.now();
    const since = this.seen ? ` What you see is of ${clock(this.seen)}.` : "";
    const again = Math.max(1, Math.round(retry ?? 1));
    const words = {
      lost: `${reason || "The broker cannot be reached."}${since} The next try is in ${again} s.`,
      refused: `The broker does not show itself: ${reason}`,
    };
    this.lost.say(words[state] ?? "");
    set(this.again, "hidden", state !== "lost");
  }

  /** What the broker says of itself. */
  note(report) {
    set(this.resume, "hidden", report.draining || !report.paused.has("*"));
    if (report.draining) this.broker.say("The broker is draining: it finishes what runs, refuses the rest, and ends.");
    else if (report.paused.has("*")) this.broker.say("All calls are paused: they wait until somebody resumes them.");
    else this.broker.say("");
  }
}

function banner(tone) {
  const words = h("p");
  const element = h("div", { class: `banner ${tone}`, hidden: true }, words);
  find("banners").append(element);
  return {
    element,
    say(text) {
      say(words, text);
      set(element, "hidden", !text);
    },
  };
}

/** A word that stays until it is put away, or for a moment where it is good news. */
export function notice(text, tone = "good") {
  const box = h("div", { class: `notice ${tone}` }, h("p", {}, text));
  const away = () => box.remove();
  box.append(
    h("button", { type: "button", class: "quiet", "aria-label": "Put this message away", onclick: away }, "×"),
  );
  find("notices").append(box);
  if (tone === "good") setTimeout(away, 6000);
  while (find("notices").children.length > 4) find("notices").firstElementChild.remove();
}
