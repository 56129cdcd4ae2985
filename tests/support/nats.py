"""A real NATS server with JetStream for a test: on a free port, with a folder of its own, that can be killed and come
back."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any

import nats


class NatsServer:
    def __init__(
        self, folder: Path, *, port: int = -1, settings: str = "", jetstream: bool = True, sync: str = "always"
    ) -> None:
        self.folder = folder
        self.port = port
        self._settings = settings  # more of its configuration file
        self._jetstream = jetstream
        self._sync = sync  # how soon what it has been told is on the disk
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> NatsServer:
        """The same folder and, from the second time on, the same port."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for ports in self.folder.glob("*.ports"):
            ports.unlink()
        configuration = self._configure()
        program = Path(sysconfig.get_path("scripts"), "nats-server")
        command = [str(program) if program.exists() else shutil.which("nats-server") or "nats-server"]
        log = (self.folder / "nats.log").open("ab")
        self._process = subprocess.Popen([*command, "-c", str(configuration)], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for ports in self.folder.glob("*.ports"):
                text = ports.read_text()
                if text.strip().endswith("}"):
                    self.port = int(json.loads(text)["nats"][0].rpartition(":")[2])
                    return self
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        raise RuntimeError(f"nats-server did not start: {(self.folder / 'nats.log').read_text()[-2000:]}")

    def _configure(self) -> Path:
        text = f'listen: "127.0.0.1:{self.port}"\nports_file_dir: "{self.folder}"\n{self._settings}\n'
        if self._jetstream:
            text += f'jetstream {{ store_dir: "{self.folder / "jetstream"}", sync_interval: {self._sync} }}\n'
        file = self.folder / "nats.conf"
        file.write_text(text)
        return file

    def change(self, settings: str) -> None:
        """It reads its configuration again."""
        assert self._process is not None
        self._settings = settings
        self._configure()
        self._process.send_signal(signal.SIGHUP)

    def forget(self) -> None:
        """Its store is gone."""
        shutil.rmtree(self.folder / "jetstream")

    def kill(self) -> None:
        """As a power cut would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """It is there, and says nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
            self._process.wait(20)
        self._process = None

    def __enter__(self) -> NatsServer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


class Client:
    """A plain NATS client, as others write them, for tests that wait."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.nats: Any = self.run(nats.connect(url))

    def run(self, work: Coroutine[Any, Any, Any], seconds: float = 30.0) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def ask(self, subject: str, request: Any, headers: dict[str, str] | None = None, seconds: float = 20.0) -> Any:
        """The message that comes back. What is not bytes is encoded."""
        payload = request if isinstance(request, bytes) else json.dumps(request, separators=(",", ":")).encode()
        return self.run(self.nats.request(subject, payload, timeout=seconds, headers=headers))

    def call(self, tool: str, cluster: str = "default", **request: Any) -> Any:
        return json.loads(self.ask(f"tools.{cluster}.{tool}", request).data)

    def gather(self, subject: str, request: Any, enough: Callable[[Any], bool], seconds: float = 20.0) -> list[Any]:
        """All messages that come back, until one is enough."""

        async def gather() -> list[Any]:
            inbox = self.nats.new_inbox()
            subscription = await self.nats.subscribe(inbox)
            await self.nats.publish(subject, json.dumps(request).encode(), reply=inbox)
            messages = []
            while not messages or not enough(messages[-1]):
                messages.append(await subscription.next_msg(seconds))
            return messages

        return self.run(gather(), seconds + 5)

    def services(self, verb: str, wait: float = 0.3) -> list[Any]:
        """What all that is there says to $SRV.<verb>."""

        async def ask() -> list[Any]:
            inbox = self.nats.new_inbox()
            subscription = await self.nats.subscribe(inbox)
            await self.nats.publish(f"$SRV.{verb}", b"", reply=inbox)
            await asyncio.sleep(wait)
            return [json.loads((await subscription.next_msg(1)).data) for _ in range(subscription.pending_msgs)]

        return self.run(ask())

    def close(self) -> None:
        self.run(self.nats.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
