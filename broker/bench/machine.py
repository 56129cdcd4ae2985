"""What kind of machine this is, for whoever reads the figures elsewhere. No host names, no paths."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

from broker import __version__

LIBRARIES = ("msgspec", "uvloop")


class Machine(Struct, kw_only=True):
    cpu: str
    cores: int  # that this process may use
    memory_mb: int
    virtual: bool  # another machine's guest: waking a processor takes longer there
    load: float  # of the last minute, before the run
    kernel: str
    python: str
    versions: dict[str, str]

    def words(self) -> str:
        guest = " (virtual)" if self.virtual else ""
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return f"{self.cpu}, {cores}{guest}, {self.memory_mb / 1024:.0f} GB, {self.kernel}, {self.python}"


def describe() -> Machine:
    facts = _cpu()
    return Machine(
        cpu=facts.get("model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_mb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        virtual="hypervisor" in facts.get("flags", "").split(),
        load=round(os.getloadavg()[0], 2),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        versions={"toolhost-broker": __version__, **{name: _version(name) for name in LIBRARIES}},
    )


def _cpu() -> dict[str, str]:
    """The first processor's facts."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): text.strip() for name, _, text in pairs}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "?"
