"""The OpenAPI document is valid, and true: schemathesis makes requests of it, and judges the answers by it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# AutoSage answers a wrong method with 404 (facts and recorded exchanges); schemathesis wants 405.
COMMAND = ("run", "--exclude-checks", "unsupported_method", "--max-examples", "15", "--generation-deterministic")


def test_the_document_is_there_in_both_forms(web):
    document = web.get("/openapi.json").json
    assert document["openapi"].startswith("3.")
    assert {"/v1/tools", "/v1/tools/execute", "/v1/jobs", "/tools"} <= set(document["paths"])
    assert "AID.DEMO.ECHO.v1" in document["components"]["schemas"]["NewJob"]["properties"]["tool_name"]["enum"]
    yaml = web.get("/openapi.yaml")
    assert yaml.headers["content-type"] == "application/yaml"
    assert yaml.json == document


@pytest.mark.timeout(180)
def test_what_the_document_says_is_so(start_web, where, tmp_path):
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program, "the dev extra brings schemathesis"
    _, web = start_web("--plugin", where["demo_plugin"])
    found = subprocess.run(
        [program, *COMMAND, f"http://{web.host}:{web.port}/openapi.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr
    assert "Tested: " in found.stdout
