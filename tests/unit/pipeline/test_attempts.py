"""Which attempts of a job that restarts keep their evidence, and what is told of the others."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moediag.cli import app
from moediag.errors import EvidenceError, ExitCode
from moediag.evidence.launch_record import LaunchRecord
from moediag.launch.settings import LaunchOptions
from moediag.pipeline import attempts, examine, watch
from moediag.pipeline.attempts import FAILED, FIRST, NEWEST, REMOVED_FILE, Attempts
from moediag.report.page import page_of
from moediag.result import TrialResult, read_result
from tests.unit.trial_results import trial_result

WATCHED = Path(__file__).parents[2] / "samples" / "watched"
CRASH = "crash"


class Restarts:
    """A run directory whose attempts end one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.attempts = Attempts(folder)
        self.count = 0

    def end(self, verdict: str = CRASH, culprit: int = 1, **changes: object) -> TrialResult:
        name = f"attempt-{self.count}"
        # Each start of a job has a token of its own.
        shutil.copytree(
            WATCHED / "attempt-0", self.folder / name, ignore=shutil.ignore_patterns("*.job.json")
        )
        found = trial_result(
            name, verdict=verdict, culprits=(culprit,), evidence=name, expected="", **changes
        )
        self.attempts.add(self.count, found, LaunchRecord(10.0, 12.5))
        self.count += 1
        return found

    @property
    def left(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self.folder.glob("attempt-*"))


@pytest.fixture
def restarts(tmp_path: Path) -> Restarts:
    return Restarts(tmp_path)


def test_the_first_and_the_newest_are_kept_and_each_other_one_has_a_line(
    restarts: Restarts,
) -> None:
    for _ in range(FIRST + NEWEST):
        restarts.end()
    assert restarts.left == list(range(FIRST + NEWEST))
    assert restarts.attempts.removed == attempts.removed(restarts.folder) == ""
    restarts.end(cause="x" * 5000)
    restarts.end("clean")
    assert restarts.left == [*range(FIRST), *range(FIRST + 2, FIRST + NEWEST + 2)]
    assert [one.evidence for one in restarts.attempts.results] == [
        f"attempt-{number}" for number in restarts.left
    ]
    lines = [json.loads(line) for line in (restarts.folder / REMOVED_FILE).read_text().splitlines()]
    assert [line["attempt"] for line in lines] == [FIRST, FIRST + 1]
    assert (lines[0]["started"], lines[0]["ended"], lines[0]["verdict"], lines[0]["culprits"]) == (
        10.0, 12.5, CRASH, [1],
    )  # fmt: skip
    said = f"the evidence of 2 attempts was removed (2 crash), {REMOVED_FILE} has a line for each"
    assert restarts.attempts.removed == attempts.removed(restarts.folder) == said


def test_the_first_failure_of_each_kind_is_kept(restarts: Restarts) -> None:
    for _ in range(FIRST):
        restarts.end()
    restarts.end("clean")
    other = restarts.end(culprit=2)
    hang = restarts.end("hang", culprit=2)
    for _ in range(3 * NEWEST):
        restarts.end()
        restarts.end(culprit=2)
    kept = [one.evidence for one in restarts.attempts.results]
    assert kept[FIRST:-NEWEST] == [other.evidence, hang.evidence]
    assert "1 clean" in restarts.attempts.removed


def test_failures_that_never_repeat_do_not_fill_the_disk(restarts: Restarts) -> None:
    for number in range(FIRST + FAILED + NEWEST + 5):
        restarts.end(culprit=number)
    assert len(restarts.left) == FIRST + FAILED + NEWEST
    assert restarts.left == [*range(FIRST + FAILED), *range(FIRST + FAILED + 5, restarts.count)]


def test_what_is_left_is_diagnosed_in_order_and_the_page_tells_the_rest(
    restarts: Restarts,
) -> None:
    for _ in range(FIRST + NEWEST + 3):
        restarts.end()
    found = examine.examine([restarts.folder]).result
    assert [trial.evidence for trial in found.trials] == [
        str(restarts.folder / f"attempt-{number}") for number in restarts.left
    ]
    assert "3 attempts was removed" in page_of(found).conclusion[-1]


def test_a_watcher_that_is_killed_while_it_removes_leaves_a_run_that_can_be_read(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for _ in range(FIRST + NEWEST):
        restarts.end()
    monkeypatch.setattr(attempts, "shutil", SimpleNamespace(rmtree=killed))
    with pytest.raises(KeyboardInterrupt):
        restarts.end()
    assert (restarts.folder / f"attempt-{FIRST}").is_dir()
    with (restarts.folder / REMOVED_FILE).open("a") as file:
        file.write('[]\n{"attempt": 1e999, "verdict": "crash"}\n{"attempt": 5, "ver')
    found = examine.examine([restarts.folder]).result
    assert len(found.trials) == FIRST + NEWEST
    assert found.removed.startswith("the evidence of 1 attempt was removed (1 crash)")


def test_an_attempt_that_is_removed_while_it_is_read_is_left_out(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts.end()
    restarts.end()
    read = examine._examined

    def removed(*folders: Path) -> object:
        shutil.rmtree(restarts.folder / "attempt-0", ignore_errors=True)
        return read(*folders)

    monkeypatch.setattr(examine, "_examined", removed)
    found = examine.examine([restarts.folder]).result
    assert [Path(trial.evidence).name for trial in found.trials] == ["attempt-1"]
    (restarts.folder / "attempt-1" / "trial.json").write_text("{")
    with pytest.raises(EvidenceError, match="cannot be read"):
        examine.examine([restarts.folder])


RESTARTING = """
import os, pathlib, shutil, sys
folder = pathlib.Path(os.environ["MOEDIAG_WATCH"])
for number in range(int(sys.argv[2])):
    shutil.copytree(sys.argv[1], folder / f"attempt-{number}", dirs_exist_ok=True)
    last = folder / f"attempt-{number - 1}" / "launch.json"
    while number and not last.exists():  # the watcher has not followed yet
        pass
"""


def test_a_job_that_restarts_often_keeps_a_bounded_run(tmp_path: Path) -> None:
    sample = tmp_path / "sample"
    shutil.copytree(WATCHED / "attempt-0", sample)
    for name in ("launch.json", "launch-end.json"):
        (sample / name).unlink()
    out, count = tmp_path / "out", FIRST + NEWEST + 6
    options = watch.WatchOptions(out=out, launch=LaunchOptions(poll=0.01))
    command = [sys.executable, "-c", RESTARTING, str(sample), str(count)]
    done = watch.watch(command, options, lambda *_: None)
    assert len(list(out.glob("attempt-*"))) == len(done.result.trials) < count
    assert "attempts was removed" in done.result.removed
    assert read_result(out) == done.result
    assert examine.examine([out]).result.removed == done.result.removed


def test_the_command_holds_no_result_of_an_earlier_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may restart thousands of times."""

    def held() -> int:
        gc.collect()
        return sum(type(one) is TrialResult for one in gc.get_objects())

    def restarts(_: object, __: object, tell: watch.OnResult, *___: object) -> watch.Watched:
        before = held()
        for number in range(8):
            verdict = CRASH if number % 2 else "clean"
            tell(trial_result(f"attempt-{number}", verdict=verdict), tmp_path)
        assert held() - before <= 1
        last = watch.of_job("job", [trial_result("attempt-8", verdict=CRASH)])
        return watch.Watched(last, tmp_path, 1)

    monkeypatch.setattr(watch, "watch", restarts)
    assert app.main(["watch", "--", "train.py"]) == ExitCode.FAILURE_FOUND
