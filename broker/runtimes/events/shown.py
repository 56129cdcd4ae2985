"""What can be shown of an event: a choice in one form, or a placeholder that keeps all there is. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct, UnsetType

from broker.runtimes.events.protocol import Asset, Body, UiEvent

CHOICE = "narrative_choice"
MEDIA = ("image/", "audio/", "video/", "text/")  # kinds that can be shown


class Option(Struct, omit_defaults=True):
    """One of the choices; a tool may also write its label alone."""

    label: str
    id: str = ""
    hint: str | None = None


class _Choices(Struct):
    choices: list[str | Option]
    prompt: str | None = None


def shown(body: Body) -> dict[str, Any]:
    """Members beside the event; none where the event says it all."""
    if isinstance(body, UiEvent):
        return _ui(body)
    if isinstance(body, Asset) and not body.media_type.lower().startswith(MEDIA):
        text = f"{body.kind} {body.id} is {body.media_type}, which cannot be shown"
        return {"placeholder": {"text": text, "mediaType": body.media_type, "payload": _given(body.metadata)}}
    return {}


def _ui(body: UiEvent) -> dict[str, Any]:
    payload = _given(body.payload)
    if body.event != CHOICE:
        return {"placeholder": {"text": f"{body.event} is not supported", "event": body.event, "payload": payload}}
    try:
        asked = msgspec.json.decode(msgspec.json.encode(payload), type=_Choices)
    except msgspec.ValidationError as error:
        text = f"{CHOICE} has no choices that can be understood: {error}"
        return {"placeholder": {"text": text, "event": body.event, "payload": payload}}
    options = [Option(one, one) if isinstance(one, str) else Option(one.label, one.id or one.label, one.hint)
               for one in asked.choices]  # fmt: skip
    prompt = {} if asked.prompt is None else {"prompt": asked.prompt}
    return {"choice": {**prompt, "choices": options}}


def _given(members: dict[str, Raw] | UnsetType) -> dict[str, Raw]:
    """As it was written."""
    return {} if isinstance(members, UnsetType) else members
