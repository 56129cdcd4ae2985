"""Says in one sentence each what this machine lacks to build the broker, and how to get it."""

import shutil
import sys
import sysconfig
from pathlib import Path


def problems() -> list[str]:
    found = []
    if sys.version_info < (3, 11):  # noqa: UP036 (an older Python may be the one that runs this)
        here = ".".join(map(str, sys.version_info[:3]))
        found.append(f"Python 3.11 or newer is needed, and {sys.executable} is {here}: run `make PYTHON=python3.12 …`")
    if not sys.platform.startswith("linux"):
        found.append(f"Linux is needed (pidfd, prctl), and this is {sys.platform}")
    for module, package in (("venv", "python3-venv"), ("ensurepip", "python3-venv")):
        try:
            __import__(module)
        except ImportError:
            found.append(f"Python's module {module} is missing (Debian: apt install {package})")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        found.append("Python's headers are missing (Debian: apt install python3-dev)")
    for compiler, alternatives in (("C", ("cc", "gcc", "clang")), ("C++", ("c++", "g++", "clang++"))):
        if not any(map(shutil.which, alternatives)):
            found.append(f"a {compiler} compiler is missing (Debian: apt install build-essential)")
    return found


if __name__ == "__main__":
    if lacking := problems():
        sys.exit("cannot build here:\n" + "\n".join(f"  - {line}" for line in lacking))
