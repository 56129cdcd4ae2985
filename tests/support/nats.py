"""A real NATS server with JetStream for a test: on a free port, with a folder of its own, that can be killed and come
back."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from types import TracebackType


class NatsServer:
    def __init__(self, folder: Path, *, port: int = -1, settings: str = "") -> None:
        self.folder = folder
        self.port = port
        self._settings = settings  # more of its configuration file
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> NatsServer:
        """The same folder and, from the second time on, the same port."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for ports in self.folder.glob("*.ports"):
            ports.unlink()
        configuration = self.folder / "nats.conf"
        configuration.write_text(
            f'listen: "127.0.0.1:{self.port}"\nports_file_dir: "{self.folder}"\n'
            f'jetstream {{ store_dir: "{self.folder / "jetstream"}", sync_interval: always }}\n{self._settings}\n'
        )
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
