"""The drop-in for machina_dispatch: alone, in a Machina tree, through a daemon; each failure type provoked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.config import toolhost
from tests.support.toolhosts import scripted

CLI = """#!/bin/sh
read line
case "$2" in
AID.OK.v1) printf '%s' '{"ok":true,"status":"OK","output_json":"{\\"cli\\":1}","error":""}' ;;
AID.HERE.v1) printf '{"ok":true,"status":"OK","output_json":"\\"%s %s\\"","error":""}' "$(pwd)" "$SECRET" ;;
AID.OBJECT.v1) printf '%s' '{"status":"OK","output_json":{"a":1}}' ;;
AID.FAIL.v1) printf '%s' '{"ok":true,"status":"TOOL_ERROR","output_json":"","error":"it failed"}' ;;
AID.EXIT.v1) echo "out" ; echo "bad thing" >&2 ; exit 3 ;;
AID.HANG.v1) sleep 60 & sleep 60 ;;
AID.JUNK.v1) echo "no json" ;;
AID.EMPTY.v1) ;;
AID.HUGE.v1) head -c 3000000 /dev/zero | tr '\\0' x ;;
*) exit 4 ;;
esac
"""

TREE = """
import json, os, subprocess
MACHINA_ROOT = os.environ.get("MACHINA_ROOT", os.path.dirname(os.path.abspath(__file__)))
_TOOLHOST_TIMEOUT = 7

def run_machina_toolhost(aid, inputs):
    return "the old way"

def execute_intent(aid, inputs):
    return run_machina_tool(aid, inputs)

from machina_dispatch_exec import run_machina_tool
"""

EXEC = """
from machina_dispatch import run_machina_toolhost

def run_machina_tool(aid, inputs):
    return run_machina_toolhost(aid, inputs)
