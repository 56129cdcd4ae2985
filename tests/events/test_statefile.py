"""The file of sessions' states: what is wrong with it is said, and whatever happens while it is written, it is
whole."""

from __future__ import annotations

import json
import os
import resource
import signal

import psutil
import pytest

from broker.errors import ConfigError
from broker.observe.log import Log
from broker.policy.sessions import Sessions
from broker.statefile import StateFile
from tests.support.command import broker_command

PATCH = "say('state_patch', patch=json.loads(given)['input']); say('done', ok=True)"


@pytest.fixture
def kept(start, tools):
    """Starts brokers that have the same file."""
    file = tools.folder / "kept" / "state.ndjson"
    config = f'[server]\nstate_file = "{file}"\n' + tools.tool("patch", PATCH)
    return file, lambda: start(config=config)


def put(broker, session, **patch):
    assert broker.ask({"aid": "patch", "inputs": patch, "session": session})["ok"]


def state(broker, session):
    return broker.ask({"aid": "_state", "session": session})["state"]


BAD = {
    '["uid:0","s",{"a":1}]\nnot json\n': "line 2 cannot be read",
    '["uid:0","s",{"a":1}': "line 1 cannot be read",
    '["uid:0","s"]\n': "line 1 cannot be read",
    '["uid:0","s",[1]]\n': "line 1 cannot be read",
    '{"version":2}\n': "line 1 cannot be read",
    '["uid:0","s",%s1%s]\n' % ('{"a":' * 3000, "}" * 3000): "line 1 cannot be read",  # noqa: UP031
    "\0" * 100: "line 1 cannot be read",
}


@pytest.mark.parametrize("content", BAD, ids=lambda content: content[:30])
def test_a_file_that_cannot_be_read_is_left_as_it_is(tmp_path, content):
    file = tmp_path / "state"
    file.write_text(content)
    with pytest.raises(ConfigError, match=BAD[content]):
        StateFile(str(file), Sessions(10, 1 << 20, 60.0), Log()).read()
    assert file.read_text() == content


def test_a_broker_says_what_is_wrong_with_its_file_and_does_not_start(tmp_path):
    (tmp_path / "file").write_text("not json")
    config = tmp_path / "broker.toml"
    for place, words in (
        (tmp_path / "file" / "state", "cannot be written"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "file", "line 1 cannot be read"),
    ):
        config.write_text(f'[server]\nstate_file = "{place}"\n')
        done = broker_command(tmp_path, "serve", "--config", str(config), "--socket", str(tmp_path / "s"))
        assert (done.returncode, str(place) in done.stderr, words in done.stderr) == (2, True, True), done.stderr
        assert "Traceback" not in done.stderr


def test_two_brokers_do_not_share_one_file(kept, tmp_path):
    file, start = kept
    first = start()
    put(first, "s", a=1)
    config = tmp_path / "other.toml"
    config.write_text(f'[server]\nstate_file = "{file}"\n')
    done = broker_command(tmp_path, "serve", "--config", str(config), "--socket", str(tmp_path / "s"))
    assert (done.returncode, "another broker is using it" in done.stderr) == (2, True)
    os.kill(first.process.pid, signal.SIGKILL)  # its lock goes with it
    first.process.wait()
    start()


def test_what_is_in_the_file_comes_back_and_what_was_begun_goes(kept):
    """A broker that is killed while it writes leaves the file as it was, and a beginning of the next one."""
    file, start = kept
    file.parent.mkdir()
    file.write_text(f'["uid:{os.getuid()}","s",{{"n":1.0,"a":[{{"x":null}}]}}]\n\n')
    draft = file.with_name(f".{file.name}.begun")
    draft.write_text('["uid:0","s",{"n":')
    broker = start()
    assert not draft.exists()
    assert state(broker, "s") == {"n": 1.0, "a": [{"x": None}]}
    assert '"n":1.0' in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_told_once_and_the_file_stays_whole_until_there_is_room(kept):
    file, start = kept
    broker = start()
    put(broker, "s", a=1)
    broker.eventually(lambda: b'"a":1' in file.read_bytes())
    process = psutil.Process(broker.process.pid)
    process.rlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    put(broker, "s", long="x" * 50_000)
    broker.eventually(lambda: "state is not written" in broker.log.read_text())
    put(broker, "s", b=2)
    assert state(broker, "s")["b"] == 2
    assert b"long" not in file.read_bytes()
    process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    broker.eventually(lambda: b"xxxx" in file.read_bytes())
    assert broker.log.read_text().count("state is not written") == 1
    assert sorted(os.listdir(file.parent)) == [file.name, f"{file.name}.lock"]
    assert json.loads(file.read_bytes().splitlines()[0])[2]["b"] == 2


def test_a_broker_that_is_killed_again_and_again_never_leaves_half_a_file(kept):
    file, start = kept
    for turn in range(3):
        broker = start()
        assert state(broker, "s").get("turn", turn - 1) == turn - 1
        put(broker, "s", turn=turn, long="y" * 200_000)
        broker.eventually(lambda turn=turn: f'"turn":{turn}'.encode() in file.read_bytes())
        put(broker, "t", long="z" * 200_000)
        os.kill(broker.process.pid, signal.SIGKILL)
        broker.process.wait()
        assert all(json.loads(line) for line in file.read_bytes().splitlines())
