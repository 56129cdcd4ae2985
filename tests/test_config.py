"""Configuration: precedence, and messages that name the file, the key and what was expected."""

from __future__ import annotations

import pytest

from broker import config
from broker.errors import ConfigError


def write(tmp_path, text):
    file = tmp_path / "broker.toml"
    file.write_text(text)
    return file


def test_a_flag_wins_over_the_environment_that_over_machinas_that_over_the_file(tmp_path):
    file = write(tmp_path, "[limits]\ntimeout_seconds = 1\nqueue_seconds = 2\n[server]\nsocket = '/file'\n")
    environ = {"MACHINA_TOOLHOST_TIMEOUT": "7", "BROKER_LIMITS_QUEUE_SECONDS": "8", "BROKER_SERVER_SOCKET": "/env"}
    loaded = config.load(file, {("server", "socket"): "/flag"}, environ)
    assert loaded.config.limits.timeout_seconds == 7
    assert loaded.config.limits.queue_seconds == 8
    assert loaded.config.server.socket == "/flag"
    assert loaded.origins["server.socket"] == "--socket"
    assert config.load(file, {}, {"BROKER_LIMITS_TIMEOUT_SECONDS": "9", **environ}).config.limits.timeout_seconds == 9


def test_without_anything_there_are_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = config.load(None, {}, {"HOME": str(tmp_path)})
    assert loaded.file is None
    assert loaded.config.limits.request_bytes == 10 * 1024 * 1024
    assert loaded.config.limits.reply_bytes == 1024 * 1024


def test_machinas_variables_are_defaults_of_every_toolhost(tmp_path):
    file = write(tmp_path, '[[toolhost]]\nname = "a"\n[[toolhost]]\nname = "b"\nbinary = "/own"\nmin = 1\n')
    environ = {"MACHINA_TOOLHOST_BIN": "/theirs", "MACHINA_TOOLHOST_POOL_SIZE": "12"}
    a, b = config.load(file, {}, environ).config.toolhost
    assert (a.binary, a.min, a.max) == ("/theirs", 12, 12)
    assert (b.binary, b.min, b.max) == ("/own", 1, 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[limits]\ndepht = 3\n", ["broker.toml", "[limits]", "`depht`", "did you mean `depth`"]),
        ("[limits]\ndepth = 'x'\n", ["broker.toml", "limits.depth", "int"]),
        ("[limits]\ndepth = 0\n", ["limits.depth", ">= 2"]),
        ("[[toolhost]]\nplugins = []\n", ["toolhost no. 1", "`name`"]),
        ("[[toolhost]]\nname = 'a'\nmax = 'x'\n", ["toolhost no. 1", "max"]),
        ("[[toolhost]]\nname = 'a'\n[[toolhost]]\nname = 'a'\n", ["two [[toolhost]]", "`a`"]),
        ("[[toolhost]]\nname = 'a'\nsha256 = {'x.so' = '12'}\n", ["x.so", "64 hexadecimal"]),
        ("[typo]\n", ["the top level", "`typo`"]),
        ("[limits\n", ["not valid TOML", "line 1"]),
        ("[server]\ntcp = 'here'\n", ["server.tcp", "HOST:PORT"]),
    ],
)
def test_a_mistake_is_named_with_its_place_and_what_was_expected(tmp_path, text, expected):
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, text), {}, {})
    for part in expected:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"BROKER_LIMITS_DEPTH": "many"}, ["BROKER_LIMITS_DEPTH", "many"]),
        ({"BROKER_LIMITS_DEPHT": "1"}, ["BROKER_LIMITS_DEPHT", "did you mean `depth`"]),
        ({"MACHINA_TOOLHOST_TIMEOUT": "soon"}, ["MACHINA_TOOLHOST_TIMEOUT", "soon"]),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(environ, expected):
    with pytest.raises(ConfigError) as caught:
        config.load(None, {}, {"HOME": "/nonexistent", **environ})
    for part in expected:
        assert part in str(caught.value)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"/no/such\.toml: cannot be read"):
        config.load("/no/such.toml", {}, {})
