"""Mixed load with faults: callers that send whatever callers send, and tell the auditor."""

from __future__ import annotations

import atexit
import collections
import functools
import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import Brokers, Served, Wire
from tests.support.auditor import BAD_DAY, MAY_HAVE_RUN, Auditor, Footprint, Promise, output
from tests.support.config import toolhost
from tests.support.proxy import FaultProxy, Trouble

LEDGER, LEASED = "AID.TEST.LEDGER.v1", "AID.TEST.LEASED.v1"
ECHO, STATE = "AID.DEMO.ECHO.v1", "AID.DEMO.STATE.v1"
DEPTH = 16  # calls that a caller has under way
WAIT_SECONDS = 60.0

_effects = itertools.count()
_any = frozenset(MAY_HAVE_RUN)

# What the fault tools are asked. Some of them answer well, and do harm behind it.
FAULTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("SEGV", "HANG", "HANG_TERM", "JUNK", "HALF", "CLOSE", "OVERSIZE", "SEGV_MID")},
    "EXIT": {"code": 3},
    "STDERR": {"bytes": 100_000},
    "STDOUT": {"text": "noise"},
    "GRANDCHILD": {"ms": 2000},
    "MEMORY": {"mb": 50},
    "TWICE": {"n": 1},
    "LATE": {"ms": 400},
}


def build_ledger_plugin(folder: Path, include: str) -> Path:
    """A copy of its own for each test, built once."""
    return Path(shutil.copy(_built(include), folder / "ledger_plugin.so"))


