"""The rules are complete, and every verdict, confidence and detector is explained."""

import importlib
import pkgutil

import moediag.diagnosis.rules as rules_package
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Detector
from moediag.diagnosis.rules import RULES, judge
from moediag.diagnosis.rules.explanations import CONFIDENCE, MEANINGS, NEXT_STEPS, explained
from moediag.evidence.model import Evidence
from moediag.result import Confidence, Verdict
from tests.unit.diagnosis.example_detector import frozen_loss


def defined() -> list[Detector]:
    """The detectors of all modules of rules, each where it is defined."""
    names = [
        one.name
        for one in pkgutil.walk_packages(rules_package.__path__, "moediag.diagnosis.rules.")
    ]
    modules = {name: importlib.import_module(name) for name in names}
    return [
        one
        for name, module in modules.items()
        for one in vars(module).values()
        if isinstance(one, Detector) and one.judge.__module__ == name
    ]


def test_detectors_are_explained_in_their_order() -> None:
    found = explained((*RULES, frozen_loss))
    assert [d.name for d in found][-1] == "frozen_loss"
    assert found[-1].finds.startswith("The loss is exactly the same")
    assert [d.verdict for d in found[:-1]] == [rule.verdict for rule in RULES]
    laws = [d.name for d in found if d.is_law]
    assert {"part_loaded", "gradients_kept"} < set(laws)
    assert "frozen_loss" not in laws


def test_every_detector_is_registered_once_and_documented() -> None:
    assert {rule.name for rule in RULES} == {one.name for one in defined()}
    assert len({rule.name for rule in RULES}) == len(RULES) == len(defined())
    assert all(rule.finds.endswith(".") for rule in RULES)


def test_verdicts_and_confidences_are_explained_and_reachable() -> None:
    assert set(MEANINGS) == set(NEXT_STEPS) == set(Verdict) == {rule.verdict for rule in RULES}
    assert set(CONFIDENCE) == set(Confidence)


def test_no_evidence_at_all_is_inconclusive() -> None:
    verdict, judged = judge(Facts(Evidence(0, {})))
    assert verdict == Verdict.INCONCLUSIVE
    assert judged.cause
