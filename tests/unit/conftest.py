"""Unit tests set the terminal's properties themselves."""

from __future__ import annotations

import os

import pytest

# The expert kernels run in Triton's interpreter; a test of something else may import triton first.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """CI sets some of these; a test that wants one sets it itself."""
    for name in ("NO_COLOR", "FORCE_COLOR", "CI", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
