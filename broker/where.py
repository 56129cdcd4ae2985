"""Where the installed parts are: the toolhost beside `broker`, the plugins beside the C module."""

import os
import sys
import sysconfig
from pathlib import Path

from broker import _native


def _package() -> Path:
    file = _native.__file__
    assert file is not None
    return Path(file).parent


def toolhost() -> str:
    """Our `machina_toolhost`: next to the `broker` that runs, else where scripts are installed."""
    scripts = sysconfig.get_path("scripts")
    for directory in (Path(sys.argv[0]).resolve().parent, Path(sys.executable).parent, Path(scripts)):
        candidate = directory / "machina_toolhost"
        if os.access(candidate, os.X_OK):
            return str(candidate)
    return "machina_toolhost"


def demo_plugin() -> str:
    return str(_package() / "plugins" / "demo_plugin.so")


def fault_plugin() -> str:
    return str(_package() / "plugins" / "fault_plugin.so")


def fault_toolhost() -> str:
    return str(_package() / "plugins" / "fault_toolhost")


def include() -> str:
    """The plugin interface's headers."""
    return str(_package() / "include")
