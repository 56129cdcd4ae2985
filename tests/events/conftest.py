from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.event_tools import Tools


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)
