"""What all pools go by, whoever drives them."""

from __future__ import annotations

import itertools
import os
import threading

from broker.model import Tool

NEWCOMER_CALLS = 3  # of a tool run alone and fenced, before it shares a toolhost
PROBATION = -17  # where a tool's count goes on after it broke the protocol
MOST_STRANGERS = 64  # lines that nobody asked for, before a toolhost is given up
STARTUP_SECONDS = 10.0  # for the first sign of life
SETTLED_SECONDS = 5.0  # a toolhost that dies earlier without having done anything did not start well
PATIENCE_SECONDS = 0.02  # of waiting, before another process is started for it
JITTER = 0.1
CPUS = len(os.sched_getaffinity(0))


def learn(tool: Tool, sample: float) -> None:
    """What a call costs follows quickly both ways; the best one falls at once and rises slowly."""
    tool.cost = (tool.cost + sample) / 2 if tool.cost else sample
    if not tool.best or sample < tool.best:
        tool.best = sample
    else:
        tool.best += (sample - tool.best) / 16


_local = threading.local()
_numbers = itertools.count(1)


def this_thread() -> int:
    """A number that no other thread has had. (The system's own are used again.)"""
    try:
        number: int = _local.number
    except AttributeError:
        number = _local.number = next(_numbers)
    return number
