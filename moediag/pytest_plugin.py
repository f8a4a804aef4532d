"""A pytest plugin: ``@pytest.mark.ranks(4)`` runs a test on four ranks under `moediag watch`.

Each rank is a process with a pytest of its own that runs only this test, fixtures included. A hang,
a crash or, with ``laws=True``, a broken law fails the test with moediag's page; the run directory
of a failed test is kept. pytest finds the plugin where moediag is installed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NAME = "moediag.pytest_plugin"
_REPORTS = "MOEDIAG_RANK_REPORTS"  # set in the ranks: the folder for what their tests said
_LAST_WORDS = 30.0  # seconds that `moediag watch` has for its page after SIGTERM
_ABOUT = (
    "ranks(count, *, laws=False, timeout=300): run the test on `count` ranks under `moediag "
    "watch`; `laws` checks what must hold in any healthy job; the ranks are ended after `timeout` "
    "seconds"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("moediag").addoption(
        "--ranks-out",
        metavar="DIR",
        default="moediag-runs",
        help="keep the run directories of failed tests on several ranks in DIR",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _ABOUT)
    if _REPORTS in os.environ:
        config.pluginmanager.register(_Rank(), "moediag-rank")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    marker = item.get_closest_marker("ranks")
    if marker is None or _REPORTS in os.environ:
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    call = pytest.CallInfo.from_call(
        lambda: _judge(item, _Asked.of(marker)),
        when="call",
        reraise=(KeyboardInterrupt, pytest.exit.Exception),
    )
    hook.pytest_runtest_logreport(report=hook.pytest_runtest_makereport(item=item, call=call))
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


# ------------------------------------------------------------------------ in a rank


class _Rank:
    """Writes how the test ended on this rank."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        order = ("passed", "skipped", "failed")
        if report.passed and report.when != "call":
            return
        if order.index(report.outcome) < order.index(self.said.get("outcome", "passed")):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        self.said = {
            "outcome": report.outcome,
            "text": report.longreprtext,
            "reason": getattr(report, "wasxfail", reason),
            "expected": "yes" if hasattr(report, "wasxfail") else "",
        }

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.said = {"outcome": "failed", "text": report.longreprtext}

    def pytest_sessionfinish(self) -> None:
        path = Path(os.environ[_REPORTS]) / f"rank-{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps(self.said), encoding="utf-8")


# ------------------------------------------------------------------------ beside the ranks


@dataclass(frozen=True)
class _Asked:
    """The marker's arguments."""

    count: int
    laws: bool = False
    timeout: float = 300.0

    @classmethod
    def of(cls, marker: pytest.Mark) -> _Asked:
        try:
            asked = cls(*marker.args, **marker.kwargs)
        except TypeError:
            pytest.fail(f"a mark has wrong arguments; it is {_ABOUT}", pytrace=False)
        if not isinstance(asked.count, int) or asked.count < 1:
            pytest.fail(f"ranks({asked.count!r}): the number of ranks is 1 or more", pytrace=False)
        return asked


def _judge(item: pytest.Item, asked: _Asked) -> None:
    """Runs the test; raises what pytest calls failed, skipped or xfailed."""
    out = _folder(item)
    with tempfile.TemporaryDirectory() as reports:
        page, ended = _watched(item, asked, out, reports)
        said = dict(_read(Path(reports)))
    verdict = _verdict(out)
    failed = {rank: one["text"] for rank, one in said.items() if one["outcome"] == "failed"}
    skipped = _all_skipped(said.values()) if len(said) == asked.count else None
    # A test without collectives or without torch is inconclusive for moediag.
    good = verdict == "clean" or (verdict == "inconclusive" and (skipped or not asked.laws))
    if good and not ended and not failed and len(said) == asked.count:
        shutil.rmtree(out, ignore_errors=True)
        if skipped:
            _skip(skipped)
        return
    pytest.fail("\n".join(_explain(asked, verdict, failed, page, ended, out)), pytrace=False)


def _folder(item: pytest.Item) -> Path:
    name = re.sub(r"\W+", "-", item.name).strip("-")[:60]
    base = item.config.rootpath / item.config.getoption("--ranks-out")
    first = base / f"{time.strftime('%Y%m%d-%H%M%S')}-test-{name}"
    return next(p for n in range(1_000_000) if not (p := Path(f"{first}{n or ''}")).exists())


def _watched(item: pytest.Item, asked: _Asked, out: Path, reports: str) -> tuple[str, str]:
    """Returns the page, and why the ranks were ended, "" if they ended by themselves."""
    config = item.config
    line = [sys.executable, "-m", "moediag", "watch", "--no-color", "--on-hang", "abort"]
    line += ["--out", str(out), *(["--laws"] if asked.laws else []), "--"]
    line += [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node", str(asked.count), "-m", "pytest", "-q", "-p", NAME]
    line += ["-p", "no:cacheprovider", "-o", "addopts=", f"--rootdir={config.rootpath}"]
    line += [f"--import-mode={config.getoption('importmode')}"]
    line += ["-c", str(config.inipath)] if config.inipath is not None else []
    for plugin in config.getoption("plugins"):
        line += ["-p", plugin]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {_REPORTS: reports}
    process = subprocess.Popen(
        [*line, item.nodeid], cwd=config.rootpath, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    ended = ""
    try:
        page, progress = process.communicate(timeout=asked.timeout)
    except subprocess.TimeoutExpired:
        ended = f"The ranks were ended after {asked.timeout:g} seconds."
        page, progress = _end(process)
    except BaseException:
        _end(process)
        raise
    printed, page = _parted(page)
    item.add_report_section("call", "stdout of the ranks", printed)
    item.add_report_section("call", "stderr of the ranks", progress)
    return page, ended


def _parted(text: str) -> tuple[str, str]:
    """What the ranks printed, and the last page."""
    lines = text.splitlines(keepends=True)
    begins = max(
        (at for at, line in enumerate(lines) if " · watched · " in line), default=len(lines)
    )
    return "".join(lines[:begins]), "".join(lines[begins:])


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.terminate()
    try:
        return process.communicate(timeout=_LAST_WORDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def _read(reports: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    for path in sorted(reports.glob("rank-*.json")):
        said = json.loads(path.read_text(encoding="utf-8"))
        if said:
            yield int(path.stem.partition("-")[2]), said


def _verdict(out: Path) -> str:
    """Of the last trial; "" if there is no result."""
    try:
        result: Any = json.loads((out / "result.json").read_text(encoding="utf-8"))
        return str(result["trials"][-1]["verdict"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _all_skipped(said: Iterable[Mapping[str, str]]) -> Mapping[str, str] | None:
    """What the first rank said, if the test was skipped or failed as expected on all ranks."""
    ranks = list(said)
    return ranks[0] if all(one["outcome"] == "skipped" for one in ranks) else None


def _skip(said: Mapping[str, str]) -> None:
    if said["expected"]:
        pytest.xfail(said["reason"])
    pytest.skip(said["reason"].removeprefix("Skipped: "))


def _explain(
    asked: _Asked, verdict: str, failed: Mapping[int, str], page: str, ended: str, out: Path
) -> Iterator[str]:
    """The failure's text. A rank's own assertion says more than the page of the job's end."""
    if ended:
        yield ended
    for rank, text in sorted(failed.items()):
        yield f"rank {rank} of {asked.count}:\n{text}\n"
    if not failed or verdict not in ("crash", "clean"):
        yield page or "moediag wrote no page; the ranks' output says why."
    yield f"The run directory is {out}."
