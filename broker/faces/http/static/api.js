// Asks the broker: with the operator's token, where there is one, and always to a sentence where it says no.

const KEY = "token";

/** Kept for this tab only, and never in an address. */
export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  keep: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export function headers(shown = token.get()) {
  return shown ? { Authorization: `Bearer ${shown}` } : {};
}

/** {status, ok, headers, body}; body is the JSON, or null where it was none. */
export async function ask(path, { method = "GET", body, signal, shown, more } = {}) {
  const asked = { method, signal, headers: { ...headers(shown), ...more }, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    asked.body = typeof body === "string" ? body : JSON.stringify(body);
    asked.headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, asked);
  const text = await response.text();
  return { status: response.status, ok: response.ok, headers: response.headers, text, body: parsed(text) };
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** The broker's own words for a refusal. */
export function sentence(answer) {
  const error = answer.body?.error;
  if (typeof error === "string") return error;
  return error?.message ?? `The broker answered ${answer.status}.`;
}

/** An operator's word: what it answers, or an Error with the broker's sentence. */
export async function operate(word, members = {}, shown) {
  const answer = await ask(`/operator/${word}`, { method: "POST", body: members, shown });
  if (!answer.ok || answer.body?.ok === false) throw Object.assign(new Error(sentence(answer)), { answer });
  return answer.body;
}
