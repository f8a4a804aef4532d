"""The rules are complete, and every verdict, confidence and detector is explained."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import moediag.diagnosis.laws as laws_package
import moediag.diagnosis.rules as rules_package
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Detector
from moediag.diagnosis.laws import LAWS, Law
from moediag.diagnosis.rules import RULES, judge
from moediag.diagnosis.rules.explanations import CONFIDENCE, MEANINGS, NEXT_STEPS
from moediag.evidence.model import Evidence
from moediag.result import Confidence, Verdict
from tests.unit.diagnosis.example_detector import frozen_loss


def defined(package: ModuleType, kind: type) -> Iterator[Any]:
    """The objects of this kind in the modules of a package, each once."""
    names = [one.name for one in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    # The modules that list them are left out: they import all.
    modules = [importlib.import_module(name) for name in names if not name.endswith("order")]
    found = {id(one): one for m in modules for one in vars(m).values() if isinstance(one, kind)}
    yield from found.values()


def test_a_detector_says_what_it_finds_and_where_it_is() -> None:
    assert frozen_loss.name == "frozen_loss"
    assert frozen_loss.finds.startswith("The loss is exactly the same")
    assert frozen_loss.file == "tests/unit/diagnosis/example_detector.py"
    failures = [law.find.__name__ for law in LAWS if law.verdict is not None]
    assert [one.name for one in RULES if one.is_law] == failures


def test_every_detector_and_law_is_registered_once_and_documented() -> None:
    names = [rule.name for rule in RULES]
    detectors = [one.name for one in defined(rules_package, Detector)]
    laws = list(defined(laws_package, Law))
    failures = [law.find.__name__ for law in laws if law.verdict is not None]
    assert sorted(names) == sorted((*detectors, *failures))
    assert len(set(names)) == len(names)
    assert set(LAWS) == set(laws) and len(LAWS) == len(laws)
    assert all(rule.finds.endswith(".") for rule in RULES)
    assert all(law.finds.endswith(".") for law in LAWS)


def test_a_law_without_a_verdict_finds_what_its_level_says() -> None:
    for law in (law for law in LAWS if law.verdict is None):
        assert law.suspects == ("Suspicious" in law.find.__code__.co_names), law.name
        assert "Broken" not in law.find.__code__.co_names, law.name


def test_verdicts_and_confidences_are_explained_and_reachable() -> None:
    assert set(MEANINGS) == set(NEXT_STEPS) == set(Verdict) == {rule.verdict for rule in RULES}
    assert set(CONFIDENCE) == set(Confidence)


def test_no_evidence_at_all_is_inconclusive() -> None:
    verdict, judged = judge(Facts(Evidence(0, {})))
    assert verdict == Verdict.INCONCLUSIVE
    assert judged.cause
