"""A target: which tool serves it, what is in hand, and what became of its commands."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from broker.faces.utp.hand import Hand
from broker.faces.utp.intake import Intake
from broker.settings import UtpTarget

USUAL_DELIVERIES = 3


class Target:
    def __init__(self, name: str, settings: UtpTarget) -> None:
        self.name = name
        self.settings = settings
        self.author = settings.author or f"tool.{name}"  # of result cards
        self.source = f"tool.{name}"  # of reports
        self.in_hand: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        self.trouble = "not connected yet"  # why it does not get its commands, where it does not
        self.ack_seconds = 30.0  # NATS gives a message to somebody else after so long a silence
        self.most_deliveries = USUAL_DELIVERIES  # then a message comes no more
        self.intake: Intake | None = None

    def room(self) -> int:
        return self.settings.max - len(self.in_hand)

    def last(self, hand: Hand) -> bool:
        """It will not come again."""
        return hand.delivered >= self.most_deliveries

    def status(self) -> dict[str, Any]:
        trouble = self.trouble or (self.intake.trouble if self.intake is not None else "")
        return {
            "target": self.name,
            "tool": self.settings.tool,
            "state": "waiting" if trouble else "serving",
            "reason": trouble,
            "in_hand": len(self.in_hand),
            "counts": dict(self.counts),
        }
