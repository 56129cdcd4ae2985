"""Tools that ask Jina, against a server in its place: what is sent, what comes of each kind of answer, and the key."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.origin import Origin, origin
from broker.utp import jina
from tests.conftest import Brokers, Served, Start
from tests.support.command import broker_command
from tests.support.http import Web
from tests.support.upstream import Asked, Upstream, http

KEY = "jina_0123456789abcdef/secret+key"
PLACES = {jina.SEARCH: Origin("https", "s.jina.ai", 443), jina.READER: Origin("https", "r.jina.ai", 443)}


def asked(arguments: dict[str, Any], **options: Any) -> jina.Ask:
    return jina.ask(arguments, {"jina": options}, PLACES)


def bad(arguments: dict[str, Any], **options: Any) -> str:
    with pytest.raises(jina.BadAsk) as caught:
        asked(arguments, **options)
    return str(caught.value)


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_the_seeds_options_ask_for_a_search() -> None:
    ask = asked(
        {"q": "to be & not", "session_id": "turn_1"},
        mode="search", base_url="https://s.jina.ai", path="/search", method="GET", auth_env="JINA_API_KEY",
    )  # fmt: skip
    assert str(ask.origin) == "https://s.jina.ai"
    assert (ask.method, ask.target, ask.body) == ("GET", "/search?q=to+be+%26+not&session_id=turn_1", b"")
    assert (ask.variable, ask.named) == ("JINA_API_KEY", True)


def test_what_is_not_said_has_a_usual_value() -> None:
    ask = asked({"query": "x"}, mode="search")
    assert (ask.method, ask.target, ask.variable, ask.named) == ("GET", "/search?q=x", "JINA_API_KEY", False)
    assert asked({"q": "x"}, base_url="https://s.jina.ai/").origin == PLACES["search"]


def test_a_page_is_read_by_its_address() -> None:
    page = "https://example.com/a b?c=d&e=f#g"
    ask = asked({"url": page, "lang": "en"}, mode="reader")
    assert (ask.origin, ask.target) == (
        PLACES["reader"],
        "/https%3A%2F%2Fexample.com%2Fa%20b%3Fc%3Dd%26e%3Df%23g?lang=en",
    )
    posted = asked({"target_url": page, "lang": "en"}, mode="reader", method="post")
    assert (posted.method, posted.target, json.loads(posted.body)) == ("POST", "/", {"url": page, "lang": "en"})


def test_a_search_is_posted_as_json() -> None:
    ask = asked({"q": "☃", "n": 3, "deep": {"a": [1]}, "none": None}, mode="search", method="POST", path="/")
    assert (ask.target, json.loads(ask.body)) == ("/", {"q": "☃", "n": 3, "deep": {"a": [1]}})
    assert ask.headers["Content-Type"] == "application/json"


def test_arguments_of_any_kind_fit_into_a_query() -> None:
    ask = asked({"q": "x", "site": ["a", "b"], "on": True, "n": 1.5, "none": None, "o": {"k": 1}}, mode="search")
    assert ask.target == "/search?q=x&site=a&site=b&on=true&n=1.5&o=%7B%22k%22%3A+1%7D"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({}, {"mode": "search"}),
        ({"q": " "}, {"mode": "search"}),
        ({"q": ["x"]}, {"mode": "search"}),
        ({"q": "x"}, {"mode": "reader"}),
        ({"url": 5}, {"mode": "reader"}),
        ({"q": "x"}, {}),
        ({"q": "x"}, {"mode": "crawl"}),
        ({"q": "x"}, {"mode": 5}),
        ({"q": "x"}, {"mode": "search", "method": "DELETE"}),
        ({"q": "x"}, {"mode": "search", "path": "/a?b"}),
        ({"q": "x"}, {"mode": "search", "path": "/a b"}),
        ({"q": "x"}, {"mode": "search", "path": "/a\r\nHost: evil"}),
        ({"q": "x"}, {"mode": "search", "auth_env": ["A"]}),
        ({"q": "x" * 20_000}, {"mode": "search"}),
        ({"q": "\ud800"}, {"mode": "search"}),
    ],
)
def test_what_cannot_be_asked_is_said_so(arguments: dict[str, Any], options: dict[str, Any]) -> None:
    assert bad(arguments, **options)


@pytest.mark.parametrize("options", [None, [], {}, {"jina": None}, {"jina": []}, {"jina": {}}, {"openapi": {}}])
def test_options_without_jina_teach_what_belongs_there(options: Any) -> None:
    with pytest.raises(jina.BadAsk, match="auth_env"):
        jina.ask({"q": "x"}, options, PLACES)


ELSEWHERE = [
    "http://s.jina.ai",  # not encrypted
    "https://s.jina.ai:8443",
    "https://s.jina.ai.",
    "https://s.jina.ai.evil.example",
    "https://evil.example/s.jina.ai",
    "https://s.jina.ai@evil.example",
    "https://user:pw@s.jina.ai",
    "https://evil.example#@s.jina.ai",
    "https://evil.example?@s.jina.ai",
    "https://s.jina.ai?x=y",
    "https://s.jina.ai#x",
    "https://s.jina.ai\\@evil.example",
    "https:\\\\s.jina.ai",
    "https:s.jina.ai",
    "https:///s.jina.ai",
    "//s.jina.ai",
    "s.jina.ai",
    "https://s%2ejina.ai",
    "https://%73.jina.ai",
    "https://\uff53.jina.ai",  # letters of other alphabets
    "https://s.j\u0131na.ai",
    "https://s\u3002jina\u3002ai",
    "https://s.jina.ai\u200b",
    "https://s.jina.ai\t.evil.example",
    "https://s.jina.ai\nHost: evil",
    "https:// s.jina.ai",
    "https://s.jina.ai:",
    "https://s.jina.ai:0",
    "https://s.jina.ai:99999",
    "https://s.jina.ai:443443",
    "https://s.jina.ai:\u0664\u0664\u0663",
    "https://[::1]",
    "https://[::ffff:127.0.0.1]",
    "https://[s.jina.ai]",
    "https://127.0.0.1",
    "https://2130706433",
    "https://0x7f.1",
    "https://localhost",
    "https://169.254.169.254/latest/meta-data",
    "https://jina.ai",
    "https://x.s.jina.ai",
    "ftp://s.jina.ai",
    "file:///etc/passwd",
    "gopher://s.jina.ai",
    "javascript:alert(1)",
]


@pytest.mark.parametrize("address", ELSEWHERE)
def test_nobody_else_is_asked(address: str) -> None:
    assert "only https://s.jina.ai and https://r.jina.ai may be asked" in bad(
        {"q": "x"}, mode="search", base_url=address
    )


@pytest.mark.parametrize("address", ["https://S.JINA.AI", "HTTPS://s.jina.ai:443/", "https://s.jina.ai/v1"])
def test_the_same_address_may_be_written_in_other_ways(address: str) -> None:
    assert asked({"q": "x"}, mode="search", base_url=address).origin == PLACES["search"]


def test_each_mode_has_its_own_server() -> None:
    assert "mode search" in bad({"q": "x"}, mode="search", base_url="https://r.jina.ai")
    assert "mode reader" in bad({"url": "x"}, mode="reader", base_url="https://s.jina.ai")


def test_who_stands_in_jinas_place_is_asked_in_its_place() -> None:
    here = origin("http://127.0.0.1:9999")
    assert here is not None
    places = {jina.SEARCH: here, jina.READER: PLACES["reader"]}
    for base in ("https://s.jina.ai", "http://127.0.0.1:9999", ""):
        assert jina.ask({"q": "x"}, {"jina": {"mode": "search", "base_url": base}}, places).origin == here
    with pytest.raises(jina.BadAsk):
        jina.ask({"q": "x"}, {"jina": {"mode": "search", "base_url": "http://127.0.0.1:9998"}}, places)


# --- what comes of it -------------------------------------------------------------------------------------------------

CONFIG = """
[limits]
reply_bytes = 65536
timeout_seconds = 5
[jina]
tools = ["search", "read", "bare", "named", "withheld"]
search = "{url}"
reader = "{url}"
max = 4
[breaker]
in_a_row = 1000
least_calls = 1000
[[tool]]
name = "search"
options = {{ jina = {{ mode = "search" }} }}
[[tool]]
name = "read"
options = {{ args = {{ fixed = {{ lang = "en" }} }}, jina = {{ mode = "reader" }} }}
[[tool]]
name = "named"
options = {{ jina = {{ mode = "search", auth_env = "NOBODYS_KEY" }} }}
[[tool]]
name = "withheld"
options = {{ jina = {{ mode = "search", auth_env = "BROKER_NATS_WAIT_SECONDS" }} }}
"""


class Stage:
    def __init__(self, served: Served, upstream: Upstream, folder: Path) -> None:
        self.served = served
        self.upstream = upstream
        self.folder = folder

    def call(self, tool: str = "search", *, timeout_ms: int | None = None, **arguments: Any) -> dict[str, Any]:
        arguments = arguments or {"q": "x"}
        more = {} if timeout_ms is None else {"timeout_ms": timeout_ms}
        return self.served.ask({"aid": tool, "inputs": arguments, **more})

    def answered(self, answer: Any, **more: Any) -> dict[str, Any]:
        self.upstream.answer = answer
        return self.call(**more)

    def last(self) -> Asked:
        return self.upstream.asked[-1]

    def written(self) -> str:
        """All that the broker has put on disk."""
        files = (one for one in self.folder.rglob("*") if one.is_file())
        return "".join(one.read_bytes().decode(errors="replace") for one in files)


def error(reply: dict[str, Any]) -> dict[str, Any]:
    assert reply["ok"] is False
    return json.loads(reply["output_json"])["error"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("jina")
    upstream, brokers = Upstream(), Brokers(folder)
    env = {"JINA_API_KEY": KEY, "BROKER_NATS_WAIT_SECONDS": "5.0"}
    served = brokers.start("--http", "127.0.0.1:0", config=CONFIG.format(url=upstream.url), env=env)
    yield Stage(served, upstream, folder)
    upstream.close()
    brokers.end()


def test_a_search_is_answered_with_what_the_server_says(stage: Stage) -> None:
    reply = stage.answered(http(200, b'{"code":200,"data":[{"title":"T","score":1.50}]}'), q="to be")
    assert (reply["ok"], reply["status"]) == (True, "OK")
    assert reply["output_json"] == '{"code":200,"data":[{"title":"T","score":1.50}]}'
    asked = stage.last()
    assert (asked.method, asked.path, asked.query) == ("GET", "/search", {"q": ["to be"]})
    assert asked.headers["accept"] == "application/json"
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert asked.headers["host"] == f"127.0.0.1:{stage.upstream.port}"


def test_a_page_is_read_with_what_the_options_add(stage: Stage) -> None:
    reply = stage.answered(http(200, "# Title\n", "text/plain; charset=utf-8"), tool="read", url="https://e.com/?a=b")
    assert json.loads(reply["output_json"]) == {"data": "# Title\n"}
    assert (stage.last().page, stage.last().query) == ("/https://e.com/?a=b", {"lang": ["en"]})


@pytest.mark.parametrize(
    ("body", "kind", "output"),
    [
        (b"[1,2]", "application/json", {"data": [1, 2]}),
        (b"", "text/plain", {"data": ""}),
        ("größe".encode("latin-1"), "text/plain; charset=ISO-8859-1", {"data": "größe"}),
        (b"\xff", "text/plain; charset=nonsense", {"data": "\ufffd"}),
        (b'{"a":1}', "application/problem+json", {"a": 1}),
    ],
)
def test_an_answer_of_another_kind_is_the_data(stage: Stage, body: bytes, kind: str, output: Any) -> None:
    assert json.loads(stage.answered(http(200, body, kind))["output_json"]) == output


@pytest.mark.parametrize(
    ("status", "code", "again"),
    [
        (301, "upstream_unavailable", False),
        (400, "bad_request", False),
        (401, "auth_failed", False),
        (402, "auth_failed", False),
        (403, "auth_failed", False),
        (404, "not_found", False),
        (409, "conflict", False),
        (422, "bad_request", False),
        (429, "upstream_unavailable", True),
        (500, "upstream_unavailable", True),
        (503, "upstream_unavailable", True),
        (504, "upstream_unavailable", True),
    ],
)
def test_an_unhappy_answer_is_told_in_commongrounds_codes(stage: Stage, status: int, code: str, again: bool) -> None:
    said = error(stage.answered(http(status, {"message": "so it is"})))
    assert (said["code"], said.get("retryable", False)) == (code, again)
    assert f"answered {status}" in said["message"]
    if status >= 400:
        assert "so it is" in said["message"]
        assert said["detail"] == {"http_status": status}


def test_a_redirection_is_not_followed(stage: Stage) -> None:
    before = len(stage.upstream.asked)
    stage.answered(http(302, b"", "text/plain", f"Location: {stage.upstream.url}/other"))
    assert len(stage.upstream.asked) == before + 1


def half(wire: socket.socket, _: Asked) -> None:
    wire.sendall(http(200, {"data": "x" * 100})[:-50])


def half_a_chunk(wire: socket.socket, _: Asked) -> None:
    wire.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\nshort")


def nothing(wire: socket.socket, _: Asked) -> None:
    wire.shutdown(socket.SHUT_RDWR)


def many_headers(wire: socket.socket, _: Asked) -> None:
    wire.sendall(b"HTTP/1.1 200 OK\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(2000)) + b"\r\n")


@pytest.mark.parametrize(
    "answer",
    [
        half,
        half_a_chunk,
        nothing,
        many_headers,
        b"SSH-2.0-OpenSSH_9\r\n",
        http(200, b"{not json"),
        http(200, b'{"a":"\xff"}'),
        http(200, b"[" * 1000 + b"]" * 1000),
        http(200, b"x", "text/plain", "Content-Encoding: gzip"),
        b"HTTP/1.1 200 OK\r\nContent-Length: nonsense\r\nContent-Type: application/json\r\n\r\n{",
    ],
)
def test_a_broken_answer_is_the_servers_fault(stage: Stage, answer: Any) -> None:
    assert error(stage.answered(answer))["code"] == "upstream_unavailable"


def test_ten_megabytes_are_refused_before_they_are_read(stage: Stage) -> None:
    sent = []

    def flood(wire: socket.socket, _: Asked) -> None:
        wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 10485760\r\n\r\n")
        for _ in range(160):
            wire.sendall(b"x" * 65536)
            sent.append(65536)

    reply = stage.answered(flood)
    assert (reply["ok"], reply["type"]) == (False, "reply_too_large")
    assert "limits.reply_bytes" in reply["error"]
    assert sum(sent) < 10 * 1024 * 1024


def test_an_answer_that_escapes_make_too_long_is_refused(stage: Stage) -> None:
    assert stage.answered(http(200, b'"' * 60_000, "text/plain"))["type"] == "reply_too_large"


def test_a_server_that_stalls_is_given_the_calls_time_and_no_more(stage: Stage) -> None:
    def stall(*_: Any) -> None:
        stage.upstream.ended.wait(5)

    begun = time.monotonic()
    reply = stage.answered(stall, timeout_ms=300, q="x")
    assert (reply["ok"], reply["type"]) == (False, "timeout")
    assert time.monotonic() - begun < 2


def test_a_server_that_drips_is_given_no_more_either(stage: Stage) -> None:
    def drip(wire: socket.socket, _: Asked) -> None:
        wire.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 100\r\n\r\n")
        while not stage.upstream.ended.wait(0.05):
            wire.sendall(b"x")

    begun = time.monotonic()
    assert stage.answered(drip, timeout_ms=300, q="x")["type"] == "timeout"
    assert time.monotonic() - begun < 2
    assert stage.answered(http(200, {"free": "again"}))["ok"]


def test_so_many_at_once_and_the_others_wait(stage: Stage) -> None:
    under_way, most = [0], [0]

    def slow(wire: socket.socket, _: Asked) -> None:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        time.sleep(0.1)
        under_way[0] -= 1
        wire.sendall(http(200, {"ok": True}))

    stage.upstream.answer = slow
    with stage.served.wire() as wire:
        wire.send(*({"id": number, "aid": "search", "inputs": {"q": "x"}} for number in range(12)))
        replies = wire.replies(12)
    assert {one["id"] for one in replies} == set(range(12))
    assert all(one["ok"] for one in replies)
    assert most[0] == 4


def test_who_cannot_be_reached_is_named(start: Start) -> None:
    upstream = Upstream()
    upstream.close()
    served = start(config=CONFIG.format(url=upstream.url))
    said = error(served.ask({"aid": "search", "inputs": {"q": "x"}}))
    assert (said["code"], said["retryable"]) == ("upstream_unavailable", True)
    assert "127.0.0.1 cannot be reached" in said["message"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_server_is_believed_if_its_certificate_is(start: Start, tmp_path: Path) -> None:
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem"]
    made += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run(made, cwd=tmp_path, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    upstream = Upstream(tls)
    config = CONFIG.format(url=f"https://localhost:{upstream.port}")
    trusting = start(config=config, env={"SSL_CERT_FILE": str(tmp_path / "cert.pem"), "JINA_API_KEY": KEY})
    assert trusting.ask({"aid": "search", "inputs": {"q": "x"}})["ok"]
    said = error(start(config=config, env={"JINA_API_KEY": KEY}).ask({"aid": "search", "inputs": {"q": "x"}}))
    assert said["code"] == "upstream_unavailable"
    assert "certificate" in said["message"]
    assert len(upstream.asked) == 1
    upstream.close()


@pytest.mark.parametrize("arguments", [{"a": 1}, {"q": ""}])
def test_wrong_arguments_are_the_callers_fault_and_nobody_is_asked(stage: Stage, arguments: dict[str, Any]) -> None:
    before = len(stage.upstream.asked)
    reply = stage.call(**arguments)
    assert (reply["ok"], reply["type"], reply["status"]) == (False, "bad_request", "INVALID_PICK")
    assert len(stage.upstream.asked) == before


def test_a_tool_without_options_says_what_it_needs(stage: Stage) -> None:
    reply = stage.call("bare", q="x")
    assert reply["type"] == "bad_request"
    assert "jina: {mode, base_url, path, method, auth_env}" in reply["error"]


# --- the key ----------------------------------------------------------------------------------------------------------


def test_a_key_that_is_named_and_not_there_is_a_clear_failure(stage: Stage) -> None:
    before = len(stage.upstream.asked)
    for tool, variable in (("named", "NOBODYS_KEY"), ("withheld", "BROKER_NATS_WAIT_SECONDS")):
        said = error(stage.call(tool, q="x"))
        assert said["code"] == "auth_failed"
        assert variable in said["message"]
    assert len(stage.upstream.asked) == before


def test_without_the_usual_key_one_is_nobody(start: Start) -> None:
    upstream = Upstream()
    served = start(config=CONFIG.format(url=upstream.url))
    assert served.ask({"aid": "search", "inputs": {"q": "x"}})["ok"]
    assert "authorization" not in upstream.asked[-1].headers
    upstream.close()


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "größe"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(start: Start, key: str) -> None:
    upstream = Upstream()
    served = start(config=CONFIG.format(url=upstream.url), env={"JINA_API_KEY": key})
    reply = served.ask({"aid": "search", "inputs": {"q": "x"}})
    assert error(reply)["code"] == "auth_failed"
    assert key not in json.dumps(reply, ensure_ascii=False)
    assert not upstream.asked
    upstream.close()


def echo_all(wire: socket.socket, asked: Asked) -> None:
    """It says all that it was told, in many ways."""
    key = asked.headers["authorization"].removeprefix("Bearer ")
    wire.sendall(http(200, {"headers": asked.headers, key: [key, json.dumps({"in": key})], "words": f"key={key}&"}))


def refuse_all(wire: socket.socket, asked: Asked) -> None:
    wire.sendall(http(401, f"{'no ' * 90} such key: {asked.headers['authorization']}", "text/plain"))


def break_off(wire: socket.socket, asked: Asked) -> None:
    wire.sendall(f"HTTP/1.1 {asked.headers['authorization']}\r\n\r\n".encode())


@pytest.mark.parametrize("answer", [echo_all, refuse_all, break_off])
def test_the_key_reaches_the_server_and_nobody_else(stage: Stage, answer: Any) -> None:
    """Neither replies, nor jobs and logs on disk, nor what an operator is shown."""
    stage.upstream.answer = answer
    web = Web(stage.served.ready)
    seen = [
        json.dumps(stage.call(q="x")),
        json.dumps(stage.served.ask({"aid": "search", "inputs": {"q": "x"}, "idempotency_key": answer.__name__})),
        json.dumps(stage.served.ask({"aid": "search", "inputs": {"q": "x"}, "idempotency_key": answer.__name__})),
        web.execute("search", {"q": "x"}).body.decode(),
        json.dumps(stage.served.status()),
        web.get("/metrics").body.decode(),
        web.get("/status").body.decode(),
        stage.written(),
        broker_command(stage.folder, "status", "--socket", stage.served.path).stdout,
    ]
    assert stage.last().headers["authorization"] == f"Bearer {KEY}"
    for said in seen:
        for form in (KEY, KEY.replace("/", "\\/"), KEY.replace("/", "%2F").replace("+", "%2B")):
            assert form not in said


def test_the_tool_reaches_out_and_is_leased_like_one_that_does(stage: Stage) -> None:
    tools = {one["aid"]: one for one in stage.served.ask({"aid": "_tools"})["tools"]}
    assert (tools["search"]["tier"], tools["search"]["side_effects"]) == (2, ["network"])


@pytest.mark.parametrize("address", ["s.jina.ai", "https://s.jina.ai/x", "ftp://s.jina.ai", "https://u@s.jina.ai"])
def test_a_place_that_is_no_server_stops_the_start(tmp_path: Path, address: str) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(f'[jina]\ntools = ["search"]\nsearch = "{address}"')
    done = broker_command(tmp_path, "serve", "--config", str(file), "--check")
    assert done.returncode != 0
    assert "jina.search" in done.stderr


def test_a_broker_that_stops_does_not_wait_for_a_server_that_stalls(start: Start) -> None:
    upstream = Upstream()
    upstream.answer = lambda *_: upstream.ended.wait(20)  # type: ignore[assignment,return-value]
    served = start(
        config="[server]\ndrain_seconds = 0.2\n" + CONFIG.format(url=upstream.url).replace("= 5\n", "= 60\n")
    )
    with served.wire() as wire:
        wire.send({"id": 1, "aid": "search", "inputs": {"q": "x"}})
        served.eventually(lambda: bool(upstream.asked))
        begun = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - begun < 3
        assert wire.reply()["type"] == "draining"
    upstream.close()
