// What the panels are made of: tables that become cards on a phone, pills, and words for what is not there.

import { h, say, set } from "./dom.js";

export const cell = (name, more = {}, ...inside) => h("td", { "data-name": name, ...more }, ...inside);

export function pill(tone, words) {
  const element = h("span", { class: "pill" });
  mark(element, tone, words);
  return element;
}

export function mark(element, tone, words) {
  set(element, "data-tone", tone);
  say(element, words);
}

export function table(caption, names, body) {
  const heads = names.map((name) => h("th", { scope: "col", class: name[1] }, name[0]));
  return h(
    "div",
    { class: "box", role: "group", "aria-label": caption },
    h(
      "table",
      { class: "cards" },
      h("caption", { class: "away" }, caption),
      h("thead", {}, h("tr", {}, ...heads)),
      body,
    ),
  );
}

export function empty(...words) {
  return h("p", { class: "empty" }, ...words);
}

/** Either the rows, or what to say where there are none. */
export function either(parent, full, none) {
  parent.append(full, none);
  return (filled) => {
    set(full, "hidden", !filled);
    set(none, "hidden", filled);
  };
}
