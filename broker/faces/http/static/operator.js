// The operator: a token, and the words that need one. A refusal is shown in the broker's own words.

import { ask, operate, sentence, token } from "./api.js";
import { find, h, say, set } from "./dom.js";
import { notice } from "./live.js";

const ASKS = {
  pause: (name) => [
    `Pause ${name === "*" ? "everything" : name}?`,
    "Its calls wait, up to limits.queue_seconds, until somebody resumes it.",
  ],
  "lease.revoke": (name) => [`Revoke lease ${name}?`, "A call that waits with it is refused."],
  reload: () => [
    "Read broker.toml again?",
    "Pools whose entry has changed are started anew. A mistake in it changes nothing.",
  ],
};
const DONE = {
  pause: (name) => `${name === "*" ? "Everything" : name} is paused.`,
  resume: (name) => `${name === "*" ? "Everything" : name} goes on.`,
  "breaker.reset": (name) => `The breaker of ${name} is closed.`,
  "lease.revoke": (name) => `Lease ${name} is revoked.`,
  reload: () => "The configuration has been read again.",
};

export class Operator {
  constructor(changed) {
    this.changed = changed;
    this.makePanel();
    this.makeQuestion();
    find("operator-open").addEventListener("click", () => this.open());
    this.label();
  }

  label() {
    say(find("operator-open"), token.get() ? "Operator ✓" : "Operator");
  }

  open() {
    this.field.value = token.get();
    say(this.said, "");
    this.panel.showModal();
  }

  /** An operator's word, asked about first where it matters. What it answers, or null. */
  async act(word, name, members = { name }) {
    const question = ASKS[word]?.(name);
    if (question && !(await this.sure(...question))) return null;
    try {
      const answer = await operate(word, members);
      if (DONE[word]) notice(DONE[word](name));
      return answer;
    } catch (error) {
      notice(error.answer ? error.message : "The broker cannot be reached.", "bad");
      return null;
    }
  }

  // --- the token -----------------------------------------------------------------------------------------------------

  makePanel() {
    this.field = h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false" });
    this.said = h("p", { class: "said", role: "status" });
    const form = h(
      "form",
      { novalidate: true },
      h("label", { class: "field", for: "token" }, h("span", {}, "Token")),
      this.field,
      h(
        "p",
        { class: "help" },
        "It stays in this tab and is forgotten with it. ",
        h("code", {}, "broker token new NAME"),
        " makes one; ",
        h("code", {}, "operator = true"),
        " in its ",
        h("code", {}, "[[principal]]"),
        " lets it pause, resume, reset and issue.",
      ),
      this.said,
      h(
        "div",
        { class: "row" },
        h("button", { class: "main" }, "Use it"),
        h("button", { type: "button", onclick: () => this.keep("") }, "Forget it"),
        h("button", { type: "button", class: "quiet", onclick: () => this.panel.close() }, "Close"),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.keep(this.field.value.trim());
    });
    const word = (words, act) => {
      const away = () => this.panel.close(); // what comes of it is said on the page
      return h("button", { type: "button", onclick: () => (away(), act()) }, words);
    };
    const words = h(
      "div",
      { class: "row" },
      word("Pause everything", () => this.act("pause", "*")),
      word("Resume everything", () => this.act("resume", "*")),
      word("Reload the configuration", () => this.act("reload", "", {})),
    );
    this.panel = h(
      "dialog",
      { "aria-labelledby": "operator-title" },
      h("h2", { id: "operator-title" }, "Operator"),
      form,
      h("h3", {}, "The whole broker"),
      words,
    );
    document.body.append(this.panel);
  }

  /** Whether it is one, and an operator's, is the broker's to say. */
  async keep(value) {
    if (value) {
      const known = await ask("/v1/tools", { shown: value }).catch(() => null);
      if (known === null) return this.tell("The broker cannot be reached.", "bad");
      if (!known.ok) return this.tell(sentence(known), "bad");
    }
    token.keep(value);
    this.label();
    this.changed();
    if (!value) {
      this.field.value = "";
      return this.tell("Forgotten.", "good");
    }
    try {
      await operate("lease.list", {});
      return this.tell("It is an operator's.", "good");
    } catch (error) {
      return this.tell(`It may call, but not operate: ${error.message}`, "warn");
    }
  }

  tell(words, tone) {
    set(this.said, "data-tone", tone);
    say(this.said, words);
  }

  // --- are you sure? -------------------------------------------------------------------------------------------------

  makeQuestion() {
    this.title = h("h2", { id: "question-title" });
    this.text = h("p");
    const form = h(
      "form",
      { method: "dialog" },
      this.title,
      this.text,
      h(
        "div",
        { class: "row" },
        h("button", { class: "main", value: "yes" }, "Do it"),
        h("button", { value: "" }, "Leave it"),
      ),
    );
    this.question = h("dialog", { "aria-labelledby": "question-title" }, form);
    document.body.append(this.question);
  }

  sure(title, text) {
    say(this.title, title);
    say(this.text, text);
    this.question.returnValue = "";
    this.question.showModal();
    return new Promise((resolve) => {
      this.question.addEventListener("close", () => resolve(this.question.returnValue === "yes"), { once: true });
    });
  }
}
