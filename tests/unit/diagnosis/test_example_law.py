"""The law of docs/extending/add-a-law.md: one module, and one line in the tuple of laws; what it
records is one more module and line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moediag.diagnosis import diagnose, trial_diagnosis
from moediag.diagnosis.laws import LAWS
from moediag.diagnosis.laws.law import detector_of
from moediag.diagnosis.rules import RULES
from moediag.result import Diagnosis, Verdict
from tests.unit.diagnosis import example_law
from tests.unit.diagnosis.example_law import default_dtypes_apart
from tests.unit.law_evidence import STEPS, job

ROOT = Path(__file__).parents[3]
RECORDER = ROOT / "tests" / "unit" / "recorder" / "laws" / "example_law.py"
LAST = next(at for at, rule in enumerate(RULES) if rule.name == "left_in_evaluation")


@pytest.fixture(autouse=True)
def with_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_diagnosis, "LAWS", (*LAWS, default_dtypes_apart))


def found(dtype: Callable[[int, int], str | None]) -> Diagnosis:
    """``dtype``: of rank and step; None: it was not recorded."""
    evidence, ranks = job(2), {}
    for rank, seen in evidence.ranks.items():
        assert seen.laws is not None
        events = [{"step": s, "dtype": own} for s in STEPS if (own := dtype(rank, s)) is not None]
        laws = replace(seen.laws, others={"default_dtype": (*events, {"step": "damaged"})})
        ranks[rank] = replace(seen, laws=laws)
    assert default_dtypes_apart.verdict is not None
    detector = detector_of(default_dtypes_apart, default_dtypes_apart.verdict)
    rules = (*RULES[:LAST], detector, *RULES[LAST:])
    return diagnose(replace(evidence, ranks=ranks), rules)


def test_dtypes_that_differ_are_a_failure() -> None:
    of = found(lambda rank, step: "torch.bfloat16" if rank and step > 2 else "torch.float32")
    assert of.verdict == Verdict.REPLICA_DIVERGENCE
    assert (
        of.cause == "In step 3 new tensors are torch.float32 on rank 0, torch.bfloat16 on rank 1."
    )
    assert of.signature == "replica-divergence:law default dtype:no-rank"
    assert of.next_step == "Call torch.set_default_dtype alike on every rank."


def test_equal_dtypes_are_clean() -> None:
    of = found(lambda _rank, _step: "torch.float32")
    assert (of.verdict, of.notes) == (Verdict.CLEAN, ())


def test_what_may_be_deliberate_is_a_note() -> None:
    of = found(lambda _rank, _step: "torch.float16")
    assert of.verdict == Verdict.CLEAN
    assert of.notes == ("In step 1 new tensors are torch.float16, states of optimizers as well.",)


def test_a_rank_that_recorded_nothing_does_not_differ() -> None:
    of = found(lambda rank, _step: "torch.float16" if rank else None)
    assert (of.verdict, of.notes) == (Verdict.CLEAN, ())


def test_the_page_shows_both_modules() -> None:
    page = (ROOT / "docs" / "extending" / "add-a-law.md").read_text(encoding="utf-8")
    for file in (Path(example_law.__file__), RECORDER):
        assert f"```python\n{file.read_text(encoding='utf-8')}```" in page
