// The form of one tool, made from its schema, and what the broker answers.

import { ask, headers, token } from "./api.js";
import { find, h, say, set } from "./dom.js";
import { Fields } from "./fields.js";
import { bytes, latency } from "./format.js";
import { mark, pill } from "./parts.js";
import { Picker } from "./picker.js";

const LONGEST = 200_000; // characters of an output that are shown
const READABLE = /^(text\/plain|text\/csv|application\/json)\b/;

export class Attempt {
  constructor() {
    this.picker = new Picker((tool) => this.use(tool));
    this.about = h(
      "p",
      { class: "about" },
      "A form is made from the tool's schema. Nothing is sent until you press Call.",
    );
    this.examples = h("div", { class: "row examples" });
    this.place = h("div");
    this.raw = h("textarea", {
      id: "raw",
      class: "code",
      rows: 6,
      spellcheck: "false",
      autocomplete: "off",
      "aria-describedby": "raw-trouble",
    });
    this.rawTrouble = h("p", { id: "raw-trouble", class: "trouble", hidden: true });
    this.rawBox = h(
      "div",
      { hidden: true },
      h("label", { class: "field", for: "raw" }, h("span", {}, "Input"), h("small", {}, "JSON")),
      this.raw,
      this.rawTrouble,
    );
    this.asJson = h("input", { id: "as-json", type: "checkbox", onchange: () => this.toggle() });
    this.toggleBox = h("label", { class: "check", for: "as-json" }, this.asJson, "JSON in place of fields");
    this.lease = h("input", { id: "call-lease", autocomplete: "off", spellcheck: "false" });
    this.key = h("input", { id: "call-key", autocomplete: "off", spellcheck: "false" });
    const option = (name, help, input) =>
      h(
        "div",
        { class: "member" },
        h("label", { class: "field", for: input.id }, h("span", {}, name)),
        input,
        h("p", { class: "help" }, help),
      );
    this.options = h(
      "details",
      {},
      h("summary", {}, "Lease and key"),
      option("Lease token", "For a tool that needs one. It opens one call.", this.lease),
      option("Idempotency key", "Sent twice, the call runs once.", this.key),
    );
    this.button = h("button", { class: "main", "aria-keyshortcuts": "Control+Enter" }, "Call");
    this.cancel = h("button", { type: "button", hidden: true, onclick: () => this.abort?.abort() }, "Stop waiting");
    const bottom = h(
      "div",
      { class: "row" },
      this.button,
      this.cancel,
      h("span", { class: "soft keyhint" }, h("kbd", {}, "Ctrl"), " + ", h("kbd", {}, "Enter")),
    );
    this.inputs = h(
      "div",
      { hidden: true },
      this.examples,
      this.place,
      this.rawBox,
      this.toggleBox,
      this.options,
      bottom,
    );
    this.form = h("form", { novalidate: true }, this.picker.element, this.about, this.inputs);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.call();
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.call();
    });
    this.form.addEventListener("input", () => this.remember());
    this.reply = new Reply();
    find("try-body").append(this.form, this.reply.element);
  }

  /** Which tools there are. The one in use stays in use. */
  know(tools) {
    this.picker.know(tools);
    const wanted = this.tool?.name ?? sessionStorage.getItem("tool");
    const tool = tools.find((one) => one.name === wanted);
    if (tool && JSON.stringify(tool) !== JSON.stringify(this.tool)) {
      this.picker.input.value = tool.name;
      this.use(tool);
    }
  }

  choose(name) {
    const tool = this.picker.tools.find((one) => one.name === name);
    if (!tool) return;
    this.picker.input.value = name;
    this.use(tool);
    find("try").scrollIntoView({ block: "start" });
    (this.fields?.fields[0]?.input ?? this.raw).focus({ preventScroll: true });
  }

  withLease(name, lease) {
    if (name !== "*") this.choose(name);
    this.options.open = true;
    this.lease.value = lease;
  }

  use(tool) {
    if (tool.name !== this.tool?.name) this.reply.clear();
    this.tool = this.picker.tool = tool;
    sessionStorage.setItem("tool", tool.name);
    say(this.about, tool.description);
    this.fields = Fields.of(tool.input_schema);
    this.place.replaceChildren(...(this.fields ? [this.fields.element] : []));
    set(this.toggleBox, "hidden", !this.fields);
    set(this.inputs, "hidden", false);
    const examples = (tool.examples ?? []).filter((one) => one && typeof one === "object" && "input" in one);
    const button = (one) =>
      h(
        "button",
        { type: "button", class: "small", title: one.notes ?? "", onclick: () => this.example(one.input) },
        one.title ?? "Example",
      );
    this.examples.replaceChildren(
      ...(examples.length ? [h("span", { class: "soft" }, "Examples"), ...examples.map(button)] : []),
    );
    this.fill(sessionStorage.getItem(`input:${tool.name}`) ?? "{}");
  }

  example(input) {
    this.fill(JSON.stringify(input, null, 2));
    this.remember();
  }

  /** JSON text into the fields; into the text area where they cannot hold all of it. */
  fill(text) {
    let value;
    try {
      value = JSON.parse(text);
    } catch {
      value = undefined;
    }
    const fits = this.fields !== null && value !== undefined && this.fields.fill(value);
    if (fits) this.fields.clear();
    this.raw.value = text;
    this.blameRaw("");
    this.shape(!fits);
  }

  shape(json) {
    this.asJson.checked = json;
    set(this.rawBox, "hidden", !json);
    set(this.place, "hidden", json);
  }

  toggle() {
    try {
      if (this.asJson.checked) this.raw.value = JSON.stringify(JSON.parse(this.fields.read()), null, 2);
      else if (!this.fields.fill(JSON.parse(this.raw.value || "{}")))
        throw new Error("It has members that there are no fields for.");
      this.shape(this.asJson.checked);
      this.blameRaw("");
    } catch (error) {
      this.asJson.checked = !this.asJson.checked;
      if (this.asJson.checked) this.blameRaw(error.message);
    }
  }

  blameRaw(words) {
    say(this.rawTrouble, words);
    set(this.rawTrouble, "hidden", !words);
    set(this.raw, "aria-invalid", words ? "true" : null);
  }

  /** The input's JSON text. */
  read() {
    if (!this.asJson.checked) return this.fields.read();
    const text = this.raw.value.trim() || "{}";
    try {
      JSON.parse(text);
    } catch (error) {
      this.blameRaw(`This is not JSON: ${error.message}`);
      this.raw.focus();
      throw error;
    }
    this.blameRaw("");
    return text;
  }

  /** For this tab only. */
  remember() {
    if (!this.tool) return;
    const members = this.asJson.checked ? null : this.fields.fields.flatMap((field) => peek(field));
    const text = members ? `{${members.join(",")}}` : this.raw.value;
    try {
      sessionStorage.setItem(`input:${this.tool.name}`, text);
    } catch {
      // too long to be kept
    }
  }

  async call() {
    if (!this.tool || this.abort) return;
    let input;
    try {
      input = this.read();
    } catch {
      return;
    }
    this.remember();
    const more = {
      ...(this.lease.value && { _lease_token: this.lease.value.trim() }),
      ...(this.key.value && { idempotency_key: this.key.value.trim() }),
    };
    const rest = JSON.stringify(more).slice(1, -1);
    const body = `{"tool":${JSON.stringify(this.tool.name)},"input":${input}${rest && `,${rest}`}}`;
    this.abort = new AbortController();
    this.wait(true);
    const begun = performance.now();
    try {
      const answer = await ask("/v1/tools/execute", { method: "POST", body, signal: this.abort.signal });
      this.reply.show(answer, (performance.now() - begun) / 1000);
      const wrong = answer.body?.stderr;
      if (answer.status === 400 && typeof wrong === "string" && !this.asJson.checked) this.fields.blame(wrong);
    } catch {
      this.reply.fail(
        this.abort.signal.aborted
          ? "You stopped waiting. The call may have run."
          : "The broker cannot be reached; the call may have run.",
      );
    } finally {
      this.abort = null;
      this.wait(false);
    }
  }

  wait(waiting) {
    set(this.button, "aria-disabled", waiting ? "true" : null);
    say(this.button, waiting ? "Calling …" : "Call");
    set(this.cancel, "hidden", !waiting);
  }
}

