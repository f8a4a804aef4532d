"""docs/reference/verdicts.md says what the rules do, and the rules are complete."""

import os
import re
from pathlib import Path

import moediag.diagnosis.rules as rules_package
from moediag.diagnosis.rules import RULES, judge
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.verdicts_page import CONFIDENCE, MEANINGS, page
from moediag.evidence.model import Evidence
from moediag.result import Confidence, Verdict
from tests.unit.diagnosis import example_detector

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "verdicts.md"
FOLDERS = ("incomplete", "laws", "failed", "hung", "recorded", "measured")


def test_the_page_is_current() -> None:
    if os.environ.get("MOEDIAG_GOLDEN") == "write":
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make golden`"


def test_the_page_follows_the_tuple() -> None:
    rows = re.findall(r"^\| (\d+) \|", page((*RULES, example_detector)), re.MULTILINE)
    assert rows == [str(n) for n in range(1, len(RULES) + 2)]
    assert "| `wrong-weights` | The loss is exactly the same" in page((example_detector,))


def test_every_detector_is_registered_once_and_documented() -> None:
    root = Path(str(rules_package.__file__)).parent
    files = {path for folder in FOLDERS for path in (root / folder).glob("[!_]*.py")}
    assert {Path(str(getattr(rule, "__file__", ""))) for rule in RULES} == files
    assert len(set(RULES)) == len(RULES)
    assert all((rule.__doc__ or "").strip().endswith(".") for rule in RULES)


def test_verdicts_and_confidences_are_explained_and_reachable() -> None:
    assert set(MEANINGS) == set(Verdict) == {rule.VERDICT for rule in RULES}
    assert set(CONFIDENCE) == set(Confidence)


def test_no_evidence_at_all_is_inconclusive() -> None:
    verdict, judged = judge(Facts(Evidence(0, {})))
    assert verdict == Verdict.INCONCLUSIVE
    assert judged.cause
