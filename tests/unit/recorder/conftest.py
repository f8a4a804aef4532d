from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Any]:
    """Rank 0 of one, in a scenario."""
    from moediag.recorder import install

    made = install(str(tmp_path), 0, 1)
    yield made
    made.uninstall()
