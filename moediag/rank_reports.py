"""How a test ended on each of its ranks: the plugin that writes it in a rank, and its reader."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from moediag.protocol import build, innermost_user, read_json, write_json
from moediag.rank_options import NOT_IN_RANKS


@dataclass(frozen=True)
class Said:
    """How a test ended on one rank."""

    outcome: str = "passed"
    """passed, skipped or failed."""
    text: str = ""
    line: str = ""
    """Where and how it failed."""
    reason: str = ""
    """Why it was skipped, or expected to fail."""
    expected: bool = False
    """It failed as its mark expects."""


class Rank:
    """Writes how the test ended on this rank into ``folder``."""

    _ORDER = ("passed", "skipped", "failed")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: Said | None = None
        self.process = os.getpid()

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        plugins = session.config.pluginmanager
        for name in NOT_IN_RANKS:
            if plugins.has_plugin(name):
                plugins.unregister(name=name)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, None]:
        # Hides the recorder's frames in the traceback of a test.
        for name in [name for name in sys.modules if name.startswith("moediag.")]:
            sys.modules[name].__dict__["__tracebackhide__"] = True
        report = (yield).get_result()
        # The session, which has the same mark, judges a strict xfail that passes.
        if str(report.longrepr).startswith("[XPASS(strict)]"):
            report.outcome, report.longrepr = "passed", None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        if self.said and self._ORDER.index(report.outcome) < self._ORDER.index(self.said.outcome):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        expected = report.skipped and hasattr(report, "wasxfail")
        reason = report.wasxfail if expected else reason
        self.said = Said(report.outcome, report.longreprtext, _last_line(report), reason, expected)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.said = Said("failed", report.longreprtext)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Also of ``pytest.exit()``."""
        place = _place(excinfo)
        self.said = Said("failed", place, place)

    def pytest_sessionfinish(self) -> None:
        if os.getpid() != self.process:
            return  # a child that the test forked runs to the end of pytest, too
        if self.said is not None:
            write_json(self.folder / f"rank-{os.getenv('RANK', '0')}.json", asdict(self.said))


def _last_line(report: pytest.TestReport) -> str:
    """Where and how a test failed, as "test_it.py:7: AssertionError: assert 2 == 3": the innermost
    line that is not of a library."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return ""
    message = (crash.message or "").partition("\n")[0]
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", ())
    places = [at for entry in entries if (at := getattr(entry, "reprfileloc", None)) is not None]
    own = innermost_user([at.path for at in reversed(places)])
    at = crash if own is None else places[-1 - own]
    return f"{Path(at.path).name}:{at.lineno}: {message}"


def _place(excinfo: pytest.ExceptionInfo[BaseException]) -> str:
    """Where and how a test was interrupted, as :func:`_last_line`."""
    entries = list(reversed(excinfo.traceback))
    own = innermost_user([str(entry.path) for entry in entries])
    at = None if own is None else entries[own]
    where = f"{Path(at.path).name}:{at.lineno + 1}: " if at is not None else ""
    return where + excinfo.exconly().partition("\n")[0]


def read(reports: Path) -> Iterator[tuple[int, Said]]:
    """Each rank that wrote how its test ended, and what it wrote."""
    for path in sorted(reports.glob("rank-*.json")):
        with suppress(OSError, ValueError):  # the rank was killed while it wrote
            yield int(path.stem.partition("-")[2]), build(Said, read_json(path))
