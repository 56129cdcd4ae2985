"""What `pip install` gives: an sdist builds the wheel, and the wheel has everything in it."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

STATIC = ("faces/http/static/index.html", "faces/http/static/page.css", "faces/http/static/page.js")
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(280)
def test_an_sdist_builds_a_wheel_with_the_module_the_toolhost_and_the_plugins(tmp_path):
    sdist = [sys.executable, "-c", "import scikit_build_core.build as b, sys; print(b.build_sdist(sys.argv[1]))"]
    name = subprocess.run([*sdist, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()[
        -1
    ]
    with tarfile.open(tmp_path / name) as archive:
        members = {member.split("/", 1)[-1] for member in archive.getnames()}
    assert {"native/wire.h", "toolhost/CMakeLists.txt", "broker/cli/serve.py", "README.md", "LICENSE"} <= members
    assert not [member for member in members if member.startswith((".venv", "build/", "dist/", ".git/"))]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",  # `make` has installed this one with isolation
        "--config-settings=cmake.build-type=Debug",  # which is compiled sooner
        "--wheel-dir",
        str(tmp_path),
        str(tmp_path / name),
    ]
    subprocess.run(pip, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("broker/_native") and name.endswith(".so") for name in names)
    for part in (
        "plugins/demo_plugin.so",
        "plugins/demo_plugin.tools.json",
        "plugins/fault_plugin.so",
        "plugins/fault_toolhost",
        "cli/serve.py",
        *STATIC,
    ):
        assert f"broker/{part}" in names, part
    assert "broker/include/machina/plugin_api.h" in names
    assert any(name.endswith("/scripts/machina_toolhost") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "native/"))]
