"""Several brokers on one NATS server, a tool that writes down each of its runs, and callers that do not give up."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.conftest import Brokers, Served, Wire
from tests.support.config import toolhost
from tests.support.load import LEDGER, build_ledger_plugin
from tests.support.nats import NatsServer

AGAIN = {"unavailable", "overloaded", "draining", "breaker_open"}  # it has not run: the same key may ask again
RAN = {"crash", "timeout"}  # it may have run


class Crowd:
    """Brokers that come and go."""

    def __init__(self, folder: Path, include: str, nats: NatsServer) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.ledger = folder / "ledger"
        self._brokers = Brokers(folder)
        self._plugin = build_ledger_plugin(folder, include)
        self._nats = nats

    def start(
        self,
        *flags: str,
        config: str = "",
        most: int = 4,
        tools: bool = True,
        env: dict[str, str] | None = None,
        url: str = "",
    ) -> Served:
        settings = f'env = {{ LEDGER = "{self.ledger}" }}\n'
        text = f"{config}\n" + (toolhost("l", str(self._plugin), max=most) + settings if tools else "")
        broker = self._brokers.start("--nats", url or self._nats.url, *flags, config=text, env=env)
        broker.eventually(lambda: broker.status()["cluster"]["connected"])
        return broker

    def runs(self) -> Counter[str]:
        return Counter(self.ledger.read_text().split()) if self.ledger.exists() else Counter()

    def end(self) -> None:
        self._brokers.end()


def keyed(key: str, ms: int = 0, **more: Any) -> dict[str, Any]:
    return {"aid": LEDGER, "input_json": f"{key} {ms} ok", "idempotency_key": key, **more}


class Caller(threading.Thread):
    """Calls each of its keys until it has an answer that is final, of whichever broker is there."""

    def __init__(self, brokers: list[Served], keys: list[str], seed: int) -> None:
        super().__init__(daemon=True)
        self._brokers = brokers  # may change while it runs
        self._keys = keys
        self._dice = random.Random(seed)
        self.answers: dict[str, dict[str, Any]] = {}
        self.tries = 0

    def run(self) -> None:
        left = list(self._keys)
        while left:
            self._dice.shuffle(left)
            self._converse(left[:32])
            left = [key for key in left if key not in self.answers]

    def _converse(self, keys: list[str]) -> None:
        path = self._dice.choice(self._brokers).path
        try:
            with Wire(path, 60.0) as wire:
                for key in keys:
                    wire.send({**keyed(key), "id": key})
                    self.tries += 1
                for _ in keys:
                    line = wire.raw()
                    if not line:
                        return
                    answer = json.loads(line)
                    if answer["ok"] or answer.get("type") in RAN:
                        self.answers[answer["id"]] = answer
                    else:
                        assert answer["type"] in AGAIN, answer
        except OSError:
            time.sleep(0.05)
