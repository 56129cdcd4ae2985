"""Toolhost broker: warm, pooled tool processes behind one policy."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from broker.client.aio import AsyncClient as AsyncClient
    from broker.client.embedded import Embedded as Embedded
    from broker.client.failures import CallFailed as CallFailed
    from broker.client.reply import Reply as Reply
    from broker.client.sync import Client as Client

__version__ = "0.1.0"

_WHERE = {
    "AsyncClient": "broker.client.aio",
    "CallFailed": "broker.client.failures",
    "Client": "broker.client.sync",
    "Embedded": "broker.client.embedded",
    "Reply": "broker.client.reply",
}


def __getattr__(name: str) -> Any:
    """What costs time to import is imported when it is used."""
    if name not in _WHERE:
        raise AttributeError(f"module 'broker' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
