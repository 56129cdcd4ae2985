// The live report: server-sent events, read with fetch because EventSource cannot send a token.
// Lost, it is asked for again after a while, each time a longer one.

import { headers, sentence } from "./api.js";

const FIRST_WAIT = 0.5;
const LONGEST_WAIT = 8;
const FINAL = new Set([400, 401, 403, 404]); // the same question would get the same answer
const SILENCE = 6; // seconds: it says something each second

/** `tell` hears {state: "connecting" | "live" | "lost" | "refused", retry, reason}; `take` gets each report. */
export class Stream {
  constructor(path, take, tell) {
    this.path = path;
    this.take = take;
    this.tell = tell;
    this.wait = FIRST_WAIT;
  }

  /** Now, whatever it is doing. */
  start() {
    this.abort?.abort();
    clearTimeout(this.timer);
    this.run(new AbortController());
  }

  async run(abort) {
    this.abort = abort;
    this.tell({ state: "connecting" });
    try {
      const response = await fetch(this.path, { headers: headers(), signal: abort.signal, cache: "no-store" });
      if (!response.ok) {
        const text = await response.text();
        throw new Refused(response.status, text);
      }
      await this.read(response.body, abort);
      throw new Error("the broker ended it");
    } catch (error) {
      clearTimeout(this.watch);
      if (abort !== this.abort) return; // another one has begun
      if (error instanceof Refused && FINAL.has(error.status)) {
        this.tell({ state: "refused", reason: error.message });
        return;
      }
      const reason = error instanceof Refused ? error.message : "";
      this.tell({ state: "lost", retry: this.wait, reason });
      this.timer = setTimeout(() => this.start(), this.wait * 1000);
      this.wait = Math.min(this.wait * 2, LONGEST_WAIT);
    }
  }

  async read(body, abort) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      clearTimeout(this.watch);
      this.watch = setTimeout(() => abort.abort(), SILENCE * 1000);
      const { value, done } = await reader.read();
      if (done || abort !== this.abort) return;
      const events = (rest + value).split(/\r?\n\r?\n/);
      rest = events.pop();
      for (const event of events) this.hear(event);
    }
  }

  hear(event) {
    const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
    if (!data.length) return;
    this.wait = FIRST_WAIT;
    this.tell({ state: "live" });
    const report = JSON.parse(data.map((line) => line.slice(5)).join("\n"));
    try {
      this.take(report);
    } catch (error) {
      reportError(error); // a mistake of the page's is not a stream that is lost
    }
  }
}

class Refused extends Error {
  constructor(status, text) {
    let body = null;
    try {
      body = JSON.parse(text);
    } catch {
      // not JSON: the status has to do
    }
    super(sentence({ status, body }));
    this.status = status;
  }
}
