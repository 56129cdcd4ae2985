"""What calls with a key or a lease ask of the cluster, before they may run here."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from broker import errors
from broker.cluster.keys import Claim, Keys
from broker.cluster.kv import Away
from broker.cluster.leases import SharedLeases
from broker.errors import Refusal
from broker.policy.leases import Lease
from broker.policy.sessions import Session, WaitingRoom

if TYPE_CHECKING:
    from broker.server import Broker
    from broker.ticket import Ticket


class Gate:
    """Calls that wait for a word from NATS, or for another broker that runs the same."""

    def __init__(self, broker: Broker, keys: Keys, leases: SharedLeases) -> None:
        self._broker = broker
        self._dispatcher = broker.dispatcher
        self._loop = broker.core.loop
        self._keys = keys
        self._leases = leases
        self._tasks: set[asyncio.Task[None]] = set()
        limits = broker.settings.limits
        longest = limits.max_timeout_seconds + limits.queue_seconds  # that the same call may take elsewhere
        self.room = WaitingRoom(longest, "another broker, which has its key")
        self._dispatcher.rooms.append(self.room)
        self._dispatcher.gate = self

    def concerns(self, ticket: Ticket) -> bool:
        return ticket.key is not None or self._dispatcher.wants_lease(ticket.call.tool)

    def enter(self, ticket: Ticket, now: float) -> None:
        ticket.wait_in(self.room, Session(), now)  # a row of its own: these calls do not wait for each other
        task = self._loop.create_task(self._pass(ticket))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pass(self, ticket: Ticket) -> None:
        try:
            answer = await self._ask(ticket)
        except Away as error:
            text = f"{error}; in a cluster, calls with a key or a lease need it"
            answer = Refusal(errors.UNAVAILABLE, text, retry_after=1)
        except Exception as error:  # a mistake of ours must not leave a caller waiting for ever
            self._broker.log.error("internal error", aid=ticket.call.tool.name, reason=repr(error))
            answer = Refusal(errors.INTERNAL, f"the broker made a mistake: {error!r}")
        if ticket.done:  # nobody waits any more; what it was lent has been given back
            return
        self.room.step_out(ticket)
        ticket.go_on()
        if isinstance(answer, bytes):
            ticket.known(answer)
        elif answer is not None:
            ticket.give_up(answer)
        else:
            self._dispatcher.go_on(ticket, time.monotonic())
        self._broker.core.flush()

    async def _ask(self, ticket: Ticket) -> bytes | Refusal | None:
        """Nothing: it may run here. What it is lent while nobody waits any more goes back at once."""
        tool = ticket.call.tool
        if ticket.key is not None:
            outcome = await self._keys.claim(ticket.key, tool.name, lambda: not ticket.done)
            if not isinstance(outcome, Claim):
                return outcome
            outcome.changed = lambda: self._changed(ticket)
            if ticket.done:
                self._keys.free(outcome)
                return None
            ticket.claim = outcome
        refusal = self._dispatcher.breaker(ticket, time.monotonic())
        if refusal is not None or not self._dispatcher.wants_lease(tool):
            return refusal
        if not ticket.call.lease:
            return self._dispatcher.lease_required(ticket.caller, tool)
        lease = await self._leases.reserve(ticket.call.lease, tool.name, tool.tier, ticket.call.proof)
        if not isinstance(lease, Lease):
            self._dispatcher.leases.rejected()
            return self._dispatcher.lease_rejected(ticket, ticket.caller, tool, lease)
        self._dispatcher.leases.taken(ticket.call.lease)
        if ticket.done:
            self.give_back(lease)
        else:
            ticket.lease = lease
        return None

    def _changed(self, ticket: Ticket) -> None:
        """The cluster knows that it is starting, or will not have it."""
        if ticket.claim is not None and ticket.claim.problem is not None:
            self._dispatcher.revise()
        self._broker.pump_soon()

    # --- what tickets give back ---------------------------------------------------------------------------------------

    def free(self, claim: Claim) -> None:
        self._keys.free(claim)

    def finish(self, claim: Claim, line: bytes) -> None:
        self._keys.finish(claim, line)

    def give_back(self, lease: Lease) -> None:
        self._dispatcher.leases.taken(lease.token, taken=False)
        self._leases.give_back(lease)
