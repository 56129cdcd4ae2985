// Tools that have been called: how often, how long, how well; and their breakers.

import { Mini } from "./charts.js";
import { breakable, find, h, keyed, rowsOf, say, set } from "./dom.js";
import { age, count, latency, rate } from "./format.js";
import { cell, either, empty, mark, pill, table } from "./parts.js";

const BREAKERS = { closed: "good", open: "bad", "half-open": "warn" };

export class Tools {
  constructor({ act, choose, look }) {
    this.act = act;
    this.choose = choose;
    this.look = look;
    this.body = h("tbody");
    const names = [
      ["Tool"],
      ["Breaker"],
      ["Calls", "number"],
      ["Per s", "number"],
      ["Failed", "number"],
      ["p50", "number"],
      ["p99", "number"],
      ["Latency"],
      [""],
    ];
    const none = empty(
      "No tool has been called yet. Try one with the form, or ",
      h("code", {}, "broker call AID.DEMO.ECHO.v1 '{\"n\":1}'"),
      ".",
    );
    this.filled = either(find("tools"), table("Tools that have been called", names, this.body), none);
  }

  show(report, known) {
    const tools = [...report.tools].sort((a, b) => trouble(b) - trouble(a) || (a.aid < b.aid ? -1 : 1));
    this.filled(tools.length > 0);
    const rest = known.filter((tool) => !report.tools.some((one) => one.aid === tool.name)).length;
    say(find("tools-note"), tools.length && rest ? `${count(rest)} more not called yet` : "");
    const update = (row, tool) => this.update(row, tool, report);
    keyed(
      this.body,
      tools,
      (tool) => tool.aid,
      (tool) => this.make(tool),
      update,
    );
  }

  make({ aid }) {
    const row = { breaker: pill("", ""), why: h("span", { class: "reason" }), mini: new Mini() };
    for (const [key, name] of [
      ["calls", "Calls"],
      ["rate", "Per s"],
      ["failed", "Failed"],
      ["half", "p50"],
      ["most", "p99"],
    ]) {
      row[key] = cell(name, { class: "number" });
    }
    const button = (words, label, onclick) =>
      h("button", { type: "button", class: "small", "aria-label": `${label} ${aid}`, onclick }, words);
    row.reset = button("Reset", "Reset the breaker of", () => this.act("breaker.reset", aid));
    row.pause = button("Pause", "Pause", () => this.act(row.word, aid));
    const look = h(
      "button",
      { type: "button", class: "bare", "aria-label": `Show latencies of ${aid}`, onclick: () => this.look(aid) },
      row.mini.element,
    );
    const attempt = button("Try", "Try", () => this.choose(aid));
    row.element = h(
      "tr",
      {},
      h("th", { scope: "row", class: "name" }, ...breakable(aid), row.why),
      cell("Breaker", {}, row.breaker, row.reset),
      row.calls,
      row.rate,
      row.failed,
      row.half,
      row.most,
      cell("Latency", {}, look),
      h("td", { class: "actions" }, attempt, row.pause),
    );
    return row;
  }

  update(row, tool, report) {
    row.tool = tool;
    row.due = report.at + tool.next_probe_seconds;
    const stopped = tool.paused;
    row.stopped = stopped;
    this.count(row);
    say(row.why, tool.breaker === "closed" ? "" : tool.breaker_reason.replace(`${tool.aid}: `, ""));
    say(row.calls, count(tool.calls));
    say(row.rate, rate(tool.rate));
    say(row.failed, count(tool.failed));
    set(row.failed, "data-tone", tool.failed ? "bad" : null);
    const shown = tool.lately.total ? tool.lately : tool.latency;
    say(row.half, latency(shown.percentile(0.5)));
    say(row.most, latency(shown.percentile(0.99)));
    row.mini.draw(tool.latency.merged());
    set(row.reset, "hidden", tool.breaker === "closed");
    row.word = stopped ? "resume" : "pause";
    say(row.pause, stopped ? "Resume" : "Pause");
    set(row.pause, "hidden", stopped && !report.paused.has(tool.aid)); // its pool is, or everything
    set(row.pause, "aria-label", `${stopped ? "Resume" : "Pause"} ${tool.aid}`);
  }

  /** How long until the next probe, between two reports. */
  count(row) {
    const { breaker } = row.tool;
    const left = row.due - performance.now() / 1000;
    const words =
      breaker === "open" && left > 0
        ? `open, probe in ${age(Math.ceil(left))}`
        : breaker === "open"
          ? "open, probe due"
          : breaker;
    mark(
      row.breaker,
      row.stopped && breaker === "closed" ? "warn" : (BREAKERS[breaker] ?? "soft"),
      row.stopped && breaker === "closed" ? "paused" : words,
    );
  }

  tick() {
    for (const row of rowsOf(this.body)) this.count(row);
  }
}

const trouble = (tool) => (tool.breaker === "closed" ? 0 : 1);
