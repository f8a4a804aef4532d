"""The detector of docs/extending/add-a-detector.md: one function, and one line in the tuple of
rules."""

from dataclasses import replace
from pathlib import Path

from moediag.diagnosis import diagnose
from moediag.diagnosis.rules import RULES
from moediag.diagnosis.rules.measured import right_numbers
from moediag.evidence.model import Evidence
from moediag.result import Diagnosis, Verdict
from tests.unit.diagnosis import example_detector
from tests.unit.evidence_builder import fsdp2_job, measured

ROOT = Path(__file__).parents[3]
LAST = RULES.index(right_numbers)
WITH_IT = (*RULES[:LAST], example_detector.frozen_loss, *RULES[LAST:])


def trained(*losses: float) -> Evidence:
    """Two ranks whose gradients are right, and that report these losses."""
    evidence = measured(fsdp2_job(set(), set()).run())
    ranks = {
        rank: replace(seen, outcome=replace(seen.outcome, losses=list(losses)))
        for rank, seen in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)


def found(evidence: Evidence) -> Diagnosis:
    return diagnose(evidence, WITH_IT)


def test_a_frozen_loss_is_found() -> None:
    frozen = found(trained(4.85, 4.85, 4.85))
    assert frozen.verdict == Verdict.WRONG_WEIGHTS
    assert frozen.cause == "The loss is exactly 4.85 in all 3 steps: training changes nothing."
    assert frozen.signature == "wrong-weights:frozen loss:no-rank"
    assert frozen.culprits == ()


def test_a_changing_loss_is_not_reported() -> None:
    assert found(trained(4.85, 4.85, 4.849)).verdict == Verdict.CLEAN


def test_missing_losses_are_not_reported() -> None:
    assert found(trained(4.85, 4.85)).verdict == Verdict.CLEAN
    evidence = trained(4.85, 4.85, 4.85)
    silent = replace(evidence.ranks[1], outcome=None)
    lost = replace(evidence, ranks={**evidence.ranks, 1: silent})
    assert found(lost).verdict == Verdict.INCONCLUSIVE


def test_an_earlier_rule_decides_first() -> None:
    evidence = trained(4.85, 4.85, 4.85)
    assert found(replace(evidence, interrupted=True)).verdict == Verdict.INCONCLUSIVE


def test_the_detector_is_inactive_unless_registered() -> None:
    assert diagnose(trained(4.85, 4.85, 4.85)).verdict == Verdict.CLEAN


def test_the_page_shows_the_detector_file() -> None:
    page = (ROOT / "docs" / "extending" / "add-a-detector.md").read_text(encoding="utf-8")
    code = Path(example_detector.__file__).read_text(encoding="utf-8")
    assert f"```python\n{code}```" in page
