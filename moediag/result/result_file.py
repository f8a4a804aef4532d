"""Reads result.json, schema_version 1. Fields that this version does not know are ignored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from moediag.result.diagnosis import (
    Diagnosis,
    FirstDivergence,
    Lane,
    LaneCell,
    Place,
    RankSide,
    RankState,
    SideBySide,
)
from moediag.result.run_result import (
    RESULT_FILE,
    ClaimJudgement,
    Conclusion,
    FixJudgement,
    RunResult,
    Seconds,
    TrialResult,
)
from moediag.result.table import Table
from moediag.result.verdicts import Confidence, Verdict

_OF_TRIAL = frozenset(f.name for f in dataclasses.fields(TrialResult)) - {"diagnosis"}
_OF_DIAGNOSIS = frozenset(f.name for f in dataclasses.fields(Diagnosis))
_OF_RUN = frozenset(f.name for f in dataclasses.fields(RunResult))


def read_result(path: Path) -> RunResult:
    """The result in ``path``: a result.json or the run directory that contains it.

    Raises ValueError, KeyError, TypeError or AttributeError if it is no such file."""
    if path.is_dir():
        path = path / RESULT_FILE
    raw = json.loads(path.read_text(encoding="utf-8"))
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version is None:
        raise ValueError("it has no schema_version")
    if version != 1:
        raise ValueError(f"schema_version {version!r}, this moediag reads 1")
    trials = tuple(trial_from_json(t) for t in raw.pop("trials"))
    end = raw.pop("conclusion")
    conclusion = Conclusion(
        end["reproduced"],
        tuple(FixJudgement(**f) for f in end["fixes"]),
        end["cheapest_correct_fix"],
        tuple(ClaimJudgement(**c) for c in end.get("claims", ())),
    )
    values = _known(raw, _OF_RUN)
    values["overrides"] = tuple(raw.get("overrides", ()))
    values["tables"] = _tables(raw)
    return RunResult(trials=trials, conclusion=conclusion, **values)


def _known(raw: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name in names}


def trial_from_json(raw: dict[str, Any]) -> TrialResult:
    values = _known(raw, _OF_TRIAL)
    values["seconds"] = Seconds(**values.get("seconds", {}))
    if values.get("step_time_spread"):
        values["step_time_spread"] = tuple(values["step_time_spread"])
    return TrialResult(diagnosis=_diagnosis(raw), **values)


def _diagnosis(raw: dict[str, Any]) -> Diagnosis:
    values = _known(raw, _OF_DIAGNOSIS)
    values["verdict"] = Verdict(raw["verdict"])
    values["confidence"] = Confidence(raw["confidence"])
    for name in ("culprits", "victims", "not_seen", "wrong_parameters", "notes"):
        values[name] = tuple(raw.get(name) or ())
    values["first_divergence"] = _first_divergence(raw.get("first_divergence"))
    values["stacks"] = {int(r): tuple(frames) for r, frames in raw.get("stacks", {}).items()}
    values["tables"] = _tables(raw)
    values["schedules"] = _schedules(raw.get("schedules"))
    values["states"] = tuple(
        RankState(s["kind"], s["text"], tuple(s["ranks"])) for s in raw.get("states") or ()
    )
    values["places"] = tuple(
        Place(tuple(p["ranks"]), p["line"], p["what"], tuple(p["callers"]), tuple(p["conditions"]))
        for p in raw.get("places") or ()
    )
    return Diagnosis(**values)


def _first_divergence(raw: dict[str, Any] | None) -> FirstDivergence | None:
    if not raw:
        return None
    sides = {
        rank: RankSide(**{**side, "parameters_missing": tuple(side["parameters_missing"])})
        for rank, side in raw["ranks"].items()
    }
    return FirstDivergence(**{**raw, "ranks": sides})


def _schedules(raw: dict[str, Any] | None) -> SideBySide | None:
    if raw is None:
        return None
    lanes = tuple(
        Lane(tuple(x["ranks"]), tuple(LaneCell(c["text"], c["state"]) for c in x["cells"]))
        for x in raw["lanes"]
    )
    rows = tuple(raw["rows"])
    return SideBySide(raw["title"], rows, raw["at"], lanes, raw["left_out"], raw["calls"])


def _tables(raw: dict[str, Any]) -> tuple[Table, ...]:
    """The tables of a trial or of a run; none in a result written before tables existed."""
    return tuple(
        Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])), t.get("note", ""))
        for t in raw.get("tables") or ()
    )
