// Choosing one of many tools: type to search, arrows to go, Enter to take.

import { h, set } from "./dom.js";

const MOST = 60;

export class Picker {
  constructor(chosen) {
    this.chosen = chosen;
    this.tools = [];
    this.at = -1;
    this.list = h("ul", { id: "tool-list", class: "options", role: "listbox", "aria-label": "Tools", hidden: true });
    this.input = h("input", {
      id: "tool",
      type: "search",
      role: "combobox",
      autocomplete: "off",
      spellcheck: "false",
      placeholder: "Search by name, tag or description",
      "aria-expanded": "false",
      "aria-controls": "tool-list",
      "aria-autocomplete": "list",
      onfocus: () => this.input.select(),
      onclick: () => this.open(""),
      oninput: () => this.open(this.input.value),
      onkeydown: (event) => this.key(event),
      onblur: () => this.close(),
    });
    this.element = h(
      "div",
      { class: "picker" },
      h("label", { class: "field", for: "tool" }, h("span", {}, "Tool")),
      this.input,
      this.list,
    );
  }

  /** Which ones there are; seen at once by whoever is searching already. */
  know(tools) {
    const changed = tools.map((tool) => tool.name).join("\n") !== this.tools.map((tool) => tool.name).join("\n");
    this.tools = tools;
    if (changed && !this.list.hidden) this.open(this.words);
  }

  open(words) {
    this.words = words;
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const about = (tool) => `${tool.name} ${(tool.tags ?? []).join(" ")} ${tool.description}`.toLowerCase();
    const found = this.tools.filter((tool) => wanted.every((word) => about(tool).includes(word)));
    const first = wanted[0] ?? "";
    found.sort((a, b) => b.name.toLowerCase().includes(first) - a.name.toLowerCase().includes(first));
    this.found = found.slice(0, MOST);
    const more = found.length - this.found.length;
    const options = this.found.map((tool, at) => this.option(tool, at));
    if (!found.length) options.push(h("li", { class: "soft", role: "presentation" }, "No tool is like that."));
    if (more) options.push(h("li", { class: "soft", role: "presentation" }, `${more} more: search for them`));
    this.list.replaceChildren(...options);
    set(this.list, "hidden", false);
    set(this.input, "aria-expanded", "true");
    this.go(wanted.length && found.length ? 0 : -1);
  }

  option(tool, at) {
    const take = (event) => {
      event.preventDefault(); // the focus stays
      this.take(tool);
    };
    return h(
      "li",
      { id: `option-${at}`, role: "option", "aria-selected": "false", onmousedown: take },
      h("b", {}, tool.name),
      h("span", { class: "soft" }, tool.description),
    );
  }

  go(at) {
    this.list.children[this.at]?.setAttribute("aria-selected", "false");
    this.at = at;
    const option = at >= 0 ? this.list.children[at] : null;
    set(this.input, "aria-activedescendant", option?.id);
    option?.setAttribute("aria-selected", "true");
    option?.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const open = !this.list.hidden;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!open) return this.open("");
      const number = this.found.length;
      if (number)
        this.go(
          (Math.max(this.at, event.key === "ArrowDown" ? -1 : 0) + (event.key === "ArrowDown" ? 1 : -1) + number) %
            number,
        );
    } else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      if (open && this.at >= 0) this.take(this.found[this.at]);
      else this.open(this.input.value);
    } else if (event.key === "Escape" && open) {
      event.preventDefault();
      this.close();
    }
  }

  take(tool) {
    this.input.value = tool.name;
    this.hide();
    this.chosen(tool);
  }

  hide() {
    set(this.list, "hidden", true);
    set(this.input, "aria-expanded", "false");
    set(this.input, "aria-activedescendant", null);
  }

  close() {
    this.hide();
    if (this.tool) this.input.value = this.tool.name;
  }
}
