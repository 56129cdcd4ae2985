"""Which toolhost may be given a call: idle ones first, then pipelining; the slow and the unknown by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from broker.config import Toolhost
from broker.model import Caller, Tool
from broker.pool.host import SLOW_SECONDS, Host
from broker.pool.rules import NEWCOMER_CALLS

WINDOW_SECONDS = 0.002  # of work in one toolhost's pipe
WINDOW_LEAST, WINDOW_MOST = 2, 512  # two: waiting for a wake-up costs a machine that is busy more than the call
WINDOW_BYTES = 4 * 1024 * 1024  # of replies that may come from one toolhost at once
OUTBOX_MOST = 4 * 1024 * 1024


def runs_alone(tool: Tool, settings: Toolhost) -> bool:
    """Slow tools, newcomers, and toolhosts that are not to be given more than one call at a time."""
    return tool.best > SLOW_SECONDS or tool.clean < NEWCOMER_CALLS or not settings.pipeline


def window(tool: Tool) -> int:
    """How many calls of this tool may be in one toolhost's pipe: two milliseconds' worth, and not too many bytes."""
    calls = min(WINDOW_MOST, max(WINDOW_LEAST, int(WINDOW_SECONDS / tool.cost)))
    if tool.size * calls > WINDOW_BYTES:
        calls = max(1, int(WINDOW_BYTES / tool.size))
    return calls


def room(host: Host | None, tool: Tool) -> int:
    """How many more calls of this tool it can be given."""
    if host is None or host.outbox.size > OUTBOX_MOST:
        return 0
    return max(0, window(tool) - host.inflight)


def foreign(host: Host, caller: Caller) -> bool:
    """It cannot be fenced, and has served somebody else: what it says next might be meant for that one."""
    return not host.quotes and host.last_caller is not None and host.last_caller is not caller


def least_busy(ready: Sequence[Host], reserved: Host | None, caller: Caller | None) -> Host | None:
    """Callers share a toolhost only where fences can be put between them."""
    best = None
    for host in ready:
        if host.alone or host is reserved:
            continue
        if caller is not None and foreign(host, caller):
            continue
        if not host.inflight:
            return host
        if best is None or host.inflight < best.inflight:
            best = host
    return best


def may_be_alone(tool: Tool, ready: Sequence[Host], most: int) -> bool:
    """The last toolhost is for those who are not known to be slow and have none yet."""
    alone = sum(host.alone for host in ready)
    if alone < max(1, most - 1):
        return True
    if alone >= most or tool.best > SLOW_SECONDS:
        return False
    return not any(host.flight and host.flight[0].tool is tool for host in ready)


def idle_for(tool: Tool, ready: Sequence[Host], most: int) -> Host | None:
    """A toolhost that the call can have to itself."""
    if not may_be_alone(tool, ready, most):
        return None
    return next((host for host in ready if not host.flight and not host.alone), None)
