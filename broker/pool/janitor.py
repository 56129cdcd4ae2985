"""The one owner of every expiry: waiting calls, old and fat processes, idle sessions, callers that left, orphans."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from broker.pool import process
from broker.pool.core import Core
from broker.pool.pool import Pool

ROUND_SECONDS = 0.1
SLOW_ROUND_SECONDS = 2.0


class Janitor:
    def __init__(
        self, core: Core, rounds: Iterable[Callable[[float], None]], pools: Callable[[], Iterable[Pool]]
    ) -> None:
        self._core = core
        self._rounds = tuple(rounds)
        self._pools = pools
        self._next_slow = 0.0
        self._stopped = False
        self._schedule()

    def stop(self) -> None:
        self._stopped = True

    def _schedule(self) -> None:
        if not self._stopped:
            self._core.loop.call_later(ROUND_SECONDS, self._round)

    def _round(self) -> None:
        try:
            self._clean()
        finally:  # whatever went wrong, there is a next round
            self._schedule()

    def _clean(self) -> None:
        now = time.monotonic()
        self._core.idle()  # so that it is always of the recent past
        for expire in self._rounds:
            expire(now)
        if now >= self._next_slow:
            self._next_slow = now + SLOW_ROUND_SECONDS
            self._weigh()
            process.end_orphans()
        self._core.flush()

    def _weigh(self) -> None:
        """Recycles toolhosts that have grown too much since they came alive."""
        for pool in self._pools():
            growth = pool.settings.max_rss_growth_mb * 1024 * 1024
            for host in list(pool.ready) if growth else ():
                resident = process.resident(host.process.pid)
                if resident > host.rss + growth:
                    pool.recycle(host, f"grew to {resident // (1024 * 1024)} MB (max_rss_growth_mb)")