"""


@pytest.fixture
def root(tmp_path):
    """A Machina installation, as far as a dispatcher can see."""
    cli = tmp_path / "root" / "build" / "machina_cli"
    cli.parent.mkdir(parents=True)
    cli.write_text(CLI)
    cli.chmod(0o755)
    return tmp_path / "root"


@pytest.fixture
def run(tmp_path):
    """Runs a program with a clean environment; the JSON that it prints."""

    def run(body, *command, cwd=None, **environment):
        script = tmp_path / "script.py"
        script.write_text("import json, os, sys\n" + textwrap.dedent(body))
        done = subprocess.run(
            [sys.executable, *command, str(script)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=cwd or tmp_path,
            env={"HOME": str(tmp_path), "PATH": os.environ["PATH"], **environment},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def calls(*pairs):
    listed = "[" + ", ".join(f"run_machina_toolhost({aid!r}, {inputs!r})" for aid, inputs in pairs) + "]"
    return f"from machina_dispatch import run_machina_toolhost\nprint(json.dumps({listed}))"


def test_nothing_but_an_import_and_the_demo_tools_answer(run):
    echo, missing, failed, big = run(
        calls(
            ("AID.DEMO.ECHO.v1", {"a": [1, "é"]}),
            ("AID.NO.v1", {}),
            ("AID.DEMO.FAIL.v1", {"error": "oh no"}),
            ("AID.DEMO.BLOB.v1", {"bytes": 2_000_000}),
        )
    )
    assert json.loads(echo) == {"a": [1, "é"]}
    assert missing == {"error": True, "aid": "AID.NO.v1", "type": "not_found", "detail": "tool not found: AID.NO.v1"}
    assert failed == {"error": True, "aid": "AID.DEMO.FAIL.v1", "type": "tool_error", "detail": "oh no"}
    assert big["type"] == "parse_error"
    assert "1048576" in big["detail"]


@pytest.mark.parametrize("way", ["embedded", "daemon"])
def test_the_failure_types(run, way, start, where, tmp_path):
    text = toolhost("d", where["demo_plugin"], where["fault_plugin"]) + toolhost("w", binary=where["fault_toolhost"])
    environment = {"MACHINA_TOOLHOST_TIMEOUT": "1"}
    if way == "embedded":
        (tmp_path / "broker.toml").write_text(text)
    else:
        environment["MACHINA_BROKER_SOCKET"] = start(config=text, env=environment).path
    faults = ["EXIT", "SEGV", "HANG", "JUNK", "OVERSIZE"]
    results = run(
        calls(*((f"AID.FAULT.{fault}.v1", {}) for fault in faults), ("AID.DEMO.ECHO.v1", {"n": 1})), **environment
    )
    assert [r["type"] for r in results[:-1]] == ["crash", "crash", "timeout", "parse_error", "parse_error"]
    assert all(set(r) == {"error", "aid", "type", "detail"} for r in results[:-1])
    assert results[-1] == '{"n":1}'


def test_a_missing_binary_plugin_or_daemon(run, tmp_path):
    (missing,) = run(calls(("AID.X.v1", {})), MACHINA_ROOT=str(tmp_path / "nowhere"))
    assert missing["type"] == "not_found"
    assert "machina_cli not found at" in missing["detail"]
    (tmp_path / "broker.toml").write_text('[[toolhost]]\nname = "a"\nplugins = ["/no/such.so"]\n')
    (missing,) = run(calls(("AID.X.v1", {})))
    assert missing["type"] == "not_found"
    assert "/no/such.so does not exist" in missing["detail"]
    (tmp_path / "broker.toml").write_text('[[toolhost]]\nname = "a"\nbinary = "/no/such"\n')
    assert run(calls(("AID.X.v1", {})))[0]["type"] == "not_found"
    (tmp_path / "broker.toml").write_text("[limits]\nqueue_secs = 1\n")
    (wrong,) = run(calls(("AID.X.v1", {})))
    assert wrong["type"] == "exception"
    assert "did you mean `queue_seconds`?" in wrong["detail"]
    (tmp_path / "broker.toml").unlink()
    (nobody,) = run(calls(("AID.X.v1", {})), MACHINA_BROKER_SOCKET=str(tmp_path / "none.sock"))
    assert nobody["type"] == "exception"
    assert nobody["detail"].startswith("unavailable: no broker answers")


def test_what_is_on_our_side_begins_with_our_code(run, where, tmp_path):
    text = "[breaker]\nin_a_row = 1\n" + toolhost("d", where["demo_plugin"], where["fault_plugin"])
    (tmp_path / "broker.toml").write_text(text)
    results = run(
        """
        from machina_dispatch import run_machina_toolhost as call
        crash = call("AID.FAULT.EXIT.v1", {}), call("AID.FAULT.EXIT.v1", {})
        loop = []
        loop.append(loop)
        echo = "AID.DEMO.ECHO.v1"
        file = {"path": "a.txt", "text": "x"}
        others = [call("AID.FILE.WRITE.v1", file), call(echo, {"x": object()}), call(echo, loop)]
        others += [call(echo, {"x": "x" * 11_000_000}), call(None, {}), call(echo, "\\ud800")]
        print(json.dumps([*crash, *others]))
        """,
        MACHINA_LEASE_ENFORCE="1",
    )
    assert results[0]["type"] == "crash"
    assert {result["type"] for result in results[1:] if result["aid"] is not None} == {"exception"}
    codes = [result["detail"].split(":")[0] for result in results[1:]]
    assert codes[:5] == ["breaker_open", "lease_required", "bad_request", "bad_request", "too_large"]
    assert codes[6] == "bad_request"


def test_a_tool_that_no_plugin_has_is_run_as_before(run, root, where, tmp_path):
    (tmp_path / "broker.toml").write_text(toolhost("d", where["demo_plugin"]))
    names = ["OK", "HERE", "OBJECT", "FAIL", "EXIT", "HANG", "JUNK", "EMPTY", "HUGE", "OTHER"]
    *results, demo = run(
        calls(*((f"AID.{name}.v1", {}) for name in names), ("AID.DEMO.ECHO.v1", {"n": 1})),
        MACHINA_ROOT=str(root),
        MACHINA_TOOLHOST_TIMEOUT="1",
        SECRET="passed on",
    )
    ok, here, obj, *failed = results
    assert ok == '{"cli":1}'
    assert here == f'"{root} passed on"', "where it is run, and with which environment"
    assert json.loads(obj) == {"a": 1}
    types = [result["type"] for result in failed]
    assert types == ["tool_error", "crash", "timeout", "parse_error", "parse_error", "parse_error", "crash"]
    assert failed[0]["detail"] == "it failed"
    assert "bad thing" in failed[1]["detail"]
    assert demo == '{"n":1}'


def test_a_tool_that_the_daemon_does_not_have_is_run_as_before(run, root, shared):
    results = run(
        calls(("AID.DEMO.ECHO.v1", {"n": 1}), ("AID.OK.v1", {}), ("AID.FAIL.v1", {})),
        MACHINA_ROOT=str(root),
        MACHINA_BROKER_SOCKET=shared.path,
    )
    assert results[:2] == ['{"n":1}', '{"cli":1}']
    assert results[2]["type"] == "tool_error"


def test_without_plugins_a_machina_root_hides_the_demo_tools(run, root):
    results = run(calls(("AID.DEMO.ECHO.v1", {}), ("AID.OK.v1", {})), MACHINA_ROOT=str(root))
    assert results[0]["type"] == "crash", "as its own command said"
    assert results[1] == '{"cli":1}'


@pytest.fixture
def tree(root):
    """A Machina tree with a dispatcher of its own, that wins on the import path."""
    (root / "machina_dispatch.py").write_text(TREE)
    (root / "machina_dispatch_exec.py").write_text(EXEC)
    return root


WHO = """
import machina_dispatch, machina_dispatch_exec
names = [machina_dispatch.run_machina_toolhost, machina_dispatch_exec.run_machina_toolhost]
results = [call("AID.OK.v1", {}) for call in names] + [machina_dispatch.execute_intent("AID.OK.v1", {})]
print(json.dumps([machina_dispatch.__file__, *results]))
"""


def test_install_replaces_the_call_of_a_tree_before_and_after_it_is_imported(run, tree):
    old = ["the old way"] * 3
    new = ['{"cli":1}'] * 3
    assert run(WHO, PYTHONPATH=str(tree)) == [str(tree / "machina_dispatch.py"), *old]
    early = "import broker.machina_dispatch as ours\nours.install()\n" + WHO
    assert run(early, PYTHONPATH=str(tree)) == [str(tree / "machina_dispatch.py"), *new]
    late = "import machina_dispatch, machina_dispatch_exec\nimport broker.machina_dispatch as ours\nours.install()\n"
    assert run(late + WHO, PYTHONPATH=str(tree))[1:] == new
    undone = late + "ours.uninstall()\n" + WHO
    assert run(undone, PYTHONPATH=str(tree))[1:] == old
    renamed = "from machina_dispatch import run_machina_toolhost as rmt\nimport broker.machina_dispatch as ours\n"
    renamed += (
        "ours.install()\nfrom machina_dispatch import run_machina_toolhost as later\nnew = rmt('AID.OK.v1', {})\n"
    )
    renamed += "ours.uninstall()\nprint(json.dumps([new, rmt('AID.OK.v1', {}), later('AID.OK.v1', {})]))"
    assert run(renamed, PYTHONPATH=str(tree)) == [new[0], old[0], old[0]]


def test_no_file_changes_when_the_program_is_run_through_the_module(run, tree):
    late_path = f"import sys\nsys.path.insert(0, {str(tree)!r})\n" + WHO
    assert run(late_path, "-m", "broker.machina_dispatch")[1:] == ['{"cli":1}'] * 3
    assert run("print(json.dumps([__name__, sys.argv[1:]]))", "-m", "broker.machina_dispatch") == ["__main__", []]


def test_the_trees_own_timeout_holds_where_the_environment_says_nothing(run, tree):
    body = """
    import machina_dispatch, broker.machina_dispatch as ours
    ours.install()
    machina_dispatch.run_machina_toolhost("AID.OK.v1", {})
    print(json.dumps(ours._inside.settings.limits.timeout_seconds))
    """
    assert run(body, PYTHONPATH=str(tree)) == 7


def test_names_chains_and_aliases(run, tmp_path):
    (tmp_path / "broker.toml").write_text('[alias]\nsay = "AID.DEMO.ECHO.v1"\n')
    results = run(
        """
        import machina_dispatch as m
        m.CHAIN_RECIPES["two"] = [("say", lambda i: {"a": i["a"]}), ("AID.DEMO.FAIL.v1", lambda i: {"error": "stop"}),
                                  ("say", lambda i: {})]
        m.TOOL_ALIASES["repeat"] = "AID.DEMO.ECHO.v1"
        print(json.dumps([
            m.validate_aid("AID.FILE.READ.v1"), m.validate_aid(""), m.validate_aid("x")[0],
            m.resolve_alias("say"), m.resolve_alias("AID.X.v1"), m.run_machina_tool("repeat", {"n": 1}),
            m.execute_chain("two", {"a": 1}), m.execute_chain("none", {}), m._toolhost_error("a", "crash", "d"),
        ]))
        """
    )
    assert results[:5] == [[True, "valid"], [False, "empty AID"], False, "AID.DEMO.ECHO.v1", "AID.X.v1"]
    assert results[5] == '{"n":1}'
    assert [step["tool"] for step in results[6]] == ["say", "AID.DEMO.FAIL.v1"]
    assert results[6][1]["output"]["type"] == "tool_error"
    assert results[7] == [{"error": "unknown chain: none"}]
    assert results[8] == {"error": True, "aid": "a", "type": "crash", "detail": "d"}


def test_the_environment_of_machinas_pool_is_understood(run, where, tmp_path):
    (tmp_path / "broker.toml").write_text(f'[[toolhost]]\nname = "a"\nplugins = ["{where["demo_plugin"]}"]\n')
    body = 'say(output_json=json.dumps(os.environ.get("HOME")))'
    binary = scripted(tmp_path, body)
    text = Path(binary).read_text()
    named = """print('{"ok":true,"tools":[{"aid":"AID.A.v1"}]}')"""
    Path(binary).write_text(text.replace("print(open(sys.argv[2]).read())", named))
    result = run(
        """
        import broker.machina_dispatch as ours
        output = ours.run_machina_toolhost("AID.A.v1", {})
        settings = ours._inside.settings
        limits = settings.limits
        print(json.dumps([output, settings.toolhost[0].min, limits.timeout_seconds, limits.rlimit_nofile]))
        """,
        MACHINA_TOOLHOST_BIN=binary,
        MACHINA_TOOLHOST_POOL_SIZE="3",
        MACHINA_TOOLHOST_TIMEOUT="12",
        MACHINA_TOOLHOST_RLIMIT_NOFILE="99",
    )
    assert result == [json.dumps(str(tmp_path)), 3, 12, 99]


def test_importing_is_quick_and_heavy_parts_stay_out(run):
    heavy = run(
        """
        import time
        begin = time.perf_counter()
        import broker, machina_dispatch
        took = time.perf_counter() - begin
        heavy = {"asyncio", "uvloop", "msgspec", "psutil", "cffi", "broker.server"}
        print(json.dumps([sorted(heavy & set(sys.modules)), took]))
        """
    )
    assert heavy[0] == []
    assert heavy[1] < 0.06
