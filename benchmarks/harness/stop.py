"""Ctrl-C that is not lost: where Python cannot raise (a destructor, a callback), the next round ends the run."""

from __future__ import annotations

import signal
from types import FrameType

_asked = False


def listen() -> None:
    """From now on. A background job, which ignores SIGINT, goes on to do so."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _stop)


def _stop(_number: int, _frame: FrameType | None) -> None:
    global _asked
    _asked = True
    raise KeyboardInterrupt


def look() -> None:
    """Between two things."""
    if _asked:
        raise KeyboardInterrupt
