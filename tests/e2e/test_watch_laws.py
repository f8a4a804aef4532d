"""`moediag watch --laws` on real jobs; tests/victims has the programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from moediag.pipeline.examine import examine
from tests.e2e.launchers import PLAIN
from tests.e2e.test_watch import under
from tests.victims.table import LAW_RUNS, LAW_VICTIMS, LawVictim, healthy_programs

pytestmark = pytest.mark.e2e

DEFAULT = ("lr_by_rank",)


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(v, id=v.name, marks=() if v.name in DEFAULT else pytest.mark.wide)
        for v in LAW_VICTIMS
    ],
)
def test_every_silent_error_is_found(victim: LawVictim, tmp_path: Path) -> None:
    code, trial = under(PLAIN, tmp_path, victim, "--laws")
    cause = str(trial["cause"])
    assert trial["verdict"] in victim.verdicts, cause
    assert list(trial["culprits"]) == list(victim.culprits), cause  # type: ignore[arg-type]
    assert victim.says in cause
    notes = " ".join(trial["notes"] + trial["suspicious"])  # type: ignore[operator]
    assert victim.note in notes
    assert code == (0 if victim.healthy else 1)


@pytest.mark.wide
def test_ranks_that_divide_the_samples_of_one_part(tmp_path: Path) -> None:
    command = [sys.executable, str(LAW_RUNS), str(tmp_path), "4", "sequence_slices"]
    subprocess.run(command, capture_output=True, timeout=300, check=True)
    (trial,) = examine([tmp_path / "sequence_slices"]).result.trials
    assert trial.verdict == "clean", trial.diagnosis.cause


@pytest.mark.wide
def test_programs_that_record_themselves(tmp_path: Path) -> None:
    """One launch of all two-rank programs, each in a folder of its own."""
    as_known(tmp_path, "gloo")


def as_known(folder: Path, backend: str, without: Sequence[str] = ()) -> None:
    """Asserts that laws say of all two-rank programs what is known of them."""
    names = [victim.name for victim in LAW_VICTIMS if victim.ranks == 2]
    names = [name for name in (*names, *healthy_programs()) if name not in without]
    done = subprocess.run(
        [sys.executable, str(LAW_RUNS), str(folder), "2", *names], capture_output=True, text=True,
        timeout=500, check=False, env=os.environ | {"MOEDIAG_TEST_BACKEND": backend},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {victim.name: victim for victim in LAW_VICTIMS}
    for name in names:
        (trial,) = examine([folder / name]).result.trials
        victim = expected.get(name, LawVictim(name, ("clean",)))
        assert trial.verdict in victim.verdicts, (name, trial.diagnosis.cause)
        assert victim.says in trial.diagnosis.cause
        said = (*trial.diagnosis.notes, *trial.diagnosis.suspicious)
        assert victim.note in " ".join(said), name
