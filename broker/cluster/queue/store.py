"""The queue's streams on NATS: made where there are none, asked with patience, and in words when NATS is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from broker.bus import Bus
from broker.cluster.kv import ASK_SECONDS, EXPECTED, LONGEST_PAUSE, NO_STREAM, PAUSE_SECONDS, WRONG_LAST, Away
from broker.cluster.kv import why as said_by
from broker.cluster.queue import names
from broker.cluster.queue.names import Names
from broker.settings import Queue as Settings

if TYPE_CHECKING:
    from nats.js import JetStreamContext
    from nats.js.api import ConsumerInfo, PubAck, RawStreamMsg, StreamConfig, StreamState

T = TypeVar("T")

SAME_SECONDS = 120.0  # the server remembers at most so long what was enqueued; results and the queue itself do longer
MOST_PENDING = 100_000  # calls of one tool that all brokers together have taken


class Store:
    def __init__(self, bus: Bus, names: Names, settings: Settings, replicas: int) -> None:
        self.names = names
        self._bus = bus
        self._settings = settings
        self._replicas = replicas
        self._made = False
        self._making = asyncio.Lock()
        self._consumers: set[str] = set()  # of tools, that we know to be there

    @property
    def largest(self) -> int:
        """Bytes of one message, headers and all."""
        return self._bus.largest

    # --- calls --------------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes, headers: dict[str, str], patience: float) -> PubAck:
        """Kept, when this returns. It may have been kept, too, when this fails: `Nats-Msg-Id` makes it one message."""
        return await self.patiently(lambda js: js.publish(subject, payload, headers=dict(headers)), patience)

    async def call_by(self, name: str, patience: float) -> RawStreamMsg | None:
        """That waits or runs."""
        return await self._last(self.names.calls, self.names.call_by(name), patience)

    async def has(self, stream: str, sequence: int, patience: float) -> bool:
        return await self._get(stream, patience, seq=sequence) is not None

    async def consumer(self, tool: str, patience: float) -> bool:
        """Whoever has the tool can take its calls. True where nobody could before, as far as we know."""
        if tool in self._consumers:
            return False

        async def make(js: JetStreamContext) -> None:
            from nats.js.api import ConsumerConfig

            config = ConsumerConfig(
                durable_name=names.consumer_of(tool),
                filter_subject=self.names.calls_of(tool),
                ack_wait=self._settings.redeliver_seconds,
                max_ack_pending=MOST_PENDING,
                metadata={"tool": tool},
            )
            await js.add_consumer(self.names.calls, config)

        await self.patiently(make, patience)
        self._consumers.add(tool)
        return True

    async def consumers(self, patience: float) -> dict[str, ConsumerInfo]:
        """By tool: all for which there have ever been calls."""

        async def read(js: JetStreamContext) -> dict[str, ConsumerInfo]:
            found: dict[str, ConsumerInfo] = {}
            at = 0
            while page := await js.consumers_info(self.names.calls, offset=at):
                for one in page:
                    if tool := (one.config.metadata or {}).get("tool"):
                        found[tool] = one
                at += len(page)
            return found

        consumers = await self.patiently(read, patience)
        self._consumers &= set(consumers)
        return consumers

    async def state(self, stream: str, patience: float) -> StreamState:
        async def read(js: JetStreamContext) -> StreamState:
            return (await js.stream_info(stream)).state

        return await self.patiently(read, patience)

    async def size(self, patience: float) -> int:
        """Bytes of all calls, with what lies beside them."""
        from nats.js.errors import NotFoundError

        async def read(js: JetStreamContext) -> int:
            size = (await js.stream_info(self.names.calls)).state.bytes
            try:
                return size + (await js.stream_info(f"OBJ_{self.names.requests}")).state.bytes
            except NotFoundError:  # none was ever too large
                return size

        return await self.patiently(read, patience)

    async def subjects(self, patience: float) -> dict[str, int]:
        """Of all calls."""

        async def read(js: JetStreamContext) -> dict[str, int]:
            info = await js.stream_info(self.names.calls, subjects_filter=self.names.all_calls)
            return info.state.subjects or {}

        return await self.patiently(read, patience)

    # --- marks --------------------------------------------------------------------------------------------------------

    async def mark(self, name: str, value: bytes, last: int, patience: float) -> int:
        """Its revision; 0 where it is not as it was any more. An attempt whose answer got lost is found again."""
        from nats.js.errors import APIError

        doubtful = False

        async def write(js: JetStreamContext) -> int:
            nonlocal doubtful
            again, doubtful = doubtful, True
            try:
                headers = {EXPECTED: str(last)}
                return (await js.publish(self.names.mark(name), value, headers=headers)).seq
            except APIError as error:
                if error.err_code not in WRONG_LAST:
                    raise
                found = await self.marked(name, patience) if again else None
                return found.seq or 0 if found is not None and found.data == value else 0

        return await self.patiently(write, patience)

    async def marked(self, name: str, patience: float) -> RawStreamMsg | None:
        return await self._last(self.names.marks, self.names.mark(name), patience)

    async def unmark(self, name: str, patience: float) -> None:
        await self._purge(self.names.marks, self.names.mark(name), patience)

    # --- what is dead -------------------------------------------------------------------------------------------------

    async def dead_by(self, name: str, patience: float) -> RawStreamMsg | None:
        return await self._last(self.names.dead, self.names.dead_call(name), patience)

    async def next(self, stream: str, subject: str, at: int, patience: float) -> RawStreamMsg | None:
        """The first one from this sequence on."""
        return await self._get(stream, patience, seq=at, subject=subject, next=True)

    async def bury(self, name: str, patience: float) -> None:
        """It is not dead any more."""
        await self._purge(self.names.dead, self.names.dead_call(name), patience)

    # --- words --------------------------------------------------------------------------------------------------------

    async def _last(self, stream: str, subject: str, patience: float) -> RawStreamMsg | None:
        return await self._get(stream, patience, subject=subject)

    async def _get(self, stream: str, patience: float, **which: Any) -> RawStreamMsg | None:
        from nats.js.errors import NotFoundError

        async def get(js: JetStreamContext) -> RawStreamMsg | None:
            try:
                return await js.get_msg(stream, **which)  # of the stream's leader: as it is now
            except NotFoundError as error:
                if error.err_code == NO_STREAM:
                    raise
                return None

        return await self.patiently(get, patience)

    async def _purge(self, stream: str, subject: str, patience: float) -> None:
        await self.patiently(lambda js: js.purge_stream(stream, subject=subject), patience)

    async def patiently(self, ask: Callable[[JetStreamContext], Awaitable[T]], patience: float) -> T:
        from nats.errors import Error, MaxPayloadError
        from nats.js.errors import BadRequestError

        end = time.monotonic() + patience
        pause, why, heard = PAUSE_SECONDS, "does not answer", False
        while True:
            try:
                if self._bus.connected:
                    js = self._bus.client.jetstream(timeout=ASK_SECONDS)
                    async with asyncio.timeout(max(ASK_SECONDS, patience)):
                        if not self._made:
                            await self._make(js)
                        return await ask(js)
                else:
                    why = "does not answer"
            except (BadRequestError, MaxPayloadError):
                raise  # it will not be better when it is said again
            except (Error, OSError, TimeoutError) as error:
                self._made = False  # perhaps a stream is gone
                self._consumers.clear()
                why, heard = said_by(error), heard or isinstance(error, TimeoutError | OSError)
            if time.monotonic() + pause > end:
                raise Away(f"NATS ({self._bus.place}) {why}", heard=heard)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _make(self, js: JetStreamContext) -> None:
        """The streams, where there are none; what they keep is for as long as our configuration says."""
        from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

        usual: dict[str, Any] = {"storage": StorageType.FILE, "num_replicas": self._replicas}
        names = self.names
        async with self._making:
            if self._made:
                return
            for config in (
                StreamConfig(
                    names.calls,
                    subjects=[names.all_calls],
                    retention=RetentionPolicy.WORK_QUEUE,
                    discard=DiscardPolicy.NEW,  # a queue that is full takes no more, and loses nothing
                    duplicate_window=min(SAME_SECONDS, self._settings.result_seconds),
                    **usual,
                ),
                StreamConfig(names.marks, subjects=[names.all_marks], max_msgs_per_subject=1, **usual),
                StreamConfig(
                    names.dead,
                    subjects=[names.all_dead],
                    max_msgs_per_subject=1,
                    max_age=self._settings.dead_seconds,
                    **usual,
                ),
            ):
                await _made(js, config)
            self._made = True


async def _made(js: JetStreamContext, config: StreamConfig) -> None:
    from nats.js.errors import BadRequestError

    try:
        await js.add_stream(config)
    except BadRequestError:  # it is there, made with other settings: what somebody has set for good reasons stays
        assert config.name is not None
        now = (await js.stream_info(config.name)).config
        kept = {"max_age": config.max_age or 0}
        if config.duplicate_window:
            kept["duplicate_window"] = config.duplicate_window
        if any((getattr(now, name) or 0) != seconds for name, seconds in kept.items()):
            await js.update_stream(now, **kept)
