"""A broker that listens on HTTP as well, and somebody who asks it."""

from __future__ import annotations

import http.client
import json
import re
from typing import Any, NamedTuple

import pytest

from tests.support.command import broker_command
from tests.support.config import toolhost


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Site:
    """The HTTP face of a broker."""

    def __init__(self, broker):
        self.broker = broker
        self.port = int(re.split(r"http://[\d.]+:", broker.ready)[1].split()[0].rstrip(","))

    def connect(self, timeout=20):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(self, method, path, body=None, token=""):
        connection = self.connect()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path):
        return self.ask("GET", path)

    def call(self, tool, **given):
        return self.ask("POST", "/v1/tools/execute", {"tool": tool, "input": given})


@pytest.fixture
def token(tmp_path):
    done = broker_command(tmp_path, "token", "new", "ops")
    return done.stdout.strip().split()[-1]


@pytest.fixture
def site(start, where, token):  # noqa: ARG001
    """Demo and fault tools; whoever shows the token is an operator."""
    principal = '[[principal]]\nname = "token:ops"\noperator = true\n'
    hosts = toolhost("demo", where["demo_plugin"], max=2) + toolhost("fault", where["fault_plugin"], max=2)
    wire = f'[[toolhost]]\nname = "wire"\nbinary = "{where["fault_toolhost"]}"\nmax = 2\n'
    return Site(start("--http", "127.0.0.1:0", config=principal + hosts + wire))
