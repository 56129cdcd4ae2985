"""What the fuzzers found, and mixtures of it, as broker, twin and msgspec read it: whoever disagrees is told of.

python -m tests.fuzz.differential requests FILE: one text again
"""

from __future__ import annotations

import ast
import hashlib
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support import replies, scanner

HERE = Path(__file__).parent
DICTIONARY = HERE / "wire.dict"
LONGEST = 4096


def requests(text: bytes) -> None:
    step = 1 + len(text) % 13
    scanner.agree_with_twin([text])
    scanner.agree_with_twin([text[at : at + step] for at in range(0, len(text), step)], at_once=2)
    for line in text.split(b"\n"):
        json(line)


def toolhost_lines(text: bytes) -> None:
    for line in text.split(b"\n"):
        if len(line) <= replies.CAP:
            replies.agree(line, None)
            replies.agree(line, b'"x"')


def json(text: bytes) -> None:
    line = text.replace(b"\n", b" ")
    if line.removesuffix(b"\r"):
        scanner.agree(line)
    scanner.agree(b'{"aid":"T","x":' + line + b"}")


CHECKS: dict[str, Callable[[bytes], None]] = {"requests": requests, "replies": toolhost_lines, "json": json}


def words() -> list[bytes]:
    return [ast.literal_eval("b" + line) for line in DICTIONARY.read_text().splitlines() if line.startswith('"')]


def mixed(rng: random.Random, texts: list[bytes], some_words: list[bytes]) -> bytes:
    """A text with a few bytes changed, words put in, or pieces of another text, or of its own."""
    text = rng.choice(texts)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(text))
        other = rng.choice((text, rng.choice(texts)))
        start = rng.randint(0, len(other))
        piece = rng.choice((rng.randbytes(1), rng.choice(some_words), other[start : start + rng.randint(1, 200)]))
        text = text[:at] + piece + text[at + rng.choice((0, 0, 1, len(piece))) :]
    return text[:LONGEST]


def failing(target: str, text: bytes) -> str | None:
    """What is wrong, if something is."""
    try:
        CHECKS[target](text)
    except Exception as error:  # of any kind: the twin may be at fault, too
        return f"{type(error).__name__}: {error}"
    return None


def run(
    seconds: float, seed: int, folders: dict[str, list[Path]], found: Path, tell: Callable[[str], None]
) -> list[str]:
    """Each text once, then mixtures until the time is over. Complaints, at most one a target."""
    rng = random.Random(seed)
    some_words = words()
    texts = {t: [file.read_bytes() for folder in folders[t] for file in sorted(folder.iterdir())] for t in CHECKS}
    complaints: dict[str, str] = {}
    deadline, count = time.monotonic() + seconds, 0

    def check(target: str, text: bytes) -> None:
        nonlocal count
        count += 1
        complaint = failing(target, text)
        if complaint and target not in complaints:
            path = found / f"differential-{target}-{hashlib.sha1(text).hexdigest()}"
            path.write_bytes(text)
            complaints[target] = (
                f"{complaint[:400]}\n  again: {sys.executable} -m tests.fuzz.differential {target} {path}"
            )

    for target, some in texts.items():
        for text in some:
            check(target, text)
    while time.monotonic() < deadline:
        for target, some in texts.items():
            check(target, mixed(rng, some, some_words))
        if count % 100 < len(texts):
            tell(f"differential: {count:,} texts")
    tell(f"differential: {count:,} texts, {sum(map(len, texts.values())):,} of them the fuzzers'")
    return [f"differential, {target}: {complaint}" for target, complaint in complaints.items()]


if __name__ == "__main__":
    CHECKS[sys.argv[1]](Path(sys.argv[2]).read_bytes())
