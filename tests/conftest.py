"""Restores the default action of the signals that tests send."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def signals_as_in_a_terminal() -> Iterator[None]:
    """``nohup`` and background jobs of scripts ignore SIGINT or SIGHUP, and every process that a
    test starts would inherit that."""
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {sig: signal.signal(sig, handler) for sig, handler in wanted.items()}
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)