@functools.cache
def _built(include: str) -> Path:
    folder = tempfile.mkdtemp(prefix="ledger-plugin-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    plugin = Path(folder, "ledger_plugin.so")
    source = Path(__file__).with_name("ledger_plugin.cpp")
    command = ["c++", "-std=c++17", "-shared", "-fPIC", "-O1", f"-I{include}", str(source), "-o", str(plugin)]
    subprocess.run(command, check=True)
    return plugin


class Caller(threading.Thread):
    """One connection after another, until the time is over."""

    def __init__(self, load: Load, name: str, path: str, *, ordered: bool, seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.load = load
        self.path = path
        self.ordered = ordered  # without ids: replies in the order of the requests
        self.dice = random.Random(seed)
        self.connections = 0
        self.calls = 0

    def run(self) -> None:
        try:
            while not self.load.over.is_set():
                self.connections += 1
                self._converse(f"{self.name}.{self.connections}")
        except Exception as error:
            self.load.auditor.complain(f"{self.name}: {error!r}")

    def _converse(self, who: str) -> None:
        auditor, over = self.load.auditor, self.load.over
        limit = self.dice.randrange(20, 2000)
        sent = answered = 0
        keyed: dict[int, bool] = {}
        wire = Wire(self.path, WAIT_SECONDS)
        try:
            while True:
                batch = []
                while sent < limit and sent - answered < DEPTH and not over.is_set():
                    request, promise = self._something(who)
                    keyed[sent] = "idempotency_key" in request
                    auditor.sent(who, sent, promise)
                    batch.append(request if self.ordered else {"id": sent, **request})
                    sent += 1
                    if self.dice.random() < 0.3:
                        break
                wire.send(*batch)
                if sent == answered:
                    break
                if self.dice.random() < self.load.hang_ups and not over.is_set():
                    break  # without a word, with calls under way
                while True:
                    reply = wire.reply()
                    number = answered if self.ordered else reply["id"]
                    auditor.got(who, number, reply, keyed=keyed.pop(number, False))
                    answered += 1
                    if answered == sent or not (wire._buffer or select.select([wire.socket], [], [], 0)[0]):
                        break
        except (AssertionError, ConnectionError, json.JSONDecodeError) as error:  # cut, perhaps within a line
            if not self.load.may_cut(self.path):
                auditor.complain(f"{who}: the broker closed the connection: {error!r}")
        finally:
            self.calls += sent
            wire.socket.close()
            auditor.lost(who)

    def _something(self, who: str) -> tuple[dict[str, Any], Promise]:
        dice = self.dice
        what = dice.random()
        if what < 0.40:
            text = json.dumps(f"{who}-{next(_effects)}" + "x" * dice.choice((0, 0, 0, 50, 5000)))
            return {"aid": ECHO, "input_json": text}, Promise(text)
        if what < 0.60:
            effect = f"e{next(_effects)}"
            return {"aid": LEDGER, "input_json": f"{effect} {self._ms()} ok"}, Promise(output(effect), effect, _any)
        if what < 0.80:  # a key that others use, too, within the same second
            effect = f"k{time.monotonic():.0f}.{dice.randrange(30)}"
            request = {"aid": LEDGER, "input_json": f"{effect} {self._ms()} ok", "idempotency_key": effect}
            return request, Promise(output(effect), effect, _any)
        if what < 0.83:
            effect = f"d{next(_effects)}"
            more = {"idempotency_key": effect} if dice.random() < 0.5 else {}
            return {"aid": LEDGER, "input_json": f"{effect} 0 die", **more}, Promise(None, effect, _any)
        if what < 0.90:
            slot, value = dice.randrange(256), f"{who}-{next(_effects)}"
            request = {"op": "put", "slot": slot, "value": value}
            return (
                {"aid": STATE, "input_json": json.dumps(request), "ds_state": {"delta": True, "slots": {}}},
                Promise(None),
            )
        if what < 0.93:
            return self._leased()
        if what < 0.96:
            name = dice.choice(list(FAULTS))
            self.load.committed[name] += 1
            timeout = 150 if name in ("HANG", "HANG_TERM", "LATE") else 20_000
            request = {"aid": f"AID.FAULT.{name}.v1", "input_json": json.dumps(FAULTS[name]), "timeout_ms": timeout}
            return request, Promise(None, "", _any)
        return self._nonsense()

    def _leased(self) -> tuple[dict[str, Any], Promise]:
        """A token of its own, or one that another call has, too: then one of the two runs."""
        effect = f"l{next(_effects)}"
        token = self.load.lease(shared=self.dice.random() < 0.5)
        request = {"aid": LEASED, "input_json": f"{effect} 0 ok", "_lease_token": token}
        return request, Promise(output(effect), effect, _any | {"lease_rejected"})

    def _nonsense(self) -> tuple[dict[str, Any], Promise]:
        refused = Promise(None, "", frozenset({"bad_request", "not_found"}))
        return self.dice.choice(
            [
                ({"aid": "AID.NOBODY.v1"}, refused),
                ({"aid": 7}, refused),
                ({"aid": ECHO, "inputs": {}, "input_json": "{}"}, refused),
                ({"aid": ECHO, "timeout_ms": -1}, refused),
                ({"aid": LEDGER, "ds_state": {"slots": {"999": {}}}}, refused),
            ]
        )

    def _ms(self) -> int:
        return self.dice.choice((0, 0, 0, 0, 0, 0, 0, 1, 5, 30))


class Load:
    """A broker with everything on, callers at its door, and somebody who breaks things."""

    def __init__(self, folder: Path, where: dict[str, str], seed: int) -> None:
        self.auditor = Auditor(folder / "ledger")
        self.over = threading.Event()
        self.hang_ups = 0.002
        self.dice = random.Random(seed)
        self.chaos: dict[str, int] = {"kills": 0, "reloads": 0, "replacements": 0, "resets": 0}
        self.committed = collections.Counter[str]()  # faults that were asked for
        self._folder = folder
        self._seed = seed
        self._leases: list[str] = []
        self._lease_lock = threading.Lock()
        self.plugin = build_ledger_plugin(folder, where["include"])
        self._brokers = Brokers(folder)
        self.broker: Served = self._brokers.start(config=self._config(where))
        self._operator = self.broker.operator()

    def _config(self, where: dict[str, str]) -> str:
        ledger = f'env = {{ LEDGER = "{self.auditor.ledger}" }}\n'
        return (
            "[limits]\nrlimit_fsize_mb = 0\n[lease]\nenforce = true\n"
            "[breaker]\nopen_seconds = 0.2\nmax_open_seconds = 0.5\n"
            + toolhost("demo", where["demo_plugin"], max=3)
            + toolhost("ledger", str(self.plugin), max=4)
            + ledger
            + toolhost("faults", where["fault_plugin"], max=3)
            + f'[[toolhost]]\nname = "wire"\nbinary = "{where["fault_toolhost"]}"\nmax = 3\n'
        )

    def may_cut(self, path: str) -> bool:
        return path != self.broker.path

    def lease(self, *, shared: bool) -> str:
        with self._lease_lock:
            if shared and self._leases:
                return self._leases[-1]
            self._leases = [self._operator.ask({"aid": "_lease.issue", "tool_aid": LEASED})["token_id"]]
            return self._leases[-1]

    # --- somebody breaks things -------------------------------------------------------------------------------------

    def break_something(self) -> None:
        dice = self.dice
        what = dice.random()
        if what < 0.6:
            self.chaos["kills"] += self._kill()
        elif what < 0.8:
            self.chaos["reloads"] += 1
            with self.broker.operator() as operator:
                operator.ask({"aid": "_reload"})
        elif what < 0.9:
            self.chaos["replacements"] += 1
            draft = self.plugin.with_suffix(".new")
            draft.write_bytes(self.plugin.read_bytes())
            draft.rename(self.plugin)
        else:
            self.chaos["resets"] += 1
            with self.broker.operator() as operator:
                operator.ask({"aid": "_breaker.reset", "name": LEDGER})

    def _kill(self) -> int:
        pids = self.broker.toolhosts()
        try:
            os.kill(self.dice.choice(pids), self.dice.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV)))
        except (ProcessLookupError, IndexError):
            return 0
        return 1

    # --- the whole of it --------------------------------------------------------------------------------------------

    def run(self, seconds: float, callers: int, tell: Callable[[str], None]) -> dict[str, Any]:
        """Figures; what is wrong is in the auditor's complaints."""
        trouble = Trouble(split=0.02, delay=0.05, stall=0.01, cut=0.003)
        begin = time.monotonic()
        with FaultProxy(self._folder / "proxy.sock", self.broker.path, trouble, self._seed) as proxy:
            people = [
                Caller(
                    self,
                    f"c{n}",
                    proxy.path if n % 4 == 3 else self.broker.path,
                    ordered=n % 3 == 0,
                    seed=self._seed * 1000 + n,
                )
                for n in range(callers)
            ]
            for person in people:
                person.start()
            before = None
            while (passed := time.monotonic() - begin) < seconds:
                time.sleep(min(self.dice.random() * 0.5, seconds - passed))
                self.break_something()
                if before is None and passed > min(seconds / 4, 60):
                    before = Footprint.of(self.broker.process.pid)
                calls = sum(self.auditor.answers.values())
                tell(f"{passed:5.0f} s  {calls} answers  {self.chaos['kills']} kills  {proxy.counts['cuts']} cuts")
            self.over.set()
            for person in people:
                person.join(WAIT_SECONDS)
                if person.is_alive():
                    self.auditor.complain(f"{person.name} is still waiting")
        return self._close(before, proxy, time.monotonic() - begin)

    def _close(self, before: Footprint | None, proxy: FaultProxy, seconds: float) -> dict[str, Any]:
        broker = self.broker
        broker.eventually(lambda: broker.status()["waiting"] == 0)
        after = Footprint.of(broker.process.pid)
        for complaint in after.complaints(before) if before else ():
            self.auditor.complain(complaint)
        status, counts = broker.status(), broker.counts()
        if status["queued_bytes"] != 0:
            self.auditor.complain(f"queued_bytes is {status['queued_bytes']} with nobody waiting")
        self._operator.socket.close()
        self._brokers.end()  # asserts: exit 0, no process left, no traceback in the log
        books = self.auditor.close()
        if set(books["answers"]) >= {"ok"} and not books["runs"]:
            self.auditor.complain("the ledger is empty: nothing was counted")
        return {
            "seconds": round(seconds, 1),
            **books,
            "chaos": self.chaos,
            "faults": dict(self.committed),
            "proxy": proxy.counts,
            "pools": counts,
            "footprint": {"before": before, "after": after},
            "bad day": sum(books["answers"].get(kind, 0) for kind in BAD_DAY),
        }
