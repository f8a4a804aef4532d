"""result.json, schema_version 1: the one object that every view renders."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moediag.protocol import write_json

RESULT_FILE = "result.json"
SCENARIO_FILE = "scenario.yaml"

# An int is a count, a float a measured number, None is "not measured"; a bool is yes or no.
Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class RankSide:
    """One rank's side of the first divergence. ``numel``: elements on the wire."""

    op: str
    numel: int
    dtype: str
    parameters_missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """``index``: position in the group's schedule, counted from 0."""

    index: int
    axis: str
    phase: str
    module: str
    ranks: dict[str, RankSide]  # keyed by the rank's number as a string


@dataclass(frozen=True, slots=True)
class LaneCell:
    """``state``: done | open (not known to have completed) | none (no call was made) | unknown."""

    text: str
    state: str


@dataclass(frozen=True, slots=True)
class Lane:
    """Ranks whose calls around the divergence are the same, one for each row."""

    ranks: tuple[int, ...]
    cells: tuple[LaneCell, ...]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The schedules around the first divergence. ``at``: the row where ranks diverge;
    ``left_out``: ranks in lanes that are not among these; ``calls``: each rank's call there by its
    index in the rank's own log, null where it made none."""

    title: str
    rows: tuple[str, ...]
    at: int
    lanes: tuple[Lane, ...]
    left_out: int = 0
    calls: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankState:
    """Ranks that stood alike at the end. ``kind``: failed | waiting | elsewhere | finished | ended
    | unseen; ``text``: the same in words."""

    kind: str
    text: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall-clock seconds; null where the thing did not happen."""

    environment: float | None = None
    launch: float | None = None
    stall_to_verdict: float | None = None
    total: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Numbers side by side that a person may paste into a pull request.

    Cells are values; each view writes them (:mod:`moediag.report.tables`). Ranks, steps and
    experts are rows, not columns, so that a table of 64 ranks still fits on a page. ``note``:
    what a reader must know to trust the numbers. Raises ValueError where a row is not as long as
    ``columns`` or a cell is no :data:`Cell`.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError(f"table {self.title!r} has no columns")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r} has {len(self.columns)} columns and a row of {len(row)}"
                )
            for cell in row:
                if not isinstance(cell, str | int | float | None):
                    kind = type(cell).__name__
                    raise ValueError(f"table {self.title!r} has a cell of type {kind}")


@dataclass(frozen=True, slots=True)
class TrialResult:
    variant: str
    role: str
    stack: dict[str, str | None]
    launcher: str
    backend: str
    world_size: int
    verdict: str
    expected: str
    met: bool
    signature: str
    confidence: str
    culprits: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    cause: str = ""
    not_seen: tuple[str, ...] = ()
    first_divergence: FirstDivergence | None = None
    gradient_error: float | None = None
    worst_parameter: str | None = None
    step_time_ratio: float | None = None
    seconds: Seconds = field(default_factory=Seconds)
    evidence: str = ""
    # Beyond the minimum of schema_version 1; readers ignore what they do not know.
    repeat: int = 0
    must_show: str = ""  # the verdict that one repeat of this variant must have
    stacks: dict[str, list[str]] = field(default_factory=dict)  # rank -> frames, innermost first
    wrong_parameters: tuple[str, ...] = ()
    parameters_compared: int = 0
    step_time_spread: tuple[float, float] | None = None  # quartiles of the per-round ratio
    notes: tuple[str, ...] = ()
    repairs: str = ""  # of a fix: the unfixed variant it is meant for; empty: all of them
    clean_without: str = ""  # of a failing fix: the variant that is the same run without it, clean
    other_batch: bool = False  # trains on other data than the unfixed trial: no repair of the code
    tables: tuple[Table, ...] = ()
    schedules: SideBySide | None = None  # around the first divergence
    states: tuple[RankState, ...] = ()  # each rank of the world in one of them
    shared_gpu: bool = False  # several ranks computed on one GPU
    attached: dict[str, str] = field(default_factory=dict)  # what other programs said, by title


@dataclass(frozen=True, slots=True)
class FixJudgement:
    """``effect``: one of verdicts.Effect, see :mod:`moediag.judgement.fix_effect`, empty
    where that is not known; ``why``: in words, with numbers and with what saw it."""

    variant: str
    correct: bool
    step_time_ratio: float | None = None
    effect: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class ClaimJudgement:
    """``variant``: one unfixed way in which the failure is said to show; ``what`` was found."""

    variant: str
    reproduced: bool | None
    what: str = ""


@dataclass(frozen=True, slots=True)
class Conclusion:
    reproduced: bool | None
    fixes: tuple[FixJudgement, ...] = ()
    cheapest_correct_fix: str | None = None
    claims: tuple[ClaimJudgement, ...] = ()  # one per unfixed variant


@dataclass(frozen=True, slots=True)
class RunResult:
    scenario: str
    started: str  # ISO 8601, UTC
    moediag_version: str
    machine: dict[str, Any]
    trials: tuple[TrialResult, ...]
    conclusion: Conclusion
    overrides: tuple[str, ...] = ()  # every --set and --stack, as typed
    incomplete: str = ""  # why trials of the plan are missing; empty where none is
    tables: tuple[Table, ...] = ()  # over the whole run: variants side by side
    schema_version: int = 1

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def write(self, folder: Path) -> Path:
        return write_json(folder / RESULT_FILE, self.to_json())


def read_result(path: Path) -> RunResult:
    """Reads ``result.json`` (or the run directory that holds it). Raises ValueError."""
    if path.is_dir():
        path = path / RESULT_FILE
    raw = json.loads(path.read_text(encoding="utf-8"))
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version is None:
        raise ValueError("it has no schema_version")
    if version != 1:
        raise ValueError(f"schema_version {version!r}, this moediag reads 1")
    trials = tuple(_trial(t) for t in raw.pop("trials"))
    end = raw.pop("conclusion")
    conclusion = Conclusion(
        end["reproduced"],
        tuple(FixJudgement(**f) for f in end["fixes"]),
        end["cheapest_correct_fix"],
        tuple(ClaimJudgement(**c) for c in end.get("claims", ())),
    )
    raw["overrides"] = tuple(raw.get("overrides", ()))
    raw["tables"] = _tables(raw)
    known = {f.name for f in dataclasses.fields(RunResult)}
    values = {k: v for k, v in raw.items() if k in known}
    return RunResult(trials=trials, conclusion=conclusion, **values)


def _trial(raw: dict[str, Any]) -> TrialResult:
    known = {f.name for f in dataclasses.fields(TrialResult)}
    values = {k: v for k, v in raw.items() if k in known}
    if values.get("first_divergence"):
        d = values["first_divergence"]
        sides = {
            rank: RankSide(**{**s, "parameters_missing": tuple(s["parameters_missing"])})
            for rank, s in d["ranks"].items()
        }
        values["first_divergence"] = FirstDivergence(**{**d, "ranks": sides})
    values["seconds"] = Seconds(**values.get("seconds", {}))
    for name in ("culprits", "victims", "not_seen", "wrong_parameters", "notes"):
        values[name] = tuple(values.get(name) or ())
    if values.get("step_time_spread"):
        values["step_time_spread"] = tuple(values["step_time_spread"])
    values["tables"] = _tables(values)
    values["schedules"] = _schedules(values.get("schedules"))
    values["states"] = tuple(
        RankState(s["kind"], s["text"], tuple(s["ranks"])) for s in values.get("states") or ()
    )
    return TrialResult(**values)


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
    """Results from before there were tables have none."""
    return tuple(
        Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])), t.get("note", ""))
        for t in raw.get("tables") or ()
    )
