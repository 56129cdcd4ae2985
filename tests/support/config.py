"""Pieces of broker.toml for tests."""

import json


def toolhost(name: str, *plugins: str, **settings: object) -> str:
    lines = [f'[[toolhost]]\nname = "{name}"\nplugins = {json.dumps(plugins)}']
    lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    return "\n".join(lines) + "\n"
