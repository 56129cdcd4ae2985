"""Replies in the order of their requests: a bounded reorder buffer in front of a caller's outbox."""

from __future__ import annotations

from broker.pool.outbox import Outbox


class Slot:
    """A place in the order, for some replies in a row. Places are a chain; only the first may speak."""

    __slots__ = ("_order", "at", "chunks", "left", "next")

    def __init__(self, order: Order, at: int, left: int) -> None:
        self._order = order
        self.at = at  # how many replies come before
        self.left = left
        self.chunks: list[bytes] = []
        self.next: Slot | None = None

    def split(self, count: int) -> Slot:
        """This place keeps the first `count` replies; the rest get a place right behind it."""
        behind = Slot(self._order, self.at + count, self.left - count)
        self.left = count
        behind.next, self.next = self.next, behind
        if self._order.last is self:
            self._order.last = behind
        return behind


class Order:
    __slots__ = ("_next", "_outbox", "first", "held", "last")

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.first: Slot | None = None
        self.last: Slot | None = None
        self.held = 0  # bytes of replies that wait for those in front of them
        self._next = 0

    def place(self, count: int) -> Slot:
        """The next place in the order, for `count` replies."""
        slot = Slot(self, self._next, count)
        self._next += count
        if self.last is None:
            self.first = slot
        else:
            self.last.next = slot
        self.last = slot
        return slot

    def put(self, slot: Slot | None, lines: bytes, count: int) -> None:
        """Replies leave at once where it is their turn; those without a place may overtake."""
        if slot is None:
            self._outbox.put(lines)
            return
        slot.left -= count
        slot.at += count
        if slot is self.first:
            self._outbox.put(lines)
            if not slot.left:
                self._advance()
        else:
            slot.chunks.append(lines)
            self.held += len(lines)

    def _advance(self) -> None:
        """The first place is done: the next one speaks, with all that it has kept."""
        slot = self.first
        while slot is not None and not slot.left:
            slot = slot.next
            if slot is not None:
                for chunk in slot.chunks:
                    self.held -= len(chunk)
                    self._outbox.put(chunk)
                slot.chunks.clear()
        self.first = slot
        if slot is None:
            self.last = None

    def clear(self) -> None:
        self.first = self.last = None
        self.held = 0
