// The page: one stream of reports, shown by panels; one form; the operator's words.

import { ask } from "./api.js";
import { Link, notice, Now } from "./live.js";
import { Operator } from "./operator.js";
import { Errors, Latencies, Leases } from "./panels.js";
import { Pools } from "./pools.js";
import { History } from "./report.js";
import { Stream } from "./stream.js";
import { Tools } from "./tools.js";
import { Attempt } from "./try.js";

const history = new History();
let known = []; // tools, as the broker lists them
let seen = ""; // of which broker and tools the reports are

const stream = new Stream("/status/stream", take, (state) => link.show(state));
const link = new Link(
  () => stream.start(),
  () => act("resume", "*"),
);
const operator = new Operator(() => {
  stream.start();
  learn();
});
const act = (word, name) => operator.act(word, name);
const now = new Now();
const attempt = new Attempt();
const latencies = new Latencies();
const pools = new Pools(act);
const tools = new Tools({ act, choose: (name) => attempt.choose(name), look: (name) => latencies.look(name) });
const errors = new Errors();
const leases = new Leases({ revoke: (one) => operator.act("lease.revoke", one.fingerprint), issue });

async function issue(members) {
  const issued = await operator.act("lease.issue", members.tool_aid, members);
  if (issued) leases.issued(issued, (tool, lease) => attempt.withLease(tool, lease));
}

/** The tools that may be called. */
async function learn() {
  try {
    const answer = await ask("/v1/tools");
    if (!answer.ok) return;
    known = answer.body.tools.sort((a, b) => (a.name < b.name ? -1 : 1));
    attempt.know(known);
  } catch {
    // the stream says that the broker is away, and comes back to us
  }
}

function take(said) {
  const report = history.add(said);
  const names = `${report.pid} ${report.tools
    .map((tool) => tool.aid)
    .sort()
    .join(" ")}`;
  if (names !== seen) learn();
  seen = names;
  link.note(report);
  for (const panel of [now, pools, errors, latencies]) panel.show(report);
  tools.show(report, known);
  leases.show(report, known);
}

setInterval(() => tools.tick(), 250);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && document.body.dataset.link === "lost") stream.start();
});
addEventListener("unhandledrejection", (event) => notice(String(event.reason?.message ?? event.reason), "bad"));
stream.start();
