"""How far it is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import shutil
import time
from typing import TextIO

LINE_SECONDS = 2.0
BAR = 24
ERASE = "\r\x1b[2K"


class Progress:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar = stream.isatty()
        self._begun = self._said = 0.0
        self._total = 0.0
        self._case = ""

    def begin(self, seconds: float) -> None:
        self._begun = self._said = time.monotonic()
        self._total = max(seconds, 0.001)

    def case(self, name: str) -> None:
        self._case = name
        self.tick(0)

    def tick(self, answered: int) -> None:
        now = time.monotonic()
        share = min(0.99, (now - self._begun) / self._total)
        calls = f", {answered:,} calls" if answered else ""
        if self._bar:
            done = int(share * BAR)
            text = f"{'━' * done}{'╌' * (BAR - done)} {share:4.0%}  {self._case}{calls}"
            self._write(ERASE + text[: shutil.get_terminal_size().columns - 1])
        elif now - self._said >= LINE_SECONDS:
            self._said = now
            self._write(f"{now - self._begun:.0f} of about {self._total:.0f} s: {self._case}{calls}\n")

    def end(self) -> None:
        if self._bar:
            self._write(ERASE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
