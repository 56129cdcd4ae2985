// A form from a JSON Schema. Every field gives JSON text, so that no number loses a digit on its way.
// It judges nothing but that: what fits is the broker's to say.

import { h, say, set } from "./dom.js";

const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;
const LONG = /^(text|content|contents|body|message|prompt|query|code|script|source|sql|html|markdown|description)$/i;

/** The fields of an object's schema; null where it says nothing that fields could be made of. */
export class Fields {
  static of(schema) {
    const properties = schema?.properties;
    const plain = properties && typeof properties === "object" && Object.keys(properties).length > 0;
    return plain ? new Fields(schema, properties) : null;
  }

  constructor(schema, properties) {
    const required = new Set(Array.isArray(schema.required) ? schema.required : []);
    const names = Object.keys(properties).sort((a, b) => required.has(b) - required.has(a));
    this.fields = names.map((name, at) => new Field(name, at, properties[name], required.has(name)));
    this.element = h("div", { class: "fields" }, ...this.fields.map((field) => field.element));
  }

  /** The object's JSON text; throws where a field cannot be JSON at all, and shows it there. */
  read() {
    this.clear();
    const members = [];
    let wrong = null;
    for (const field of this.fields) {
      try {
        const text = field.read();
        if (text !== null) members.push(`${JSON.stringify(field.name)}:${text}`);
      } catch (error) {
        field.blame(error.message);
        wrong ??= field;
      }
    }
    if (wrong) {
      wrong.input.focus();
      throw new Error(`${wrong.name}: see there`);
    }
    return `{${members.join(",")}}`;
  }

  /** False where the fields cannot hold all that there is. */
  fill(value) {
    if (value === null || typeof value !== "object" || Array.isArray(value)) return false;
    for (const field of this.fields) field.fill(value[field.name]);
    return Object.keys(value).every((name) => this.fields.some((field) => field.name === name));
  }

  clear() {
    for (const field of this.fields) field.blame("");
  }

  /** The broker has said what is wrong, and where: "input.items[2].name: …" is of the field `items`. */
  blame(message) {
    const field = this.fields.filter((one) => names(message, one.name)).at(-1);
    if (!field) return false;
    field.blame(message);
    field.input.focus();
    return true;
  }
}

function names(message, name) {
  if (message.includes(`"${name}" is a required property`)) return true;
  const path = `input.${name}`;
  return message.startsWith(path) && /^[.[:]/.test(message.slice(path.length));
}

class Field {
  constructor(name, at, schema, required) {
    this.name = name;
    this.schema = schema && typeof schema === "object" ? schema : {};
    this.required = required;
    this.kind = kindOf(this.schema);
    const id = `field-${at}`;
    this.input = this.make(id);
    this.input.id = id;
    this.trouble = h("p", { id: `${id}-trouble`, class: "trouble", hidden: true });
    const help = h("p", { id: `${id}-help`, class: "help" }, helpOf(this.schema));
    set(this.input, "aria-describedby", `${id}-help ${id}-trouble`);
    if (required) set(this.input, "aria-required", "true");
    const star = required ? h("em", {}, "required") : null;
    const head = h(
      "label",
      { class: "field", for: id },
      h("span", {}, name),
      h("small", {}, typeOf(this.schema)),
      star,
    );
    this.element = h("div", { class: "member" }, head, this.input, help, this.trouble);
  }

  make() {
    const { schema } = this;
    const plain = { autocomplete: "off", spellcheck: "false" };
    if (this.kind === "choice") {
      const options = this.choices().map(
        (value) => new Option(typeof value === "string" ? value : JSON.stringify(value), JSON.stringify(value)),
      );
      return h("select", {}, ...(this.required ? [] : [new Option("(not sent)", "")]), ...options);
    }
    if (this.kind === "number") {
      return h("input", {
        ...plain,
        type: "text",
        inputmode: schema.type === "integer" && schema.minimum >= 0 ? "numeric" : "decimal",
        placeholder: rangeOf(schema),
      });
    }
    if (this.kind === "json")
      return h("textarea", {
        ...plain,
        rows: 3,
        class: "code",
        placeholder: typeOf(schema).includes("array") ? "[ ]" : "{ }",
      });
    if (LONG.test(this.name) || schema.maxLength > 200) return h("textarea", { rows: 2, spellcheck: "false" });
    return h("input", {
      ...plain,
      type: schema.format === "password" || schema.writeOnly ? "password" : "text",
      placeholder: schema.default ?? "",
    });
  }

  choices() {
    if (this.schema.const !== undefined) return [this.schema.const];
    return this.schema.enum ?? [true, false];
  }

  /** JSON text, or null: not sent. */
  read() {
    const text = this.input.value;
    if (this.kind === "choice") return text || null;
    if (this.kind === "text") return text || this.required ? JSON.stringify(text) : null;
    const trimmed = text.trim();
    if (!trimmed) return null;
    if (this.kind === "number") {
      // What is no number goes as text: the broker says what it wants in its place.
      return NUMBER.test(trimmed) ? trimmed : JSON.stringify(trimmed);
    }
    try {
      JSON.parse(trimmed);
    } catch (error) {
      throw new Error(`This is not JSON: ${error.message}`);
    }
    return trimmed;
  }

  fill(value) {
    if (value === undefined) {
      this.input.value = this.kind === "choice" && this.required ? this.input.options[0]?.value : "";
    } else if (this.kind === "choice") this.input.value = JSON.stringify(value);
    else if (this.kind === "json") this.input.value = JSON.stringify(value, null, 2);
    else this.input.value = typeof value === "string" ? value : JSON.stringify(value);
  }

  blame(words) {
    say(this.trouble, words);
    set(this.trouble, "hidden", !words);
    set(this.input, "aria-invalid", words ? "true" : null);
  }
}

function kindOf(schema) {
  if (Array.isArray(schema.enum) || schema.const !== undefined) return "choice";
  const types = [schema.type].flat().filter((type) => type !== "null");
  if (types.length !== 1) return "json";
  return { string: "text", integer: "number", number: "number", boolean: "choice" }[types[0]] ?? "json";
}

function typeOf(schema) {
  if (Array.isArray(schema.enum)) return "one of";
  const type = [schema.type].flat().filter(Boolean).join(" or ");
  return type === "array" && typeof schema.items?.type === "string" ? `array of ${schema.items.type}` : type || "JSON";
}

function rangeOf({ minimum, maximum, default: usual }) {
  if (usual !== undefined) return String(usual);
  if (minimum !== undefined && maximum !== undefined) return `${minimum} to ${maximum}`;
  if (minimum !== undefined) return `at least ${minimum}`;
  return maximum !== undefined ? `at most ${maximum}` : "";
}

function helpOf(schema) {
  const said = typeof schema.description === "string" ? schema.description : "";
  const { minimum, maximum } = schema;
  const range = minimum !== undefined || maximum !== undefined ? rangeOf({ minimum, maximum }) : "";
  const pattern = schema.pattern ? `like ${schema.pattern}` : "";
  const usual = schema.default !== undefined ? `default ${JSON.stringify(schema.default)}` : "";
  const more = [range, pattern, usual].filter(Boolean).join(", ");
  return [said, more && `${more[0].toUpperCase()}${more.slice(1)}.`].filter(Boolean).join(" ");
}
