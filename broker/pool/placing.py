"""Which toolhost may be given a call to itself: the slow and the unknown. (Others share: native/place.c.)"""

from __future__ import annotations

from collections.abc import Sequence

from broker._native import lib
from broker.model import Caller, Tool
from broker.pool.host import Host
from broker.settings import Toolhost


def runs_alone(tool: Tool, settings: Toolhost) -> bool:
    """Slow tools, newcomers, and toolhosts that are not to be given more than one call at a time."""
    return not settings.pipeline or not lib.tb_shares(tool.stats)


def foreign(host: Host, caller: Caller) -> bool:
    """It cannot be fenced, and has served somebody else: what it says next might be meant for that one."""
    line = host.line
    return not line.quotes and line.last and line.last != caller.number


def may_be_alone(tool: Tool, ready: Sequence[Host], most: int) -> bool:
    """The last toolhost is for those who are not known to be slow and have none yet."""
    alone = sum(host.line.alone for host in ready)
    if alone < max(1, most - 1):
        return True
    if alone >= most or lib.tb_slow(tool.stats):
        return False
    return not any(host.line.runs and host.first_tool() is tool for host in ready)


def idle_for(tool: Tool, ready: Sequence[Host], most: int) -> Host | None:
    """A toolhost that the call can have to itself."""
    if not may_be_alone(tool, ready, most):
        return None
    return next((host for host in ready if not host.line.runs and not host.line.alone), None)
