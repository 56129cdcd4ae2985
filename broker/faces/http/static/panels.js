// Latencies of one tool, recent errors, leases.

import { Histogram } from "./charts.js";
import { find, h, keyed, say, set } from "./dom.js";
import { age, clock, count, latency, plural } from "./format.js";
import { either, empty, pill } from "./parts.js";

const ALL = "";
const FACES = ["machina", "http", "embedded"];

// --- latencies -------------------------------------------------------------------------------------------------------

export class Latencies {
  constructor() {
    this.chart = new Histogram();
    this.keys = h("ul", { class: "keys" });
    this.words = h("p", { class: "soft" });
    const none = empty("How long calls take stands here as soon as there is one.");
    this.filled = either(
      find("latency"),
      h("div", {}, this.chart.element, h("div", { class: "head" }, this.keys, this.words)),
      none,
    );
    this.select = find("latency-tool");
    this.select.append(new Option("all tools", ALL));
    this.select.addEventListener("change", () => this.report && this.show(this.report));
    addEventListener("resize", () => this.report && this.show(this.report));
  }

  look(aid) {
    this.select.value = aid;
    this.show(this.report);
    find("latency-card").scrollIntoView({ block: "nearest" });
  }

  show(report) {
    this.report = report;
    const names = report.tools.map((tool) => tool.aid).sort();
    const here = [...this.select.options].slice(1).map((option) => option.value);
    if (names.join("\n") !== here.join("\n")) {
      const chosen = this.select.value;
      this.select.replaceChildren(new Option("all tools", ALL), ...names.map((name) => new Option(name, name)));
      this.select.value = names.includes(chosen) ? chosen : ALL;
    }
    const chosen = this.select.value;
    const shown = chosen === ALL ? report.latency : report.tools.find((tool) => tool.aid === chosen).latency;
    const total = shown.total;
    this.filled(total > 0);
    if (!total) return;
    const faces = Object.keys(report.latency.faces).sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
    this.chart.draw(chosen || "all tools", shown, faces);
    const calls = (face) => (shown.faces[face] ?? []).reduce((sum, number) => sum + number, 0);
    const update = (row, face) => say(row.words, `${face} ${count(calls(face))}`);
    keyed(
      this.keys,
      faces,
      (face) => face,
      (face) => makeKey(faces.indexOf(face)),
      update,
    );
    const [half, most] = [0.5, 0.99].map((share) => latency(shown.percentile(share)));
    say(this.words, `${plural(total, "call")} since the start: p50 ${half}, p99 ${most}`);
  }
}

/** A face has the same colour wherever it is one of several. */
const rank = (face) => (FACES.indexOf(face) + FACES.length + 1) % (FACES.length + 1);

function makeKey(number) {
  const words = h("span");
  return { element: h("li", {}, h("i", { class: `swatch s${number % 6}`, "aria-hidden": "true" }), words), words };
}

// --- errors ----------------------------------------------------------------------------------------------------------

export class Errors {
  constructor() {
    this.list = h("ol", { class: "errors", tabindex: 0, "aria-label": "Recent errors, the newest first" });
    const none = empty(
      "Nothing has gone wrong since the broker started. Crashes, timeouts and refusals show up here, with their reasons.",
    );
    this.filled = either(find("errors"), this.list, none);
  }

  show({ recent }) {
    const errors = [...recent].reverse();
    this.filled(errors.length > 0);
    say(find("errors-note"), errors.length ? `the last ${count(errors.length)}` : "");
    const key = (one) => `${one.tool}\n${one.code}\n${one.reason}`;
    keyed(this.list, errors, key, makeError, updateError);
  }
}

function makeError(one) {
  const row = { time: h("time"), count: h("span", { class: "soft" }) };
  row.element = h(
    "li",
    {},
    row.time,
    h("strong", {}, one.tool),
    pill("bad", one.code),
    row.count,
    h("p", {}, one.reason),
  );
  return row;
}

function updateError(row, one) {
  say(row.time, clock(one.time * 1000));
  set(row.time, "datetime", new Date(one.time * 1000).toISOString());
  say(row.count, one.count > 1 ? `${count(one.count)} times` : "");
}

// --- leases ----------------------------------------------------------------------------------------------------------

export class Leases {
  constructor({ revoke, issue }) {
    this.revoke = revoke;
    this.list = h("ul", { class: "leases" });
    const none = empty(
      "No lease is alive. Where leases are enforced (",
      h("code", {}, "MACHINA_LEASE_ENFORCE=1"),
      "), a tool that writes or reaches out needs one for each call. Issue one here, or with ",
      h("code", {}, "broker lease issue AID"),
      ".",
    );
    this.filled = either(find("leases"), this.list, none);
    this.tool = h("input", {
      id: "lease-tool",
      required: true,
      autocomplete: "off",
      spellcheck: "false",
      list: "tool-names",
      placeholder: "a tool, or *",
    });
    this.tier = h(
      "select",
      { id: "lease-tier" },
      new Option("own", ""),
      ...[0, 1, 2, 3].map((tier) => new Option(tier, tier)),
    );
    this.seconds = h("input", { id: "lease-seconds", type: "number", min: 1, max: 300, value: 60 });
    const field = (name, input) => h("label", { class: "field", for: input.id }, h("span", {}, name), input);
    this.form = h(
      "form",
      { class: "row issue", novalidate: true },
      field("Tool", this.tool),
      field("Tier", this.tier),
      field("Seconds", this.seconds),
      h("button", {}, "Issue a lease"),
    );
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const tier = this.tier.value === "" ? {} : { tier: Number(this.tier.value) };
      issue({ tool_aid: this.tool.value.trim(), ttl_ms: Number(this.seconds.value) * 1000, ...tier });
    });
    this.token = h("div", { class: "issued", role: "status" });
    find("leases").append(h("datalist", { id: "tool-names" }), this.form, this.token);
  }

  /** A token is shown once: the broker tells it to nobody again. */
  issued({ token_id: token, tool_aid: tool, ttl_ms: ttl }, use) {
    const copy = h(
      "button",
      { type: "button", class: "small", onclick: () => navigator.clipboard?.writeText(token) },
      "Copy",
    );
    const take = h("button", { type: "button", class: "small", onclick: () => use(tool, token) }, "Use in the form");
    this.token.replaceChildren(
      h("p", {}, `For one call of ${tool}, within ${age(ttl / 1000)}:`),
      h("code", {}, token),
      copy,
      take,
    );
  }

  show(report, known) {
    const leases = report.leases_alive;
    this.filled(leases.length > 0);
    say(find("leases-note"), leases.length ? `${count(leases.length)} alive` : "");
    const names = find("tool-names");
    if (names.children.length !== known.length)
      names.replaceChildren(...known.map((tool) => h("option", { value: tool.name })));
    keyed(
      this.list,
      leases,
      (one) => one.fingerprint,
      (one) => this.make(one),
      (row, one) => say(row.left, `ends in ${age(one.expires_in_seconds)}`),
    );
  }

  make(one) {
    const row = { left: h("span", { class: "soft" }) };
    const label = `Revoke lease ${one.fingerprint}`;
    const revoke = () => this.revoke(one);
    const take = h("button", { type: "button", class: "small", "aria-label": label, onclick: revoke }, "Revoke");
    const facts = h(
      "p",
      { class: "soft" },
      h("code", {}, one.fingerprint),
      ` · tier ${one.tier} · from ${one.issuer} · `,
    );
    facts.append(row.left);
    row.element = h("li", {}, h("div", {}, h("strong", {}, one.tool_aid), facts), take);
    return row;
  }
}
