"""What the toolhost's README tells a user to type works as it stands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from .talk import environment

README = Path(__file__).resolve().parents[2] / "toolhost" / "README.md"


def test_the_plugin_in_ten_lines_builds_and_runs(where: dict[str, Path], tmp_path: Path) -> None:
    text = README.read_text()
    source, commands = (re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[0] for language in ("cpp", "sh"))
    (tmp_path / "hello.cpp").write_text(source)
    (tmp_path / "toolhost").mkdir()
    (tmp_path / "toolhost/include").symlink_to(where["include"])
    path = {"PATH": f"{where['toolhost'].parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-euc", commands],
        cwd=tmp_path,
        env=environment(path),
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.count(b'"AID.HELLO.v1"') == 1
    assert done.stdout.count(rb'"output_json":"{\"hello\":[1,2]}"') == 2
    assert done.stderr == b""


def test_every_variable_of_help_is_in_the_readme(where: dict[str, Path]) -> None:
    text = subprocess.run([where["toolhost"], "--help"], capture_output=True, text=True, check=True).stdout
    variables = set(re.findall(r"MACHINA_[A-Z0-9_]+", text))
    assert variables
    assert all(f"`{variable}`" in README.read_text() for variable in variables)
