"""What a check found, and whether something fails."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moediag.axes import Layout
from moediag.lab.pipeline.check_cost import AxisCost, Memory, Wire
from moediag.lab.pipeline.check_fit import Fit, FitWord
from moediag.lab.pipeline.known_scenarios import Known
from moediag.lab.pipeline.register import Entry
from moediag.protocol import FAILS, Checked, SimulatedCase
from moediag.records import dataclass
from moediag.result import FAILURES, Diagnosis, Verdict
from moediag.result.answer_blocks import AnswerState

UNSIMULATED = "whether ranks diverge in a step (--plan-only)"


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """A simulated case and what its logs show."""

    case: SimulatedCase
    diagnosis: Diagnosis

    @property
    def parts(self) -> bool:
        """Whether the ranks' schedules differ, as real ranks' would."""
        return self.case.routed and self.diagnosis.verdict in FAILURES

    @property
    def agrees(self) -> bool:
        """Whether the logs show that the ranks' schedules agree. Without logs neither is known."""
        return self.diagnosis.verdict == Verdict.CLEAN

    @property
    def unseen(self) -> str:
        """Why it is not known whether they agree; "" if it is."""
        condition = f" if {self.case.condition}" if self.case.condition else ""
        known = self.parts or self.agrees
        why = self.diagnosis.cause
        if not self.case.routed:
            why = "the router of a tiny model, with other weights on each rank, parts them"
        return "" if known else f"the schedule{condition}: {why}"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Everything that a check found out."""

    config: str
    layout: Layout
    ranks: int
    versions: Mapping[str, str | None]
    checked: Checked
    cases: tuple[JudgedCase, ...]
    costs: tuple[AxisCost, ...]
    memory: Memory | None
    fit: Fit | None
    """None: it was not asked."""
    wires: tuple[Wire, ...]
    dtypes: str
    """In which parameters are stored, gathered and reduced, and the optimizer's states."""
    known: tuple[Known, ...]
    found: tuple[Entry, ...]
    """Findings of the hunt."""
    not_seen: tuple[str, ...]
    folder: Path

    @property
    def failing(self) -> bool:
        found = any(finding.level == FAILS for finding in self.checked.findings)
        found = found or (self.fit is not None and self.fit.word == FitWord.NO)
        return found or any(case.parts for case in self.cases)

    @property
    def undecided(self) -> str:
        """Returns why nothing can be said, "" if something can."""
        if self.checked.problem:
            return self.checked.problem
        whole = (text for text in self.not_seen if text.startswith("the schedule:"))
        asked = self.fit is not None and self.fit.capacity and self.fit.word is None
        fits = ("whether a step fits: its activations were not measured",) if asked else ()
        return next(iter((*whole, *self.unseen_cases, *fits)), "")

    @property
    def simulated(self) -> bool:
        """Whether a step was simulated, so that agreement of ranks means something."""
        return UNSIMULATED not in self.not_seen

    @property
    def unseen_cases(self) -> tuple[str, ...]:
        return tuple(case.unseen for case in self.cases if case.unseen)

    @property
    def state(self) -> AnswerState:
        return AnswerState.of(self.failing, self.undecided, AnswerState.NO_FAILURE)


def to_json(result: CheckResult) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "config": result.config,
        "layout": {str(axis): size for axis, size in result.layout.axes.items()},
        "ranks": result.ranks,
        "versions": dict(result.versions),
        "dtypes": result.dtypes,
        **result.state.to_json(),
        "undecided": result.undecided,
        **{k: v for k, v in dataclasses.asdict(result.checked).items()
           if k not in ("cases", "not_seen", "problem")},
        "cases": [
            {
                **dataclasses.asdict(one.case),
                "parts": one.parts,
                "verdict": str(one.diagnosis.verdict),
                "culprits": list(one.diagnosis.culprits),
                "first_divergence": dataclasses.asdict(one.diagnosis.first_divergence)
                if one.diagnosis.first_divergence else None,
            }
            for one in result.cases
        ],
        "costs": [{**dataclasses.asdict(cost), "sent": cost.sent} for cost in result.costs],
        "wires": [dataclasses.asdict(wire) for wire in result.wires],
        "memory": dataclasses.asdict(result.memory) if result.memory else None,
        "fit": dataclasses.asdict(result.fit) if result.fit else None,
        "fits": result.fit.word if result.fit else None,
        "known": [dataclasses.asdict(one) for one in result.known],
        "found": [dataclasses.asdict(one) for one in result.found],
        "not_seen": [*result.not_seen, *result.unseen_cases],
    }  # fmt: skip


def share(part: float, whole: float) -> float:
    return part / whole if whole and math.isfinite(whole) else 0.0
