"""Is there anything that calls would run into?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.pool.verdicts import unquoted

if TYPE_CHECKING:
    from broker.server import Broker


def ready(broker: Broker) -> list[str]:
    """Why not; nothing where it is."""
    if broker.dispatcher.draining:
        return ["the broker is stopping"]
    if not broker.serving:
        return ["the broker is starting"]
    pools = [pool for runtime in broker.runtimes for pool in runtime.pools.values()]
    if pools and all(pool.starts.broken for pool in pools):
        return [f"{pool.name}: its toolhosts do not start: {unquoted(pool.starts.broken)}" for pool in pools]
    return []
