"""One toolhost, and a conversation with it that blocks: in C, without the GIL."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

from broker._native import ffi, lib
from broker.model import Tool
from broker.pool import process, verdicts
from broker.pool.asides import OURS
from broker.pool.process import Process
from broker.pool.rules import JITTER, MOST_STRANGERS, SPIN_SECONDS
from broker.runtimes.program import Program
from broker.settings import Limits

DONE, STOPPED, LATE, ENDED = lib.TB_TALK_DONE, lib.TB_TALK_STOPPED, lib.TB_TALK_LATE, lib.TB_TALK_ENDED
INTERRUPTED, GONE = lib.TB_TALK_INTERRUPTED, lib.TB_TALK_GONE
UNASKED, CHANGED = lib.TB_TALK_UNASKED, lib.TB_TALK_CHANGED


class TalkingHost:
    """One toolhost process, and the conversation with it."""

    def __init__(
        self, child: Process, program: Program, limits: Limits, stamp: Sequence[int], generation: int, now: float
    ) -> None:
        self.process = child
        self.generation = generation
        self.born = self.used = now
        settings = program.settings
        self.expires = now + settings.lifetime_seconds * random.uniform(1 - JITTER, 1 + JITTER)
        self.max_calls = round(settings.max_calls * random.uniform(1 - JITTER, 1 + JITTER))
        self.owner = 0  # the thread that has it
        self.calls = 0
        self.thread = 0  # whose call it had last
        self.tool: Tool = OURS
        self.quotes = True  # its refusals name the line that they answer
        self.strangers = 0
        self.rss = 0
        self._plugin = program.plugin
        self._file = ffi.new("char[]", os.fsencode(self._plugin.source)) if self._plugin else ffi.NULL
        self._watch = -1
        peer = ffi.new("tb_peer *")
        peer[0] = {
            "in": child.stdin,
            "out": child.stdout,
            "err": child.stderr,
            "death": child.pidfd,
            "cap": limits.reply_bytes,
            "max_depth": limits.depth,
            "file": {"path": self._file, "stamp": tuple(stamp), "watch": self._watch},
            "spin": SPIN_SECONDS,
        }
        talk = lib.tb_talk_new(peer)
        if talk == ffi.NULL:
            raise MemoryError
        self.talk = ffi.gc(talk, lib.tb_talk_free)
        self.taken = lib.tb_talk_taken(talk)
        self.trust(stamp)

    def trust(self, stamp: Sequence[int]) -> None:
        """The plugin's file is what it should be, or the best that there is: only a change from now on counts."""
        if self._plugin is None:
            return
        self._close_watch()
        self._watch = self._plugin.watch()
        lib.tb_talk_trust(self.talk, ffi.new("int64_t[4]", tuple(stamp)), self._watch)

    def ask(self, line: bytes, seconds: float, fence: bytes = b"") -> int:
        """One line, one reply. Signals get their turn; what stands before the fence is nobody's, and is dropped."""
        verdict = lib.tb_talk_say(self.talk, line, len(line), 1, fence, len(fence), seconds)
        while verdict == INTERRUPTED or (verdict == STOPPED and self._is_stranger()):
            verdict = lib.tb_talk_wait(self.talk)
        return verdict

    def wait_on(self, seconds: float) -> int:
        """For the answer to what has been asked, for so long from now on."""
        lib.tb_talk_extend(self.talk, seconds)
        verdict = lib.tb_talk_wait(self.talk)
        while verdict == INTERRUPTED:
            verdict = lib.tb_talk_wait(self.talk)
        return verdict

    def _is_stranger(self) -> bool:
        if self.taken.stopped != lib.TB_REPLY_STRANGER or self.strangers >= MOST_STRANGERS:
            return False
        self.strangers += 1
        return True

    def reply(self) -> bytes:
        data: bytes = ffi.buffer(self.taken.data, self.taken.len)[:]
        return data

    def junk(self) -> str:
        return verdicts.junk(ffi.buffer(self.taken.junk, self.taken.junk_len)[:])

    def obituary(self, reason: str) -> str:
        length = ffi.new("size_t *")
        heard = lib.tb_talk_heard(self.talk, length)
        return verdicts.obituary(self.process, reason, ffi.buffer(heard, length[0])[:])

    def end(self) -> None:
        """It is gone when this returns, and all that it started."""
        self.process.kill()
        while not self.process.reap():
            time.sleep(0.0005)

    def release(self) -> None:
        self._close_watch()
        self.process.close()

    def _close_watch(self) -> None:
        fd, self._watch = self._watch, -1
        process.close(fd)
