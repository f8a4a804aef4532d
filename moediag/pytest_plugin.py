"""A pytest plugin: ``@pytest.mark.ranks(4)`` runs a test on four ranks under `moediag watch`.

Each rank is a process with a pytest of its own that runs only this test, fixtures included. In the
session that the user started, such a test takes part in pytest's own protocol as any other, except
that its body starts the ranks and that its fixtures are set up in the ranks only. A hang, a crash
or, with ``laws=True``, a broken law fails the test with moediag's page; the run directory of a
failed test is kept. pytest finds the plugin where moediag is installed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NAME = "moediag.pytest_plugin"
WATCH = (sys.executable, "-m", "moediag", "watch")
_REPORTS = "MOEDIAG_RANK_REPORTS"  # set in the ranks: the folder for what their tests said
_LAST_WORDS = 30.0  # seconds that `moediag watch` has for its page after SIGTERM
_SIDES = 3  # of which the first line has the place
_ABOUT = (
    "ranks(count, *, laws=False, timeout=300): run the test on `count` ranks under `moediag "
    "watch`; `laws` checks what must hold in any healthy job; the ranks are ended after `timeout` "
    "seconds"
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.getgroup("moediag").addoption(
        "--ranks-out",
        metavar="DIR",
        default="moediag-runs",
        help="keep the run directories of failed tests on several ranks in DIR",
    )
    if _REPORTS in os.environ:
        from moediag.rank_reports import Rank

        pluginmanager.register(Rank(Path(os.environ[_REPORTS])), "moediag-rank")
    else:
        pluginmanager.register(_Session(parser), "moediag-session")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _ABOUT)


class _Session:
    """Starts the ranks where pytest would run the body of a test that has the mark."""

    def __init__(self, parser: pytest.Parser) -> None:
        self.parser = parser

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Replaces what the item does, not the protocol: skips, reruns, timeouts, reports and the
        fixtures of other tests stay those of pytest and its plugins."""
        marker = item.get_closest_marker("ranks")
        if marker is not None:
            item.setup = item.teardown = lambda: None  # type: ignore[method-assign]
            item.runtest = (  # type: ignore[method-assign]
                lambda: _judge(item, _Asked.of(marker), self.parser)
            )


@dataclass(frozen=True)
class _Asked:
    """The marker's arguments."""

    count: int
    laws: bool = False
    timeout: float = 300.0

    @classmethod
    def of(cls, marker: pytest.Mark) -> _Asked:
        from moediag import arguments
        from moediag.errors import UsageError

        try:
            asked = cls(*marker.args, **marker.kwargs)
            arguments.whole("count", asked.count, 1)
            arguments.flag("laws", asked.laws)
            arguments.seconds("timeout", asked.timeout)
        except TypeError:
            raise _failed(f"a mark has wrong arguments; it is {_ABOUT}") from None
        except UsageError as error:
            raise _failed(f"mark ranks: {error.message}. {error.help_text}") from None
        return asked


def _judge(item: pytest.Item, asked: _Asked, parser: pytest.Parser) -> None:
    """Runs the test; raises what pytest calls failed, skipped or xfailed."""
    from moediag import rank_reports

    out = _folder(item)
    with tempfile.TemporaryDirectory() as reports:
        page, ended = _watched(item, asked, parser, out, reports)
        said = dict(rank_reports.read(Path(reports)))
    trial = _trial(out)
    verdict = trial.get("verdict", "")
    failed = {rank: one for rank, one in said.items() if one.outcome == "failed"}
    expected = [one for one in said.values() if one.expected]
    silent = [rank for rank in range(asked.count) if rank not in said]
    skipped = not silent and all(one.outcome == "skipped" for one in said.values())
    # A test without collectives or without torch is inconclusive for moediag.
    good = verdict == "clean" or (verdict == "inconclusive" and (skipped or not asked.laws))
    if expected and not failed and not ended:
        shutil.rmtree(out, ignore_errors=True)
        pytest.xfail(expected[0].reason)
    if good and not ended and not failed and not silent:
        shutil.rmtree(out, ignore_errors=True)
        if skipped:
            pytest.skip(said[0].reason.removeprefix("Skipped: "))
        return
    text = [_first_line(trial, failed, silent, ended), ""]
    # A rank's own assertion says more than the page of the end of its job.
    if verdict not in ("crash", "clean") or set(trial["culprits"]) - set(failed) or not failed:
        text.append(page or trial.get("cause", "") or "The output of the ranks says why.")
    for rank, one in sorted(failed.items()):
        text.append(f"rank {rank} of {asked.count}:\n{one.text}\n")
    text.append(f"The run directory is {out}.")
    raise _failed("\n".join(text))


