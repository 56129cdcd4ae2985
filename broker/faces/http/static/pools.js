// Pools and their processes; each report changes what is there, and moves nothing that need not move.

import { breakable, find, h, keyed, say, set } from "./dom.js";
import { age, bytes, count, plural } from "./format.js";
import { cell, either, empty, mark, pill, table } from "./parts.js";

const MB = 1024 ** 2;

const TONES = {
  ready: "good",
  starting: "busy",
  broken: "bad",
  leaving: "soft",
  paused: "warn",
  "fork server": "good",
  waiting: "good",
  running: "busy",
};

export class Pools {
  constructor(act) {
    this.act = act;
    this.list = h("div", { class: "pools" });
    const none = empty(
      "No pools: a toolhost of your own comes with ",
      h("code", {}, "broker serve --plugin ./my_tools.so"),
      ".",
    );
    this.show = this.show.bind(this);
    this.filled = either(find("pools"), this.list, none);
  }

  show(report) {
    const pools = report.pools;
    this.filled(pools.length > 0);
    const hosts = pools.reduce((sum, pool) => sum + pool.processes.length, 0);
    say(
      find("pools-note"),
      pools.length ? `${plural(pools.length, "pool")}, ${plural(hosts, "process", "processes")}` : "",
    );
    const update = (row, pool) => this.update(row, pool, report.paused);
    keyed(
      this.list,
      pools,
      (pool) => pool.name,
      (pool) => this.make(pool),
      update,
    );
  }

  make(pool) {
    const row = {
      state: pill("", ""),
      facts: h("p", { class: "soft" }),
      reason: h("p", { class: "reason" }),
      body: h("tbody"),
    };
    row.button = h("button", { type: "button", class: "small", onclick: () => this.act(row.word, entry(pool)) });
    const names = [
      ["Process"],
      ["State"],
      ["In flight", "number"],
      ["Calls", "number"],
      ["Memory", "number"],
      ["Age", "number"],
    ];
    row.table = table(`Processes of ${pool.name}`, names, row.body);
    row.name = h("h3", {}, ...breakable(pool.name));
    row.element = h(
      "article",
      { class: "pool" },
      h("div", { class: "head" }, row.name, row.state, row.button),
      row.facts,
      row.reason,
      row.table,
    );
    return row;
  }

  update(row, pool, paused) {
    const all = paused.has("*");
    const stopped = all || paused.has(entry(pool));
    const state = stopped ? "paused" : pool.state;
    mark(row.state, TONES[state] ?? "soft", state);
    row.word = stopped ? "resume" : "pause";
    say(row.button, stopped ? "Resume" : "Pause");
    set(row.button, "hidden", all); // what stands above resumes everything
    set(row.button, "aria-label", `${stopped ? "Resume" : "Pause"} pool ${pool.name}`);
    const went = Object.entries(pool.counts).filter(([word, number]) => number && !STARTS.includes(word));
    const past = went.map(([word, number]) => `${count(number)} ${WENT[word] ?? word}`);
    say(
      row.facts,
      [size(pool), `${count(pool.waiting)} waiting`, ...past].join(" · "),
    );
    say(row.reason, pool.reason && pool.state !== "broken" ? `last: ${pool.reason}` : pool.reason);
    set(row.reason, "data-tone", pool.state === "broken" ? "bad" : null);
    set(row.reason, "hidden", !pool.reason);
    set(row.name, "title", pool.source);
    set(row.table, "hidden", !pool.processes.length);
    keyed(row.body, pool.processes, (host) => host.pid, makeHost, updateHost);
  }
}

const STARTS = ["started", "forked"];

const size = (pool) =>
  pool.kind === "python"
    ? `${plural(pool.processes.length, "process", "processes")}, up to ${plural(pool.max, "call")} at once`
    : `${pool.processes.length} of ${pool.min} to ${pool.max}`;

/** What is paused: all pools of one entry, where each caller has its own (`name@principal`); an app by its folder. */
const entry = (pool) => (pool.kind === "python" ? pool.name : pool.name.split("@")[0]);

const WENT = { crash: "crashed", timeout: "timed out", violation: "broke the protocol" };

function makeHost(host) {
  const row = {
    state: pill("", ""),
    flight: cell("In flight", { class: "number" }),
    calls: cell("Calls", { class: "number" }),
  };
  row.memory = cell("Memory", { class: "number" });
  row.age = cell("Age", { class: "number" });
  row.element = h(
    "tr",
    {},
    h("th", { scope: "row" }, String(host.pid)),
    cell("State", {}, row.state),
    row.flight,
    row.calls,
    row.memory,
    row.age,
  );
  return row;
}

function updateHost(row, host) {
  mark(
    row.state,
    host.in_flight && host.state === "ready" ? "busy" : (TONES[host.state] ?? "soft"),
    host.in_flight && host.state === "ready" ? "busy" : host.state,
  );
  say(row.flight, count(host.in_flight));
  say(row.calls, count(host.calls));
  say(row.memory, bytes(host.rss_mb * MB));
  say(row.age, age(host.age_seconds));
}
