"""Pieces of broker.toml for tests."""

import json


def toolhost(name: str, *plugins: str, **settings: object) -> str:
    lines = [f'[[toolhost]]\nname = "{name}"\nplugins = {json.dumps(plugins)}']
    lines += [f"{key} = {_toml(value)}" for key, value in settings.items()]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {json.dumps(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)
