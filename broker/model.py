"""The one canonical shape of tools and calls that faces, policy and runtimes share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from broker import errors
from broker._native import ffi, lib
from broker.errors import Kind, Refusal
from broker.policy.breaker import Breaker
from broker.policy.leases import tier_of
from broker.policy.schema import Schema

if TYPE_CHECKING:
    from broker.policy.idempotency import Entry
    from broker.policy.rights import Rights


_encode = msgspec.json.Encoder().encode

MACHINA = "machina"  # the face that is the board's: the line protocol
NEWCOMER_CALLS = 3  # of a tool run alone and fenced, before it shares a toolhost
HUNG_UP = Refusal(errors.UNAVAILABLE, "the caller has hung up")  # what becomes of calls that nobody waits for


class ToolInfo(msgspec.Struct, frozen=True, rename={"schema": "input_schema"}):
    """What a toolhost says of a tool (`--list`)."""

    aid: str
    name: str = ""
    deterministic: bool = True
    tags: tuple[str, ...] = ()
    side_effects: tuple[str, ...] = ()
    replay_inputs: tuple[str, ...] = ()
    description: str = ""
    version: str = "1"
    stability: Literal["stable", "experimental", "deprecated"] = "experimental"
    examples: tuple[dict[str, Any], ...] = ()
    schema: dict[str, Any] | None = None
    files: bool = False  # it may leave files in the folder of a call's job
    checks: bool = False  # it checks its input itself: the schema is for readers
    live: bool = False  # its calls tell of themselves while they run, and may change their session's second document
    elsewhere: bool = False  # another broker of the cluster runs it


class Tool:
    """A tool that can be called: its description, where it runs, and what we have learned about it."""

    __slots__ = (
        "_text",
        "breaker",
        "calls",
        "clean",
        "counts_errors",
        "failed",
        "head",
        "index",
        "info",
        "latencies",
        "name",
        "options",
        "paused",
        "runtime",
        "schema",
        "stats",
        "tier",
        "timeout",
        "untold",
        "used",
    )

    def __init__(self, index: int, info: ToolInfo, runtime: Runtime, timeout: float, breaker: Breaker) -> None:
        self.index = index
        self.name = info.aid
        self.head = b'{"aid":' + _encode(info.aid) + b',"ds_state":{"slots":{}},"input_json":'  # of a plain call's line
        self.describe(info)
        self.breaker = breaker
        self.counts_errors = False  # its own errors count for the breaker
        self.runtime = runtime
        self.timeout = timeout
        self.options: dict[str, Any] | None = None  # what becomes of its callers' arguments
        self._text = ffi.from_buffer(info.aid.encode())
        self.stats = ffi.new("tb_tool *", {"index": index, "timeout": timeout})  # what it costs; the board's view of it
        self.stats.name, self.stats.name_len = self._text, len(self._text)
        self.latencies = {MACHINA: ffi.addressof(self.stats, "latency")}  # by face; the board counts in its own
        self.paused = False  # its calls wait until an operator lets them go
        self.clean = 0  # calls in a row that kept to the protocol: nobody shares a toolhost with a newcomer
        self.calls = 0
        self.failed = 0
        self.untold = 0  # calls that went well and that nobody has been told of yet,
        self.used = 0.0  # and when the last of them was

    def describe(self, info: ToolInfo) -> None:
        """What it is now."""
        self.info = info
        self.tier = tier_of(info.aid, info.side_effects)
        enforced = info.schema if not info.checks else None
        self.schema = Schema(enforced, info.aid) if enforced is not None else None  # its input has to fit

    def pause(self, paused: bool) -> None:
        """None of its calls is handed over; or they are again."""
        self.paused = self.stats.paused = paused

    def took(self, face: str, seconds: float) -> None:
        """A call that has come through this face was answered, so long after it had been handed over."""
        latency = self.latencies.get(face)
        if latency is None:
            latency = self.latencies[face] = ffi.new("tb_latency *")
        lib.tb_latency_add(latency, seconds, 1)

    def trust(self, clean: int) -> None:
        """So many calls in a row have kept to the protocol."""
        self.clean = clean
        self.stats.known = clean >= NEWCOMER_CALLS

    def forget(self) -> None:
        """It is another one now: nothing is known of it."""
        self.trust(0)
        self.stats.cost = self.stats.best = 0.0


class Place(NamedTuple):
    """Where files of a call may be put."""

    job: str  # its name
    folder: str
    largest: int  # bytes of a file


class Live(Protocol):
    """What a call of a tool that tells of itself while it runs brings along."""

    @property
    def stream(self) -> bool:
        """The caller wants to hear of it at once."""

    @property
    def request(self) -> str:
        """The caller's own name for the call; empty where it has none."""

    def begin(self) -> None:
        """From now on it may patch."""

    def patch(self, patch: bytes) -> str:
        """Merges it into the session's second document, whole or not at all; why not, where not."""

    def state(self) -> bytes:
        """That document."""

    def end(self) -> None:
        """It has patched for the last time."""


