"""The summary of `moediag run --all`: one row per scenario."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from moediag.errors import ExitCode
from moediag.protocol import write_json
from moediag.records import dataclass
from moediag.result import Cell, Effect, RunResult, Table, wording
from moediag.result.answer_blocks import Answer, AnswerState, Row, Section

SUMMARY_FILE = "summary.json"
STATUS = {
    ExitCode.OK: "as expected",
    ExitCode.FAILURE_FOUND: "BROKEN",
    ExitCode.INCONCLUSIVE: "inconclusive",
    ExitCode.BUG: "BUG",
}
OTHER = "did not run"
STYLES = {"BROKEN": "bad", "BUG": "bad"}
# The worst comes last; what is not listed could not run here.
_WORSE = {
    ExitCode.OK: AnswerState.AS_EXPECTED,
    ExitCode.INCONCLUSIVE: AnswerState.INCONCLUSIVE,
    ExitCode.BUG: AnswerState.BUG,
    ExitCode.FAILURE_FOUND: AnswerState.BROKEN,
}


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One scenario."""

    scenario: str
    exit_code: int  # that of `moediag run` of this scenario alone
    problem: str = ""  # why there is no result, or no complete one
    world_size: int | None = None
    met: int = 0  # number of expectations that were met
    expected: int = 0  # number of expectations
    reproduced: int = 0  # number of claims that reproduced
    claims: int = 0  # number of claims
    fixes: dict[str, int] = dataclasses.field(default_factory=dict)  # effect -> number
    broken: tuple[str, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of(cls, scenario: str, result: RunResult | None, exit_code: int, problem: str,
           seconds: float, world_size: int) -> SweepRow:  # fmt: skip
        if result is None:
            return cls(scenario, exit_code, problem, world_size, seconds=seconds)
        judged = [t for t in result.trials if t.expected]
        effects = [fix.effect for fix in result.conclusion.fixes if fix.effect]
        return cls(
            scenario,
            exit_code,
            problem or result.incomplete,
            world_size,
            met=sum(t.met for t in judged),
            expected=len(judged),
            reproduced=sum(claim.reproduced is True for claim in result.conclusion.claims),
            claims=len(result.conclusion.claims),
            fixes={str(e): effects.count(str(e)) for e in Effect if str(e) in effects},
            broken=tuple(f"{t.variant}: {t.verdict}, expected {t.expected}"
                         for t in judged if not t.met),
            seconds=seconds,
        )  # fmt: skip

    @property
    def status(self) -> str:
        return STATUS.get(self.exit_code, OTHER)


@dataclass(frozen=True, slots=True)
class Sweep:
    """``planned``: every scenario in running order; ``rows``: the finished ones."""

    started: str  # ISO 8601, UTC
    moediag_version: str
    machine: dict[str, Any]
    seconds: float
    planned: tuple[str, ...]
    rows: tuple[SweepRow, ...]
    overrides: tuple[str, ...] = ()  # as typed for all scenarios, if they change what is measured
    schema_version: int = 1

    @property
    def state(self) -> AnswerState:
        """Returns broken if an expectation was, else a bug, else inconclusive (also if
        some could not run); as expected only if every scenario ran and is."""
        codes = {row.exit_code for row in self.rows}
        known = [state for code, state in _WORSE.items() if code in codes]
        if not known:
            return AnswerState.CANNOT_RUN if codes else AnswerState.INCONCLUSIVE
        missing = len(self.rows) < len(self.planned) or codes - set(_WORSE)
        as_expected = known[-1] == AnswerState.AS_EXPECTED
        return AnswerState.INCONCLUSIVE if as_expected and missing else known[-1]

    def to_json(self) -> dict[str, Any]:
        rows = [{**dataclasses.asdict(row), "status": row.status} for row in self.rows]
        return {**dataclasses.asdict(self), "rows": rows}

    def write(self, folder: Path) -> Path:
        return write_json(folder / SUMMARY_FILE, answer(self).to_json())


def answer(sweep: Sweep, folder: str = "") -> Answer:
    """Returns the page. ``folder``: the sweep's, as a user would type it."""
    rows = [
        Row(row.scenario, text, STYLES.get(row.status, "doubt"))
        for row in sweep.rows
        for text in filter(None, (row.problem, *row.broken))
    ]
    head = ("scenario", "ranks", "expected", "reproduced", "fixes", "time", "")
    table = Table("scenarios", head, tuple(map(_cells, sweep.rows)))
    return Answer(
        "run",
        "moediag run --all",
        sweep.state,
        _conclusion(sweep),
        (Section(tuple(rows), "Not as expected"), Section((table,))),
        (
            *(Row("WHAT", f"{row.label}: {row.text}", row.style) for row in rows[:1]),
            Row("NEXT", f"moediag report {folder}/*/ --html page.html"),
        ),
        facts=sweep.to_json(),
    )


def _conclusion(sweep: Sweep) -> str:
    """Returns ``41 scenarios (40 as expected, 1 BROKEN); 511 of 512 expectations met; 12 min``."""
    statuses = [row.status for row in sweep.rows]
    parts = [f"{statuses.count(s)} {s}" for s in (*STATUS.values(), OTHER) if s in statuses]
    left = len(sweep.planned) - len(sweep.rows)
    parts += [f"{left} not begun"] if left else []
    met, expected = sum(r.met for r in sweep.rows), sum(r.expected for r in sweep.rows)
    return (
        f"{wording.plural(len(sweep.planned), 'scenario')} ({', '.join(parts)}); {met} of "
        f"{wording.plural(expected, 'expectation')} met; {wording.seconds(sweep.seconds)}"
        + (f"; with {' '.join(sweep.overrides)}" if sweep.overrides else "")
    )


def _cells(row: SweepRow) -> tuple[Cell, ...]:
    return (
        row.scenario,
        row.world_size,
        f"{row.met} of {row.expected}" if row.expected else "",
        f"{row.reproduced} of {row.claims}" if row.claims else "",
        ", ".join(f"{number} {effect}" for effect, number in row.fixes.items()),
        wording.seconds(row.seconds) if row.seconds else "",
        row.status,
    )
