"""Real outputs have the form that docs/reference/schemas promises, and no field beside it."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from docs.generate.json_schema import document
from docs.generate.lab_outputs import OUTPUTS
from moediag import doctor
from moediag.cli.app import whole
from moediag.lab.campaign.bisect import answer_page
from moediag.lab.campaign.bisect.search.search import Options
from moediag.lab.campaign.hunt import findings_page
from moediag.lab.campaign.matrix import table_page
from moediag.lab.campaign.matrix.cells import Cell
from moediag.lab.campaign.nightly import summary
from moediag.lab.campaign.nightly.changes import compare
from moediag.lab.campaign.nightly.summary import Summary
from moediag.lab.campaign.sweep.summary import Sweep, SweepRow
from moediag.lab.campaign.sweep.summary import answer as sweep_answer
from moediag.lab.pipeline import check_page, check_script_page
from moediag.lab.stacks import built
from moediag.lab.stacks.built import EnvironmentInfo
from moediag.report import answer_views, json_view
from moediag.result.answer_blocks import Answer
from moediag.result.result_file import read_result
from tests.unit.campaign import test_bisect_timeline, test_hunt, test_journal, test_matrix_cells
from tests.unit.nightly_nights import entry, job, night
from tests.unit.pipeline import test_check, test_check_fit, test_check_script
from tests.unit.pipeline.test_check_fit import LOSS

RESULTS = sorted((Path(__file__).parents[2] / "golden" / "results").glob("*.json"))


def closed(schema: Any) -> Any:
    """The schema without room for fields that it does not name."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    return {**made, "additionalProperties": False} if "required" in made else made


def check(name: str, value: object) -> None:
    text, shape = OUTPUTS[name]
    jsonschema.Draft202012Validator(closed(document(name, text, shape))).validate(
        json.loads(json.dumps(value))
    )


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_is_a_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(document(name, *OUTPUTS[name]))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result(path: Path) -> None:
    check("result", json.loads(json_view.render(read_result(path))))


def test_a_value_of_another_kind_is_refused() -> None:
    whole_result = json.loads(json_view.render(read_result(RESULTS[0])))
    for change in ({"started": 1}, {"further": ""}, {"conclusion": {}}):
        with pytest.raises(jsonschema.ValidationError):
            check("result", {**whole_result, **change})


WITH_CASES = test_check.result(
    test_check.CHECKED, test_check.judged("control", test_check.PARTED), memory=None
)
CALLS = test_check_script.simulated([test_check_script.BARRIER], [], [])
WRONG = test_hunt.cell("alpha", "padding", test_hunt.WRONG)
HUNT = test_hunt.found(WRONG, before=test_hunt.found(test_hunt.cell("alpha", "padding")))
MATRIX = test_matrix_cells.table(Cell(test_matrix_cells.S, "1.0", "hang", True))
TONIGHT = night(2, entry(), jobs=(job("a"),))
NIGHT = Summary(TONIGHT, compare(TONIGHT, [night(1, entry("good"))]))
SWEEP = Sweep("now", "1.0", {}, 1.0, ("a",), (SweepRow("a", 0, broken=("unfixed",)),))


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("check", check_page.answer(test_check.result())),
        ("check", check_page.answer(WITH_CASES)),
        ("check", check_page.answer(test_check.result(fit=test_check_fit.fit("80", LOSS)))),
        ("check-script", check_script_page.answer(test_check_script.found(CALLS))),
        ("hunt", findings_page.answer(HUNT)),
        ("hunt", findings_page.answer(test_hunt.found(WRONG))),
        ("matrix", table_page.answer(MATRIX)),
        ("bisect", answer_page.answer(test_bisect_timeline.report("GGSBBG", Options(3)))),
        ("nightly", summary.answer(NIGHT)),
        ("summary", sweep_answer(SWEEP)),
    ],
)
def test_an_answer(name: str, page: Answer) -> None:
    check(name, answer_views.data(page))


def test_a_journal(tmp_path: Path) -> None:
    test_journal.written(tmp_path)
    lines = (tmp_path / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 5
    for line in lines:
        check("journal", json.loads(line))
    with pytest.raises(jsonschema.ValidationError):
        check("journal", {"e": "probe", "name": "4.53.2", "value": {}})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("env", ["env"]),
        ("explain", ["explain", "hang"]),
        ("explain-all", ["explain"]),
        ("list", ["list"]),
        ("dry-run", ["run", "expert-starvation", "--cpu", "2", "--dry-run"]),
    ],
)
def test_a_command(name: str, words: list[str]) -> None:
    done = CliRunner().invoke(whole(), [*words, "--json"])
    check(name, json.loads(done.stdout))


def test_what_depends_on_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = datetime(2026, 3, 2, tzinfo=timezone.utc)
    info = EnvironmentInfo("a1", tmp_path, "overlay", {"torch": "2.13.0"}, 1, 0, now, False, False)
    monkeypatch.setattr(doctor, "checks", lambda: [doctor.Check("python", "ok", "3.12")])
    monkeypatch.setattr(built, "list_environments", lambda: [info])
    for name, words in (("doctor", ["doctor"]), ("stacks-list", ["stacks", "list"])):
        check(name, json.loads(CliRunner().invoke(whole(), [*words, "--json"]).stdout))