function peek(field) {
  try {
    const text = field.read();
    return text === null ? [] : [`${JSON.stringify(field.name)}:${text}`];
  } catch {
    return [];
  }
}

// --- the answer ------------------------------------------------------------------------------------------------------

class Reply {
  constructor() {
    this.state = pill("", "");
    this.summary = h("p", { class: "summary" });
    this.trouble = h("p", { class: "trouble" });
    this.facts = h("p", { class: "facts soft" });
    this.artifacts = h("ul", { class: "artifacts", "aria-label": "Artifacts" });
    this.output = h("pre", { tabindex: 0, "aria-label": "Output" });
    this.whole = h("pre", { tabindex: 0, "aria-label": "The whole reply" });
    this.more = h("details", {}, h("summary", {}, "The whole reply"), this.whole);
    const words = h("div", { role: "status" }, h("div", { class: "head" }, this.state, this.summary), this.trouble);
    this.element = h(
      "div",
      { class: "reply", hidden: true },
      words,
      this.facts,
      this.artifacts,
      this.output,
      this.more,
    );
  }

  clear() {
    set(this.element, "hidden", true);
  }

  fail(words) {
    this.put("bad", "no answer", words, "", "", [], undefined, "");
  }

  show({ status, body, headers: said, text }, seconds) {
    const result = body && typeof body === "object" ? body : {};
    const good = status < 400 && String(result.status).toLowerCase() === "ok";
    const error = result.stderr || result.error?.message || (good ? "" : text);
    const facts = [
      latency(seconds),
      `request ${result.metrics?.request_id ?? said.get("x-request-id") ?? "–"}`,
      result.metrics?.job_id && `job ${result.metrics.job_id}`,
    ];
    const code = result.metrics?.error_code;
    const word = good ? `${status} ok` : `${status} ${code ?? result.error?.code ?? "error"}`;
    const shown = result.output ?? (result.stdout || undefined);
    this.put(
      good ? "good" : "bad",
      word,
      result.summary ?? "",
      error,
      facts.filter(Boolean).join(" · "),
      result.artifacts ?? [],
      shown,
      body ?? text,
    );
  }

