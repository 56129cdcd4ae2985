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
    broken = {pool.name: pool.starts.broken for runtime in broker.equipment.runtimes for pool in runtime.pools.values()}
    broken |= {app.root: app.program.nursery.starts.broken for app in broker.equipment.apps}
    if broken and all(broken.values()):
        return [f"{name}: its toolhosts do not start: {unquoted(why)}" for name, why in broken.items()]
    return []
