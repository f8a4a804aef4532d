"""The result of a run, schema_version 1: the one object that every view renders."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import Any

from moediag.protocol import write_json
from moediag.records import dataclass
from moediag.result.diagnosis import Diagnosis
from moediag.result.table import Table
from moediag.result.verdicts import Confidence, Verdict

RESULT_FILE = "result.json"
SCENARIO_FILE = "scenario.yaml"


@dataclass(frozen=True, slots=True)
class Seconds:
    """Wall-clock seconds; null for a phase that did not occur."""

    environment: float | None = None
    launch: float | None = None
    stall_to_verdict: float | None = None
    total: float | None = None
    """The trial itself, without its reference."""
    reference: float | None = None
    """The single-process reference; only for the trial that it was computed for."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One trial: what ran, what was expected of it, and what its diagnosis found.

    In result.json the diagnosis's fields are beside the trial's."""

    variant: str
    role: str
    stack: dict[str, str | None]
    launcher: str
    backend: str
    world_size: int
    """Number of ranks; 0 if it is not known."""
    diagnosis: Diagnosis
    expected: str
    """The expected verdicts in words; empty when nothing was expected."""
    met: bool
    """Whether the diagnosis is as expected."""
    step_time_ratio: float | None = None
    """Step time divided by that of the unfixed step."""
    seconds: Seconds = field(default_factory=Seconds)
    evidence: str = ""
    """The trial's folder, relative to the run directory."""
    repeat: int = 0
    must_show: str = ""
    """The verdict that at least one repeat of this variant must have."""
    step_time_spread: tuple[float, float] | None = None
    """Quartiles of the per-round ratio."""
    step_time_rounds: tuple[float, ...] = ()
    """The ratio of each round, in order: fixes were timed in the same rounds."""
    repairs: str = ""
    """For a fix: the unfixed variant it is meant for; empty for all of them."""
    what: str = ""
    """For a fix: what it does."""
    source: str = ""
    """For a fix: who proposed it."""
    clean_without: str = ""
    """For a failing fix: the variant that is the same run without it and clean."""
    other_batch: bool = False
    """It trains on other data than the unfixed trial, so it does not repair the code."""
    shared_gpu: bool = False
    """Several ranks computed on one GPU."""

    @property
    def verdict(self) -> Verdict:
        return self.diagnosis.verdict

    @property
    def signature(self) -> str:
        return self.diagnosis.signature

    @property
    def confidence(self) -> Confidence:
        return self.diagnosis.confidence

    @property
    def culprits(self) -> tuple[int, ...]:
        return self.diagnosis.culprits

    @property
    def victims(self) -> tuple[int, ...]:
        return self.diagnosis.victims

    @property
    def cause(self) -> str:
        return self.diagnosis.cause

    @property
    def notes(self) -> tuple[str, ...]:
        return self.diagnosis.notes

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.diagnosis.tables

    @property
    def gradient_error(self) -> float | None:
        return self.diagnosis.gradient_error

    @property
    def wrong_parameters(self) -> tuple[str, ...]:
        return self.diagnosis.wrong_parameters

    @property
    def parameters_compared(self) -> int:
        return self.diagnosis.parameters_compared

    def diagnosed(self, **changes: Any) -> TrialResult:
        """The same trial with these fields of its diagnosis changed."""
        return dataclasses.replace(self, diagnosis=dataclasses.replace(self.diagnosis, **changes))

    def to_json(self) -> dict[str, Any]:
        """The trial as JSON. The diagnosis's fields replace it, so the object is flat."""
        flat: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            flat |= value if name == "diagnosis" else {name: value}
        frames = {str(rank): list(stack) for rank, stack in flat["stacks"].items()}
        return {
            **flat,
            "verdict": str(self.verdict),
            "confidence": str(self.confidence),
            "stacks": frames,
        }


@dataclass(frozen=True, slots=True)
class FixJudgement:
    """Whether a fix is correct, and what it does to the failure."""

    variant: str
    correct: bool
    step_time_ratio: float | None = None
    effect: str = ""
    """One of :class:`moediag.result.verdicts.Effect`; empty where it is not known."""
    why: str = ""
    """The reason in words, with the numbers and the detector that saw them."""


@dataclass(frozen=True, slots=True)
class ClaimJudgement:
    """Whether one unfixed variant reproduces the failure."""

    variant: str
    reproduced: bool | None
    what: str = ""
    """What was found."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What all trials of a run show together."""

    reproduced: bool | None
    fixes: tuple[FixJudgement, ...] = ()
    cheapest_correct_fix: str | None = None
    claims: tuple[ClaimJudgement, ...] = ()
    """One per unfixed variant."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """All trials of a run, and the conclusion from them."""

    scenario: str
    started: str
    """ISO 8601, UTC."""
    moediag_version: str
    machine: dict[str, Any]
    trials: tuple[TrialResult, ...]
    conclusion: Conclusion
    overrides: tuple[str, ...] = ()
    """Every --set and --stack, as typed."""
    incomplete: str = ""
    """Why trials of the plan are missing; empty where none is."""
    removed: str = ""
    """Of a watched job that was restarted often: how many attempts left no evidence, and how they
    ended; empty where none was removed."""
    tables: tuple[Table, ...] = ()
    """Over the whole run: variants side by side."""
    schema_version: int = 1

    def to_json(self) -> dict[str, Any]:
        own = dataclasses.asdict(dataclasses.replace(self, trials=()))
        return {**own, "trials": tuple(trial.to_json() for trial in self.trials)}

    def write(self, folder: Path) -> Path:
        return write_json(folder / RESULT_FILE, self.to_json())
