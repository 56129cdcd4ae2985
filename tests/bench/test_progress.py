"""What is said while it runs."""

from __future__ import annotations

import io
import time

from broker.bench.progress import LINE_SECONDS, Progress
from broker.bench.text import RED, Paint, table


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_that_goes_away():
    screen = Terminal()
    progress = Progress(screen)
    progress.begin(0.001)
    progress.case("socket, depth 1")
    time.sleep(0.01)
    progress.tick(1234)
    last = screen.getvalue().split("\r")[-1]
    assert "99%  socket, depth 1, 1,234 calls" in last
    assert "\n" not in screen.getvalue()
    progress.end()
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_elsewhere_there_is_a_line_now_and_then(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    screen = io.StringIO()
    progress = Progress(screen)
    progress.begin(30)
    progress.case("socket, depth 1")
    for _ in range(60):
        now += 0.1
        progress.tick(10)
    progress.end()
    lines = screen.getvalue().splitlines()
    assert len(lines) == int(6 / LINE_SECONDS) - (len(lines) < 3)
    assert lines[0] == "2 of about 30 s: socket, depth 1, 10 calls"
    assert "\x1b" not in screen.getvalue()


def test_columns_line_up_and_colours_are_only_where_they_are_wanted():
    rows = [("short", "1"), ("a longer one", "1,000")]
    plain = table(("CASE", "CALLS"), rows, Paint(False))
    assert plain.splitlines() == ["CASE          CALLS", "short             1", "a longer one  1,000"]
    assert "\x1b[31ma longer one" in table(("CASE", "CALLS"), rows, Paint(True), ["", RED])
