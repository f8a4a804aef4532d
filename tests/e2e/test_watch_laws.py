"""`moediag watch --laws` on real jobs; tests/victims/law_jobs.py has the programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_watch import under_torchrun
from tests.victims.table import LAW_VICTIMS, LawVictim

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
    code, trial = under_torchrun(tmp_path, victim, "--laws")
    cause = str(trial["cause"])
    assert trial["verdict"] in victim.verdicts, cause
    assert list(trial["culprits"]) == list(victim.culprits), cause  # type: ignore[arg-type]
    assert victim.says in cause
    notes = " ".join(trial["notes"])  # type: ignore[arg-type]
    assert victim.note in notes
    assert code == (0 if victim.healthy else 1)
