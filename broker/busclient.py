"""nats-py's client, for as long as we live: after some errors it would close, and not look for another connection."""

from __future__ import annotations

from nats.aio.client import Client
from nats.errors import Error

PASSES = ("permissions violation", "stale connection")  # what nats-py sees to as we want it


class LastingClient(Client):
    """A server that throws us out (it is full, our password has changed, we were too slow) may take us back."""

    async def _process_err(self, err_msg: str) -> None:
        if any(words in err_msg.lower() for words in PASSES):
            await super()._process_err(err_msg)
            return
        error = Error(f"nats: {err_msg.strip().strip(chr(39))}")
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _attempt_reconnect(self) -> None:
        while not self.is_closed:
            try:
                await super()._attempt_reconnect()
                return
            except (RuntimeError, AttributeError, AssertionError, ValueError) as error:  # of a transport that broke
                await self._error_cb(error)
