"""result.json, schema_version 1: the fields of a trial are flat."""

import json
from pathlib import Path
from typing import Any

import pytest

from moediag.result import TrialResult, read_result
from tests.unit.trial_results import changed, trial_result

SAMPLES = sorted((Path(__file__).parent.parent.parent / "golden" / "results").glob("*.json"))
# The fields of a trial when diagnosis and trial became two objects.
FIELDS = {
    "variant", "role", "stack", "launcher", "backend", "world_size", "verdict", "expected", "met",
    "signature", "confidence", "culprits", "victims", "cause", "not_seen", "first_divergence",
    "gradient_error", "worst_parameter", "step_time_ratio", "seconds", "evidence", "repeat",
    "must_show", "stacks", "wrong_parameters", "parameters_compared", "step_time_spread", "notes",
    "repairs", "clean_without", "other_batch", "tables", "schedules", "states", "shared_gpu",
    "attached",
}  # fmt: skip


def test_a_trial_has_every_schema_field_at_its_top_level() -> None:
    """Fields may be added but not removed."""
    flat = trial_result().to_json()
    assert set(flat) >= FIELDS
    assert "diagnosis" not in flat


def written_again(kept: Any, again: Any) -> bool:
    """Whether ``again`` contains all of ``kept``; objects may have more fields."""
    if isinstance(kept, dict):
        return all(name in again and written_again(kept[name], again[name]) for name in kept)
    if isinstance(kept, list):
        return len(kept) == len(again) and all(map(written_again, kept, again))
    return bool(kept == again)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_stored_result_round_trips(sample: Path, tmp_path: Path) -> None:
    kept = json.loads(sample.read_text())
    read_result(sample).write(tmp_path)
    again = json.loads((tmp_path / "result.json").read_text())
    assert written_again(kept, again)
    kept["trials"][0]["culprits"] = [99]
    assert not written_again(kept, again)


def test_ranks_are_numbers_in_memory_and_text_in_the_file(tmp_path: Path) -> None:
    one = changed(trial_result(verdict="hang"), stacks={3: ("a.py:1 wait",)}, culprits=(3,))
    raw = one.to_json()
    assert (raw["stacks"], raw["verdict"]) == ({"3": ["a.py:1 wait"]}, "hang")
    assert type(raw["verdict"]) is type(raw["confidence"]) is str


_LANES = {"title": "t", "rows": ["1", "here"], "at": 1}
_SIDE = {"op": "all_reduce", "numel": 1, "dtype": "float32"}
_DIVERGENCE = {"index": 0, "axis": "dp", "phase": "", "module": ""}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (
            "schedules",
            {**_LANES, "lanes": [{"ranks": [0], "cells": []}]},
            "without one cell for each of 2",
        ),
        ("first_divergence", {**_DIVERGENCE, "ranks": {"all": _SIDE}}, "'all' is no rank"),
        ("first_divergence", {**_DIVERGENCE, "ranks": {"9" * 5000: _SIDE}}, "is no rank"),
        ("step_time_ratio", 10**400, "step_time_ratio: 1000.* is not a number of usual size"),
    ],
)
def test_a_value_that_no_view_can_draw_is_refused(
    field: str, value: object, said: str, tmp_path: Path
) -> None:
    raw = json.loads(SAMPLES[0].read_text())
    raw["trials"][0][field] = value
    (tmp_path / "result.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=said):
        read_result(tmp_path)


@pytest.mark.parametrize("field", ["verdict", "confidence"])
def test_an_unknown_value_is_refused(field: str, tmp_path: Path) -> None:
    raw = json.loads(SAMPLES[0].read_text())
    raw["trials"][0][field] = "fine"
    (tmp_path / "result.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="fine"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("world_size", "2", r"trials\[0\].world_size: '2' is not a whole number"),
        ("world_size", 10**300, r"trials\[0\].world_size: 10+ ranks"),
        ("signature", [], r"trials\[0\].diagnosis.signature: \[\] is not text"),
        ("signature", "\ud800", "half a character"),
        ("culprits", [[]], r"culprits\[0\]: \[\] is not a whole number"),
        ("cause", None, ""),
        ("met", None, r"trials\[0\].met: None is not true or false"),
        ("tables", [{"title": "t", "columns": [{}], "rows": []}], "is not text"),
        ("tables", [{"title": "t", "columns": ["a"], "rows": [[{}]]}], "is not text or true or"),
        ("step_time_spread", [1.0], "is not a list of 2"),
        ("stacks", {"one": []}, "'one' is not a whole number"),
        ("seconds", 3, r"trials\[0\].seconds: 3 is not an object"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(
    field: str, value: Any, message: str, tmp_path: Path
) -> None:
    raw = json.loads(SAMPLES[0].read_text())
    raw["trials"][0][field] = value
    (tmp_path / "result.json").write_text(json.dumps(raw))
    if not message:  # null stands for the default
        assert read_result(tmp_path).trials[0].cause == ""
        return
    with pytest.raises(ValueError, match=message):
        read_result(tmp_path)


@pytest.mark.parametrize("missing", ["trials", "conclusion", "machine", "schema_version"])
def test_a_missing_field_is_named(missing: str, tmp_path: Path) -> None:
    raw = json.loads(SAMPLES[0].read_text())
    del raw[missing]
    (tmp_path / "result.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=missing):
        read_result(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, "3", "[]", "nonsense", ""])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"nested|schema_version|Expecting"):
        read_result(tmp_path)


def test_fields_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    raw = json.loads(SAMPLES[0].read_text())
    raw["trials"][0]["colour"] = raw["colour"] = "red"
    (tmp_path / "result.json").write_text(json.dumps(raw))
    assert read_result(tmp_path) == read_result(SAMPLES[0])


def test_a_trial_keeps_its_own_fields_when_its_diagnosis_changes() -> None:
    one = trial_result("a", notes=("x",), evidence="a")
    noted = one.diagnosed(notes=(*one.notes, "y"))
    assert (noted.notes, noted.evidence, one.notes) == (("x", "y"), "a", ("x",))
    assert isinstance(noted, TrialResult)
