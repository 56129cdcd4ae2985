"""CommonGround's streams and our consumers on them: made as it makes them where they are not there, never altered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.bus import Bus
from broker.utp import subjects

if TYPE_CHECKING:
    from nats.js.api import ConsumerInfo

ASK_SECONDS = 5.0
ACK_WAIT_SECONDS = 30.0
MOST_DELIVERIES = 3
MOST_UNACKNOWLEDGED = 1000


class Unusable(Exception):
    """What is there is not what we need, and is not ours to alter."""


async def make_streams(bus: Bus, replicas: int) -> None:
    from nats.js.api import StreamConfig
    from nats.js.errors import NotFoundError

    js = bus.client.jetstream(timeout=ASK_SECONDS)
    for name, (pattern, seconds) in subjects.STREAMS.items():
        try:
            await js.stream_info(name)
        except NotFoundError:
            await js.add_stream(StreamConfig(name, subjects=[pattern], max_age=seconds, num_replicas=replicas))


async def make_consumer(bus: Bus, target: str) -> ConsumerInfo:
    """As it is, if it is there."""
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
    from nats.js.errors import NotFoundError

    js = bus.client.jetstream(timeout=ASK_SECONDS)
    name, pattern = subjects.consumer(target), subjects.pattern(target)
    try:
        info: ConsumerInfo = await js.consumer_info(subjects.COMMANDS, name)
    except NotFoundError:
        config = ConsumerConfig(
            durable_name=name,
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_SECONDS,
            max_deliver=MOST_DELIVERIES,
            max_ack_pending=MOST_UNACKNOWLEDGED,
            filter_subject=pattern,
        )
        info = await js.add_consumer(subjects.COMMANDS, config)
    there = info.config
    if there.deliver_subject or there.ack_policy != AckPolicy.EXPLICIT:
        raise Unusable(f"the consumer {name} is not one that is pulled and acknowledged one by one")
    if there.filter_subject != pattern:
        raise Unusable(f"the consumer {name} is about {there.filter_subject}, not {pattern}")
    return info
