"""[[python]] with all kinds of interpreters, packages and folders: what is kept warm, and what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.python_app import python_app, python_config

VERSION = "import sys\ndef run(payload):\n    return [list(sys.version_info[:2]), sys.prefix]\n"
# A thread that Python does not know of, as those of OpenBLAS are; `quits` has it end before each fork.
NATIVE = """
import ctypes, os
libc = ctypes.CDLL(None)
thread = ctypes.c_ulong()
libc.pthread_create(ctypes.byref(thread), None, libc.sleep, ctypes.c_void_p(1000))
def end():
    libc.pthread_cancel(thread)
    libc.pthread_join(thread, None)
    os.register_at_fork = None
"""
THREADS = "import os, sys\nWARM = 'native' in sys.modules\nimport native\n"
THREADS += "def run(payload):\n    return [WARM, len(os.listdir('/proc/self/task'))]\n"


def environment(root: Path, python: str = sys.executable) -> Path:
    """The app's own .venv; where its packages lie."""
    subprocess.run([python, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    return next((root / ".venv" / "lib").glob("python*/site-packages"))


def answer(broker, name="run", **inputs):
    reply = broker.call(name, **inputs)
    return json.loads(reply["output_json"]) if reply["ok"] else reply


def others() -> list[str]:
    """Other Pythons than ours, that work."""
    names = [f"python3.{minor}" for minor in range(8, 20) if minor != sys.version_info.minor]
    found = [place for place in map(shutil.which, names) if place]
    return [one for one in found if not subprocess.run([one, "-c", "import ctypes, venv"], check=False).returncode]


def test_an_app_may_have_another_python_than_the_broker(start, tmp_path):
    pythons = others()
    if not pythons:
        pytest.skip("there is no other Python here")
    roots = [python_app(tmp_path / f"app{number}", VERSION) for number in range(len(pythons))]
    for root, python in zip(roots, pythons, strict=True):
        environment(root, python)
    broker = start(config="".join(python_config(root, "run", prefix=root.name) for root in roots))
    for root, python in zip(roots, pythons, strict=True):
        for _ in range(3):
            (major, minor), prefix = answer(broker, f"{root.name}run")
            assert (python.endswith(f"python{major}.{minor}"), prefix) == (True, str(root / ".venv"))


def test_an_interpreter_is_named_by_its_folder_its_file_or_its_name(start, tmp_path):
    root = python_app(tmp_path / "app", VERSION)
    environment(tmp_path)
    link = tmp_path / "bin" / "other-python"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    for python, prefix in (
        (str(tmp_path / ".venv"), str(tmp_path / ".venv")),
        (str(tmp_path / ".venv" / "bin" / "python"), str(tmp_path / ".venv")),
        ("../.venv", str(tmp_path / ".venv")),
        ("other-python", None),
    ):
        broker = start(
            config=python_config(root, "run", python=python), env={"PATH": f"{link.parent}:{os.environ['PATH']}"}
        )
        found = answer(broker)
        assert prefix in (None, found[1]), python


def test_variables_that_change_pythons_path_do_no_harm(start, tmp_path):
    root = python_app(tmp_path / "app", "import other\ndef run(payload):\n    return other.VALUE\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "other.py").write_text("VALUE = 7\n")
    for variables in ({"PYTHONSAFEPATH": "1"}, {"PYTHONDONTWRITEBYTECODE": "1"}, {"PYTHONOPTIMIZE": "2"}):
        broker = start(config=python_config(root, "run"), env={"PYTHONPATH": str(tmp_path / "more"), **variables})
        assert [answer(broker) for _ in range(3)] == [7] * 3


def test_a_folder_that_is_gone_is_said_to_be_and_one_that_has_come_back_is_used(start, tmp_path):
    source = "import os\ndef run(payload):\n    return [os.getcwd(), open('data').read()]\n"
    root = python_app(tmp_path / "app", source)
    (root / "data").write_text("old")
    broker = start(config=python_config(root, "run"))
    assert answer(broker) == [str(root), "old"]
    root.rename(tmp_path / "away")
    gone = broker.call("run")
    assert gone["ok"] is False
    assert str(root) in gone["error"]
    python_app(root, source)
    (root / "data").write_text("new")
    assert answer(broker) == [str(root), "new"]


def test_a_thread_that_python_does_not_know_of_keeps_its_package_from_being_warm(start, tmp_path):
    root = python_app(tmp_path / "app", THREADS)
    (environment(root) / "native.py").write_text(NATIVE)
    broker = start(config=python_config(root, "run"))
    for _ in range(5):
        assert answer(broker) == [False, 2]
        time.sleep(0.05)


def test_threads_that_end_before_a_fork_are_no_harm(start, tmp_path):
    root = python_app(tmp_path / "app", THREADS)
    ending = "at = []\nos.register_at_fork(before=lambda: at or (at.append(end()),))\n"
    (environment(root) / "native.py").write_text(NATIVE.replace("    os.register_at_fork = None\n", "") + ending)
    broker = start(config=python_config(root, "run"))
    assert answer(broker) == [False, 2]
    broker.eventually(lambda: answer(broker) == [True, 1])


def test_what_is_heavy_to_import_is_imported_once(start, tmp_path):
    root = python_app(tmp_path / "app", "import heavy\ndef run(payload):\n    return heavy.TOTAL\n")
    packages = environment(root)
    (packages / "heavy").mkdir()
    for number in range(100):
        (packages / "heavy" / f"m{number}.py").write_text(f"VALUE = {number}\n" + "def f(x):\n    return x\n" * 100)
    lines = "".join(f"from . import m{number}\n" for number in range(100))
    (packages / "heavy" / "__init__.py").write_text(f"{lines}TOTAL = m1.VALUE + m99.VALUE\n")
    broker = start(config=python_config(root, "run"))

    def timed(function):
        begun = time.monotonic()
        function()
        return time.monotonic() - begun

    assert answer(broker) == 100
    time.sleep(0.5)
    warm = min(timed(lambda: answer(broker)) for _ in range(5))
    command = [root / ".venv" / "bin" / "python", "-c", "import tools.vec"]
    cold = min(timed(lambda: subprocess.run(command, cwd=root, check=True)) for _ in range(2))
    assert warm * 3 < cold, f"{warm * 1000:.1f} ms, Python alone {cold * 1000:.1f} ms"


def test_a_process_that_forks_answers_once(start, tmp_path):
    source = (
        "import os\ndef run(payload):\n    pid = os.fork()\n    if pid: os.waitpid(pid, 0)\n    return os.getpid()\n"
    )
    root = python_app(tmp_path / "app", source)
    broker = start(config=python_config(root, "run"))
    assert len({answer(broker) for _ in range(5)}) == 5


def test_a_daemon_that_a_call_leaves_behind_is_ended(start, tmp_path):
    source = "import subprocess\ndef run(payload):\n    return subprocess.Popen(['sleep', '600']).pid\n"
    far = "import os, time\ndef far(payload):\n    if os.fork() == 0:\n        os.setsid()\n"
    far += "        if os.fork() == 0:\n            open(payload['file'], 'w').write(str(os.getpid()))\n"
    far += "            time.sleep(600)\n        os._exit(0)\n"
    far += "    while not os.path.exists(payload['file']) or not open(payload['file']).read():\n"
    far += "        time.sleep(0.001)\n    return 1\n"
    root = python_app(tmp_path / "app", source + far)
    broker = start(config=python_config(root, "run", "far"))
    pid = answer(broker)
    assert answer(broker, "far", file=str(tmp_path / "pid")) == 1
    broker.eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    broker.eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    broker.eventually(lambda: not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text()}"))


def test_ended_processes_are_not_left_as_zombies(start, tmp_path):
    root = python_app(tmp_path / "app", "def run(payload):\n    return 1\n")
    broker = start(config=python_config(root, "run"))
    for _ in range(20):
        answer(broker)

    def states():
        (server,) = (one["pid"] for one in broker.status()["pools"][0]["processes"] if one["state"] == "fork server")
        return {one.status() for one in psutil.Process(server).children()}

    broker.eventually(lambda: psutil.STATUS_ZOMBIE not in states())
