"""Several brokers on one NATS server, a tool that writes down each of its runs, and callers that do not give up."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import Brokers, Served, Wire
from tests.support.config import toolhost
from tests.support.load import LEDGER, build_ledger_plugin
from tests.support.nats import NatsServer

AGAIN = {"unavailable", "overloaded", "draining", "breaker_open"}  # it has not run: the same key may ask again
REMEMBER = "[idempotency]\nttl_seconds = 3600\nentries = 100000\n"  # for longer than a trial takes
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
        **more: object,
    ) -> Served:
        """`more` is said of the ledger's toolhost."""
        settings = f'env = {{ LEDGER = "{self.ledger}" }}\n'
        text = f"{config}\n" + (toolhost("l", str(self._plugin), max=most, **more) + settings if tools else "")
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

    def __init__(self, brokers: list[Served], keys: list[str], seed: float) -> None:
        super().__init__(daemon=True)
        self._brokers = brokers  # may change while it runs
        self.keys = keys
        self._dice = random.Random(seed)
        self.answers: dict[str, dict[str, Any]] = {}
        self.tries = 0

    def run(self) -> None:
        left = list(self.keys)
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


class Trial:
    """Keyed calls through three brokers while these, and NATS, die, freeze and come back. Each key is called twice."""

    def __init__(self, crowd: Crowd, nats: NatsServer, seed: int) -> None:
        self.crowd = crowd
        self.brokers = [crowd.start(config=REMEMBER) for _ in range(3)]
        self._nats = nats
        self._dice = random.Random(seed)
        self.troubles: Counter[str] = Counter()
        self.callers: list[Caller] = []

    def begin(self, keys: int, pairs: int = 3) -> None:
        names = [f"k{n}" for n in range(keys)]
        halves = [names[n::pairs] for n in range(pairs)] * 2
        self.callers = [Caller(self.brokers, half, self._dice.random()) for half in halves]
        for caller in self.callers:
            caller.start()

    def busy(self) -> bool:
        return any(caller.is_alive() for caller in self.callers)

    def trouble(self) -> None:
        """One, of any kind."""
        kinds = {
            "a broker killed": self.kill_broker,
            "NATS killed": self.kill_nats,
            "a broker frozen": self.freeze_broker,
            "NATS frozen": self.freeze_nats,
        }
        kind = self._dice.choice(sorted(kinds))
        self.troubles[kind] += 1
        kinds[kind]()

    def kill_broker(self) -> None:
        number = self._dice.randrange(3)
        self.brokers[number].process.kill()
        self.brokers[number].process.wait()
        self.brokers[number] = self.crowd.start(config=REMEMBER)

    def kill_nats(self) -> None:
        self._nats.kill()
        time.sleep(self._dice.uniform(0.1, 1.5))
        self._nats.start()

    def freeze_broker(self) -> None:
        """For so long that it is given up, or not quite."""
        process = self._dice.choice(self.brokers).process
        process.send_signal(signal.SIGSTOP)
        time.sleep(self._dice.uniform(0.5, 8.0))
        process.send_signal(signal.SIGCONT)

    def freeze_nats(self) -> None:
        self._nats.pause()
        time.sleep(self._dice.uniform(0.5, 4.0))
        self._nats.go_on()

    def answered(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for caller in self.callers:
            caller.join(max(0.1, deadline - time.monotonic()))
        return not self.busy()

    def complaints(self) -> list[str]:
        runs = self.crowd.runs()
        found = [f"{key} ran {count} times" for key, count in runs.items() if count > 1]
        for caller in self.callers:
            for key in caller.keys:
                answer = caller.answers.get(key)
                if answer is None:
                    found.append(f"{key} has no answer")
                elif answer["ok"] and (runs[key] != 1 or answer["output_json"] != f'"{key}"'):
                    found.append(f"{key} ran {runs[key]} times, and was answered {answer}")
        return found

    def figures(self) -> dict[str, Any]:
        answers = [answer for caller in self.callers for answer in caller.answers.values()]
        return {
            "answers": len(answers),
            "asked": sum(caller.tries for caller in self.callers),
            "executions": sum(self.crowd.runs().values()),
            "may have run": sum(not answer["ok"] for answer in answers),
            **self.troubles,
        }


def go_through(trial: Trial, keys: int, pause: float, tell: Callable[[str], object], patience: float = 120.0) -> None:
    """One trouble after another, until all keys are answered."""
    trial.begin(keys)
    while trial.busy() and sum(trial.troubles.values()) < 200:
        time.sleep(pause)
        if trial.busy():
            trial.trouble()
        tell(", ".join(f"{name} {count}" for name, count in trial.figures().items()))
    trial.answered(patience)