def _failed(text: str) -> BaseException:
    """What fails the test with ``text`` alone."""
    return pytest.fail.Exception(text, pytrace=False)


def _first_line(
    trial: Mapping[str, Any], failed: Mapping[int, Any], silent: list[int], ended: str
) -> str:
    """Who is at fault, where and how: dashboards and pytest's summary show one line."""
    culprits, verdict = trial.get("culprits", []), trial.get("verdict", "")
    # Where ranks disagree, an error may be that of a rank whose peer has gone.
    own = verdict in ("", "clean", "crash", "inconclusive")
    first = next((rank for rank in culprits or sorted(failed) if rank in failed), None)
    if own and first is not None:
        return f"rank {first}: {failed[first].line or 'failed'}"
    if verdict not in ("", "clean", "inconclusive"):
        who = _who(culprits, trial.get("places", ()))
        return f"{who}{': ' if who else ''}{verdict}. {trial.get('cause', '')}"
    if ended:
        who = _who([], trial.get("places", ()))
        return f"{who}: {ended} {trial.get('cause', '')}" if who else ended
    if silent:
        return f"{_ranks(silent)}: ended before its test did, without an error"
    return trial.get("cause", "") or "moediag reached no verdict"


def _who(culprits: list[int], places: Sequence[Mapping[str, Any]]) -> str:
    """The culprits and their line; without culprits, each side's ranks and their line."""
    known = [one for one in places if one["line"] and (not culprits or one["ranks"] == culprits)]
    if culprits and len({one["line"] for one in known}) != 1:
        return _ranks(culprits)
    if culprits:
        return _at(known[0])
    told = [one for one in places if one["line"] or one.get("what")] if known else []
    # One side alone would read as the one at fault.
    alone = len(told) == 1 < len(places)
    return "" if alone else ", ".join(map(_at, told[:_SIDES]))


def _at(place: Mapping[str, Any]) -> str:
    line = f"at {place['line']}" if place["line"] else place["what"]
    return f"{_ranks(place['ranks'])} {line}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _folder(item: pytest.Item) -> Path:
    """Makes the run directory, so that no other worker of pytest-xdist takes it."""
    name = re.sub(r"\W+", "-", item.name).strip("-")[:60]
    base: Path = item.config.rootpath / item.config.getoption("--ranks-out")
    first = f"{time.strftime('%Y%m%d-%H%M%S')}-test-{name}"
    for number in itertools.count():
        folder = base / f"{first}{number or ''}"
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise _failed(f"--ranks-out {base}: {error.strerror}; name another one") from None
    return folder


def _watched(
    item: pytest.Item, asked: _Asked, parser: pytest.Parser, out: Path, reports: str
) -> tuple[str, str]:
    """Returns the page, and why the ranks were ended, "" if they ended by themselves."""
    from moediag import rank_options
    from moediag.launch.watched import end_with_us  # then `moediag watch` ends the ranks

    config = item.config
    line = [*WATCH, "--no-color", "--on-hang", "abort"]
    line += ["--out", str(out), *(["--laws"] if asked.laws else []), "--"]
    line += [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node", str(asked.count), "-m", "pytest", "-q", "--color=no", "-p", NAME]
    line += rank_options.options(config, parser)
    file, _, rest = item.nodeid.partition("::")
    process = subprocess.Popen(
        [*line, f"{config.rootpath / file}::{rest}"], cwd=config.invocation_params.dir,
        env=_environment(reports), stdin=subprocess.DEVNULL, preexec_fn=end_with_us(),
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
    if not _trial(out) and (errors := re.findall(r"^error: (.+)", progress, re.MULTILINE)):
        ended = f"moediag watch: {errors[-1]}"
    printed, page = _parted(page)
    item.add_report_section("call", "stdout of the ranks", printed)
    item.add_report_section("call", "stderr of the ranks", progress)
    return page, ended


def _environment(reports: str) -> dict[str, str]:
    of_session = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_VERSION", "PYTEST_XDIST_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(of_session)}
    return {**kept, _REPORTS: reports}


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


def _trial(out: Path) -> Mapping[str, Any]:
    """The last trial of the run; empty if there is no result."""
    try:
        result: Any = json.loads((out / "result.json").read_text(encoding="utf-8"))
        return dict(result["trials"][-1])
    except (OSError, ValueError, LookupError, TypeError):
        return {}
