"""The rules are complete, and every verdict, confidence and detector is explained."""

from pathlib import Path

import moediag.diagnosis.rules as rules_package
from moediag.diagnosis.rules import RULES, judge
from moediag.diagnosis.rules.explanations import CONFIDENCE, MEANINGS, NEXT_STEPS, explained
from moediag.diagnosis.rules.facts import Facts
from moediag.evidence.model import Evidence
from moediag.result import Confidence, Verdict
from tests.unit.diagnosis import example_detector

FOLDERS = ("incomplete", "laws", "failed", "hung", "recorded", "measured")


def test_detectors_are_explained_in_their_order() -> None:
    found = explained((*RULES, example_detector))
    assert [d.name for d in found][-1] == "example_detector"
    assert found[-1].finds.startswith("The loss is exactly the same")
    assert [d.verdict for d in found[:-1]] == [rule.VERDICT for rule in RULES]
    assert {d.name for d in found if d.is_law} == {
        path.stem for path in (Path(str(rules_package.__file__)).parent / "laws").glob("[!_]*.py")
    }


def test_every_detector_is_registered_once_and_documented() -> None:
    root = Path(str(rules_package.__file__)).parent
    files = {path for folder in FOLDERS for path in (root / folder).glob("[!_]*.py")}
    assert {Path(str(getattr(rule, "__file__", ""))) for rule in RULES} == files
    assert len(set(RULES)) == len(RULES)
    assert all((rule.__doc__ or "").strip().endswith(".") for rule in RULES)


def test_verdicts_and_confidences_are_explained_and_reachable() -> None:
    assert set(MEANINGS) == set(NEXT_STEPS) == set(Verdict) == {rule.VERDICT for rule in RULES}
    assert set(CONFIDENCE) == set(Confidence)


def test_no_evidence_at_all_is_inconclusive() -> None:
    verdict, judged = judge(Facts(Evidence(0, {})))
    assert verdict == Verdict.INCONCLUSIVE
    assert judged.cause
