"""Reads result.json, schema_version 1. Fields that this version does not know are ignored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, cast

from moediag.protocol import build, read_json
from moediag.result.diagnosis import Diagnosis
from moediag.result.run_result import RESULT_FILE, RunResult, TrialResult

_OF_DIAGNOSIS = frozenset(f.name for f in dataclasses.fields(Diagnosis))
MOST_RANKS = 1 << 20


def read_result(path: Path) -> RunResult:
    """The result in ``path``: a result.json or the run directory that contains it.

    Raises ValueError, with the field, if it is no such file."""
    if path.is_dir():
        path = path / RESULT_FILE
    try:
        raw = read_json(path)
        json.dumps(raw, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it has text with half a character (a lone surrogate)") from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version is None:
        raise ValueError("it has no schema_version")
    if version != 1:
        raise ValueError(f"schema_version {version!r}, this moediag reads 1")
    trials = raw.get("trials")
    if not isinstance(trials, list):
        raise ValueError("trials is no list")
    nested = [_nested(trial, f"trials[{i}]") for i, trial in enumerate(trials)]
    result = cast("RunResult", build(RunResult, {**raw, "trials": nested}))
    for i, trial in enumerate(result.trials):
        _check_ranks(trial, f"trials[{i}]")
    return result


def trial_from_json(raw: dict[str, Any]) -> TrialResult:
    """Raises ValueError."""
    trial = cast("TrialResult", build(TrialResult, _nested(raw, "trial")))
    _check_ranks(trial, "trial")
    return trial


def _nested(raw: Any, where: str) -> dict[str, Any]:
    """A trial whose diagnosis is one field. In the file the diagnosis's fields are the trial's."""
    if not isinstance(raw, dict):
        raise ValueError(f"{where} is no object")
    own = {name: value for name, value in raw.items() if name in _OF_DIAGNOSIS}
    return {**raw, "diagnosis": own}


def _check_ranks(trial: TrialResult, where: str) -> None:
    """Views draw every rank: a number that no job has would take all memory."""
    if not 0 <= trial.world_size <= MOST_RANKS:
        raise ValueError(f"{where}.world_size: {trial.world_size} ranks")
