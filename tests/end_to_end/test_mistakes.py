"""Mistakes of users: each gets one sentence that names the file, the setting and the fix; nothing is left running."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support.config import toolhost


def serve(tmp_path, *arguments, config=None, env=None):
    command = [sys.executable, "-m", "broker", "serve", "--socket", str(tmp_path / "b.sock"), *arguments]
    if config is not None:
        (tmp_path / "broker.toml").write_text(config)
        command += ["--config", str(tmp_path / "broker.toml")]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path, env={"HOME": "/", **(env or {})}
    )


def refused(result, *parts):
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("broker:")]
    for part in parts:
        assert part in line, line


def test_a_plugin_that_is_not_there(tmp_path):
    refused(serve(tmp_path, "--plugin", "/no/such.so"), "/no/such.so", "does not exist")


def test_a_plugin_that_is_not_a_plugin(tmp_path):
    (tmp_path / "text.so").write_text("hello")
    refused(serve(tmp_path, "--plugin", str(tmp_path / "text.so")), "text.so", "says:")


def test_a_toolhost_that_is_not_there_or_not_executable(tmp_path):
    refused(serve(tmp_path, "--toolhost", "/no/such"), "/no/such", "does not exist")
    (tmp_path / "host").write_text("#!/bin/sh\n")
    refused(serve(tmp_path, "--toolhost", str(tmp_path / "host")), "not executable", "chmod")


def test_a_toolhost_that_lists_junk_nothing_or_hangs_up(tmp_path):
    host = tmp_path / "host"
    for script, part in (("echo hello", "'hello"), ("exit 3", "code 3"), ('echo "{}"', "not a list of tools")):
        host.write_text(f"#!/bin/sh\n{script}\n")
        host.chmod(0o755)
        refused(serve(tmp_path, "--toolhost", str(host)), str(host), part)


def test_ours_without_a_plugin_is_told_to_take_one(tmp_path, where):
    refused(serve(tmp_path, "--toolhost", where["toolhost"]), "--list", "plugin")


def test_two_tools_of_one_name_stop_the_start_and_both_sources_are_named(tmp_path, where):
    copy = tmp_path / "copy.so"
    shutil.copy(where["demo_plugin"], copy)
    result = serve(tmp_path, "--plugin", where["demo_plugin"], "--plugin", str(copy))
    refused(result, "AID.DEMO", where["demo_plugin"], str(copy))


def test_a_pinned_plugin_with_other_content_is_not_loaded(tmp_path, where):
    config = toolhost("d", where["demo_plugin"]) + f'sha256 = {{"demo_plugin.so" = "{"0" * 64}"}}\n'
    refused(serve(tmp_path, config=config), "pinned", "demo_plugin.so")


def test_a_plugin_that_asks_for_more_than_is_allowed(tmp_path, where):
    config = toolhost("d", where["demo_plugin"], capabilities=["network"])
    refused(serve(tmp_path, config=config), "capabilities")


def test_tcp_beyond_loopback_needs_a_word(tmp_path, where):
    refused(serve(tmp_path, "--plugin", where["demo_plugin"], "--tcp", "0.0.0.0:0"), "0.0.0.0:0", "--insecure")
    refused(serve(tmp_path, "--plugin", where["demo_plugin"], "--tcp", "nowhere"), "HOST:PORT")


@pytest.mark.parametrize("arguments", [["--no-such-flag"], ["--log", "loud"]])
def test_a_wrong_flag_shows_the_usage(tmp_path, arguments):
    result = serve(tmp_path, *arguments)
    assert result.returncode == 2
    assert "usage: broker serve" in result.stderr


def test_a_socket_path_that_is_too_long_or_cannot_be_made(tmp_path, where):
    long = tmp_path / ("x" * 120)
    refused(serve(tmp_path, "--plugin", where["demo_plugin"], "--socket", str(long)), "shorter --socket")
    refused(
        serve(tmp_path, "--plugin", where["demo_plugin"], "--socket", "/proc/none/b.sock"), "/proc/none", "--socket"
    )


def test_check_validates_explains_and_starts_nothing(tmp_path, where):
    config = "[limits]\ndepth = 64\n" + toolhost("d", where["demo_plugin"])
    result = serve(tmp_path, "--check", config=config, env={"BROKER_LIMITS_QUEUE_SECONDS": "5"})
    assert result.returncode == 0, result.stderr
    assert "depth = 64" in result.stdout
    assert "broker.toml" in result.stdout
    assert "queue_seconds = 5.0  (BROKER_LIMITS_QUEUE_SECONDS)" in result.stdout
    assert "AID.DEMO.ECHO.v1" in result.stdout
    refused(serve(tmp_path, "--check", config="[limits]\ndepht = 1\n"), "did you mean `depth`")
