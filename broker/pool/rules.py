"""What all pools go by, whoever drives them."""

from __future__ import annotations

import itertools
import os
import threading

PROBATION = -17  # where a tool's count goes on after it broke the protocol
MOST_STRANGERS = 64  # lines that nobody asked for, before a toolhost is given up
STARTUP_SECONDS = 10.0  # for the first sign of life
SETTLED_SECONDS = 5.0  # a toolhost that dies earlier without having done anything did not start well
PATIENCE_SECONDS = 0.02  # of waiting, before another process is started for it
JITTER = 0.1
CPUS = len(os.sched_getaffinity(0))
SPIN_SECONDS = 0.00005 if CPUS > 1 else 0.0  # of looking for an answer before one sleeps: longer than a wake-up takes


_local = threading.local()
_numbers = itertools.count(1)


def this_thread() -> int:
    """A number that no other thread has had. (The system's own are used again.)"""
    try:
        number: int = _local.number
    except AttributeError:
        number = _local.number = next(_numbers)
    return number
