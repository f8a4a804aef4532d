"""`moediag resume` on a program with one fault each; the runs are real, see
``tests/victims/resume_runs.py``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moediag.diagnosis.numbers import resumed_run
from moediag.pipeline.recorded_runs import Recording, Runs
from moediag.pipeline.resumed_states import compared
from moediag.protocol import recorded_state as words
from moediag.result import Verdict
from tests.victims import resumes

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
# `make wide` runs the others.
EVERY_TIME = ("moments-dropped", "sampler-restarted", "experts-permuted", "read-twice")
# Fault -> kind, reason, and the first name or the line that the page must have.
TRUTH = {
    "moments-dropped": (words.STATE, words.NOT_SAVED, "exp_avg of up"),
    "moments-not-loaded": (words.STATE, words.NOT_PUT, "exp_avg of up"),
    "moments-invented": (words.STATE, words.INVENTED, "exp_avg of fixed.weight"),
    "moments-swapped": (words.STATE, words.RESET, "exp_avg of up"),
    "count-reset": (words.COUNT, words.RESET, "0 instead of 3"),
    "scheduler-ahead": (words.SCHEDULER, words.RESET, "4 instead of 3"),
    "scheduler-dropped": (words.SCHEDULER, words.NOT_SAVED, "last_epoch of StepLR"),
    "sampler-restarted": (words.BATCH, words.RESTARTED, "on those of step 1"),
    "generator-reset": (words.GENERATOR, words.RESET, "torch"),
    "ema-forgotten": (words.COPY, words.NOT_PUT, "router.weight"),
    "scaler-forgotten": (words.SCALER, words.NOT_PUT, "64 instead of 128"),
    "experts-permuted": (words.PARAMETER, words.MOVED, "row 0 is row 1 of the save"),
    "frozen-lost": (words.FROZEN, "", "trained instead of frozen"),
    "main-lost": (words.PARAMETER, words.NOT_SAVED, "router.weight"),
    "buffer-dropped": (words.BUFFER, words.NOT_SAVED, "seen"),
    "read-twice": (words.PARAMETER, words.FROM_RANK, "rank 0 held"),
    "counter-lost": (resumed_run.OUTSIDE, "", "something else that it depends on"),
}


def record(folder: Path, *faults: str) -> None:
    command = [sys.executable, "-m", "tests.victims.resume_runs", str(folder), *faults]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    record(folder, "healthy", *EVERY_TIME)
    return folder


def runs(folder: Path, fault: str, again: str = "again") -> Runs:
    read = (Recording.read(folder / fault / one) for one in ("interrupted", "resumed"))
    controls = (Recording.read(folder / one) for one in ("straight", again))
    return Runs(*read, *controls, after=resumes.SAVE_AT)


def test_the_truth_of_every_fault_is_known() -> None:
    assert set(TRUTH) == set(resumes.FAULTS)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=() if f in EVERY_TIME else pytest.mark.wide) for f in TRUTH],
)
def test_what_was_lost_is_found_with_its_reason(folder: Path, fault: str) -> None:
    if fault not in EVERY_TIME:
        record(folder, fault)
    said = resumed_run.said(compared(runs(folder, fault)))
    kind, why, words_of_page = TRUTH[fault]
    assert (said.verdict, said.pattern) == (Verdict.RESUME_DRIFT, f"{kind} {why}".strip())
    assert words_of_page in said.text
    if why == words.RESET:
        assert "resumes.py:" in said.text


def test_a_program_that_restores_everything_is_clean(folder: Path) -> None:
    found = compared(runs(folder, "healthy"))
    said = resumed_run.said(found)
    assert (said.verdict, said.text.count("steps 4 to 6")) == (Verdict.CLEAN, 1)
    assert all(one.compared > 40 and one.lost == [] for one in found.values())


def test_without_a_second_uninterrupted_run_nothing_is_judged(folder: Path) -> None:
    """Noise is not known then."""
    assert compared(runs(folder, "moments-dropped", again="no such run")) == {}


def test_what_two_uninterrupted_runs_do_not_share_is_not_judged(folder: Path) -> None:
    """The resumed run itself stands for an uninterrupted one that does not repeat itself."""
    noisy = folder / "noisy"
    shutil.copytree(folder / "sampler-restarted" / "resumed", noisy, dirs_exist_ok=True)
    for step in (3, 2, 1):
        later = noisy / f"rank-0.state-{step + resumes.SAVE_AT}.json"
        (noisy / f"rank-0.state-{step}.json").rename(later)
    found = compared(runs(folder, "sampler-restarted", again="noisy"))
    assert all(one.lost == [] and one.noise for one in found.values())
    assert resumed_run.said(found).verdict == Verdict.INCONCLUSIVE


def test_the_command_runs_and_compares_four_jobs(tmp_path: Path) -> None:
    program = f"{sys.executable} {ROOT}/tests/victims/resumes.py {{dir}} --fault moments-dropped"
    command = [sys.executable, "-m", "moediag", "resume", "--json", "--out", str(tmp_path / "run")]
    command += ["--resumed", f"{program} --resume", "--", *program.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    (trial,) = json.loads(done.stdout)["trials"]
    assert (done.returncode, trial["verdict"]) == (1, "resume-drift"), done.stderr
    assert "8 optimizer states differ from their values at the save" in trial["cause"]
    assert "Save the optimizer's state in the checkpoint" in trial["next_step"]
