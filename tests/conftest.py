"""The default action of the signals that tests send, and which files share a worker."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_USES = re.compile("command: Command|shared_hosts")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile`` one worker runs all files that use the session's hosts
    (e2e/conftest.py), so that the libraries of each stack are imported once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    files = (Path(__file__).parent / "e2e").glob("*.py")
    hosts = {f"tests/e2e/{one.name}" for one in files if _USES.search(one.read_text("utf-8"))}

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "hosts" if file in hosts else file

    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def signals_as_in_a_terminal() -> Iterator[None]:
    """``nohup`` and background jobs of scripts ignore SIGINT or SIGHUP, and every process that a
    test starts would inherit that."""
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {sig: signal.signal(sig, handler) for sig, handler in wanted.items()}
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)