class Named(Protocol):
    """Somebody with rights."""

    @property
    def principal(self) -> str: ...

    @property
    def rights(self) -> Rights: ...


class Caller(Named, Protocol):
    """Who asked: calls wait in turn by caller, and are dropped when it hangs up."""

    @property
    def face(self) -> str:
        """Through which it has come."""

    number: int  # no other caller has it

    @property
    def turns(self) -> Hashable:
        """Those who have the same take turns with the others as one; None: each for itself."""

    line: Any  # its place on the board (tb_caller *), or None: replies to it pass through its sink only

    def __hash__(self) -> int: ...

    def gone(self) -> bool:
        """Nobody is waiting any more: what has not run need not."""

    def took(self, ticket: Any) -> None:
        """A call of its own has been lent something."""

    def full(self, work: Work) -> bool:
        """So many replies are waiting to be read, or for their turn, that this work had better wait, too."""

    def behind(self) -> bool:
        """It does not read what it is told."""


class Sink(Protocol):
    """Where replies go."""

    def deliver(self, work: Work, lines: bytes, count: int) -> None:
        """`count` reply lines for the next `count` calls of `work`, ids spliced in."""

    def tell(self, work: Work, members: bytes) -> None:
        """An event of a call under way, as members of an object."""

    def repeat(self, work: Work, entry: Entry) -> None:
        """The answer is a hit: it can be had from the entry when there is room for it."""

    def refuse(self, work: Work, refusal: Refusal) -> None:
        """All calls of `work` end here, each with this answer."""


class Ticket(Protocol):
    """What the policy has lent to a call, as far as a runtime must know of it."""

    @property
    def once(self) -> bool:
        """What may have run must not be run again, whatever the configuration says."""

    @property
    def handed(self) -> bool:
        """A toolhost has been given the call: it may have run."""

    @property
    def settled(self) -> bool:
        """It is ready, and nobody has to be told."""

    def ready(self) -> bool:
        """It may be handed over. If not yet, now that it has room: others are told, and its runtime is pumped then."""

    def handed_over(self) -> None:
        """Told right before a toolhost gets the call: from now on it may run."""


Judge = Callable[["Work"], Refusal | None]


class Runtime(Protocol):
    """How a tool is run."""

    def submit(self, work: Work, now: float) -> None:
        """Takes the work over. Each of its calls is delivered or refused, once."""

    def revise(self, judge: Judge, index: int | None = None) -> None:
        """What waits (for this tool, or any) and has not been handed over is asked about again."""


