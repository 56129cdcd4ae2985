// Builds and updates elements. What comes from the broker only ever becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** h("button", {class: "small", onclick: stop}, "Stop") */
export function h(name, attributes = {}, ...children) {
  return dress(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, name), attributes, children);
}

function dress(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else set(element, key, value);
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

/** An attribute; none for null and false. Nothing is touched that is so already. */
export function set(element, key, value) {
  if (value == null || value === false) {
    if (element.hasAttribute(key)) element.removeAttribute(key);
    return;
  }
  const said = value === true ? "" : String(value);
  if (element.getAttribute(key) !== said) element.setAttribute(key, said);
}

/** Text that is the same already is left alone, with whatever of it somebody has selected. */
export function say(element, value) {
  const said = value == null ? "" : String(value);
  if (element.textContent !== said) element.textContent = said;
}

/** A name that may be broken after its dots and underscores, and only in need elsewhere. */
export function breakable(name) {
  return name.split(/(?<=[._])/).flatMap((part, at) => (at ? [document.createElement("wbr"), part] : [part]));
}

export const find = (id) => document.getElementById(id);

const kept = new WeakMap();

export const rowsOf = (parent) => kept.get(parent)?.values() ?? [];

/** One child for each item, in their order. A child stays as long as its key: the focus in it does, too. */
export function keyed(parent, items, keyOf, make, update) {
  const before = kept.get(parent) ?? new Map();
  const now = new Map();
  const rows = items.map((item) => {
    let key = String(keyOf(item));
    while (now.has(key)) key += "'"; // two of one name are two all the same
    now.set(key, before.get(key) ?? make(item));
    return now.get(key);
  });
  for (const [key, row] of before) if (!now.has(key)) row.element.remove();
  let place = parent.firstElementChild;
  rows.forEach((row, at) => {
    update(row, items[at]);
    if (row.element === place) place = place.nextElementSibling;
    else parent.insertBefore(row.element, place);
  });
  kept.set(parent, now);
}