  put(tone, word, summary, trouble, facts, artifacts, output, whole) {
    set(this.element, "hidden", false);
    set(this.element, "data-tone", tone);
    mark(this.state, tone, word);
    say(this.summary, summary);
    say(this.trouble, trouble);
    set(this.trouble, "hidden", !trouble);
    say(this.facts, facts);
    this.artifacts.replaceChildren(...artifacts.map(link));
    set(this.artifacts, "hidden", !artifacts.length);
    say(this.output, output === undefined ? "" : pretty(output));
    set(this.output, "hidden", output === undefined);
    say(this.whole, pretty(whole));
    set(this.more, "hidden", !whole);
  }
}

function pretty(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value, null, 2);
  return text.length > LONGEST ? `${text.slice(0, LONGEST)}\n… ${text.length - LONGEST} characters more` : text;
}

/** A link, if it is one of the broker's own; followed with the token, where there is one, which links do not carry. */
function link({ name, path, bytes: size, mime_type: type }) {
  const safe = typeof path === "string" && path.startsWith("/v1/jobs/");
  const shown = safe
    ? h("a", { href: path, target: "_blank", rel: "noopener" }, String(name))
    : h("span", {}, String(name));
  shown.addEventListener("click", (event) => {
    if (!safe || !token.get()) return;
    event.preventDefault();
    fetched(path, String(name), String(type));
  });
  return h("li", {}, shown, h("span", { class: "soft" }, `${type}, ${bytes(size)}`));
}

async function fetched(path, name, type) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  const content = new Blob([await response.arrayBuffer()], {
    type: READABLE.test(type) ? type : "application/octet-stream",
  });
  const place = URL.createObjectURL(content);
  h(
    "a",
    READABLE.test(type) ? { href: place, target: "_blank", rel: "noopener" } : { href: place, download: name },
  ).click();
  setTimeout(() => URL.revokeObjectURL(place), 60_000);
}
