from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moediag.protocol import ENV_LAWS


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 0 of one, in a user's job whose laws are checked at every step."""
    from moediag.recorder import install

    monkeypatch.setenv(ENV_LAWS, "0")
    made = install(str(tmp_path), 0, 1, of_job=True)
    yield made
    made.uninstall()