class Policy(Protocol):
    """What pools ask of, and tell, the dispatcher."""

    def answered(self, tool: Tool, count: int, succeeded: int, now: float) -> None:
        """So many replies as the protocol wants them; of these, so many that are no error of the tool's own."""

    def failed(self, tool: Tool, kind: Kind, reason: str, now: float) -> None:
        """The tool's toolhost did something wrong."""

    def noted(self, what: str, code: str, reason: str) -> None:
        """Something else went wrong that an operator may want to know of, with a tool or a pool."""

    def keyed(self, work: Work) -> None:
        """A run of calls with keys that the board had handed over has come back."""

    def kept(self, name: int) -> None:
        """The board has brought the answer to a key that is waited for."""

    def judge(self, work: Work) -> Refusal | None:
        """Why a call that has been waiting may not run after all."""

    def rehome(self, work: Work, closed: Refusal) -> None:
        """Its pool has closed before it ran: it goes to where its tool is now, or is told this."""


class Work:
    """A run of calls of one tool for one caller, as the lines that the toolhost gets. One call is a run of one."""

    __slots__ = (
        "at",
        "caller",
        "count",
        "entries",
        "ids",
        "job",
        "lines",
        "live",
        "moved",
        "moves",
        "options",
        "queued",
        "sink",
        "suspect",
        "ticket",
        "timeout",
        "tool",
    )

    def __init__(
        self, tool: Tool, lines: bytes, count: int, ids: bytes | None, caller: Caller, sink: Sink, timeout: float
    ) -> None:
        self.tool = tool
        self.lines = lines
        self.count = count
        self.ids = ids  # raw JSON, one a line, or None
        self.caller = caller
        self.sink = sink  # the caller, or a ticket that looks at the reply first
        self.timeout = timeout
        self.queued = 0.0
        self.moved = False  # it came (back) to its queue late, and may stand in front of older ones
        self.moves = 0  # times that it was run again
        self.ticket: Ticket | None = None
        self.suspect = tool  # of a line of our own: whose call it is about
        self.entries: list[Any] | None = None  # of a run of calls with keys, one a call (tb_entry *, held)
        self.job: Place | None = None  # where files of its may be put
        self.options: dict[str, Any] | None = None  # of the tool, for this call
        self.live: Live | None = None
        self.at = -1  # the place of its first reply in the caller's order; negative: it may overtake

    def weight(self) -> int:
        """Bytes that it holds while it waits."""
        return len(self.lines) + len(self.ids or b"")

    def take(self, count: int) -> Work:
        """Splits off the first `count` calls."""
        cut = lib.tb_skip_lines(self.lines, len(self.lines), count)
        ids = None
        if self.ids is not None:
            ids_cut = lib.tb_skip_lines(self.ids, len(self.ids), count)
            ids, self.ids = self.ids[:ids_cut], self.ids[ids_cut:]
        first = Work(self.tool, self.lines[:cut], count, ids, self.caller, self.sink, self.timeout)
        self.lines = self.lines[cut:]
        self.count -= count
        first.queued = self.queued
        first.moved = self.moved
        first.moves = self.moves
        first.ticket = self.ticket
        first.job = self.job
        first.options = self.options
        if self.entries is not None:
            first.entries, self.entries = self.entries[:count], self.entries[count:]
        first.at = self.at
        if self.at >= 0:
            self.at += count
        return first


class _Nobody:
    """The caller of calls, and the sink of replies, that nobody waits for any more."""

    principal = ""
    rights: Any = None
    face = MACHINA  # callers elsewhere stay with their calls
    number = 0
    turns = None
    line: Any = None

    def gone(self) -> bool:
        return True

    def took(self, ticket: Any) -> None:
        pass

    def full(self, work: Work) -> bool:  # noqa: ARG002
        return False

    def behind(self) -> bool:
        return False

    def deliver(self, work: Work, lines: bytes, count: int) -> None:
        pass

    def tell(self, work: Work, members: bytes) -> None:
        pass

    def repeat(self, work: Work, entry: Entry) -> None:
        pass

    def refuse(self, work: Work, refusal: Refusal) -> None:
        pass


NOBODY = _Nobody()
