"""The summary of `moediag run --all`: one row per scenario, as data, terminal text and markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moediag.errors import ExitCode
from moediag.protocol import write_json
from moediag.records import dataclass
from moediag.report.terminal import WIDEST, show
from moediag.report.text_layout import Line, columns, labelled
from moediag.result import Effect, RunResult, wording

if TYPE_CHECKING:
    from rich.console import Console

SUMMARY_FILE = "summary.json"
STATUS = {
    ExitCode.OK: "as expected",
    ExitCode.FAILURE_FOUND: "BROKEN",
    ExitCode.INCONCLUSIVE: "inconclusive",
    ExitCode.BUG: "BUG",
}
OTHER = "did not run"
_STYLE = {"as expected": "good", "BROKEN": "bad", "BUG": "bad"}
# The worst comes last; what is not listed could not run here.
_WORSE = (ExitCode.OK, ExitCode.INCONCLUSIVE, ExitCode.BUG, ExitCode.FAILURE_FOUND)


@dataclass(frozen=True, slots=True)
class Row:
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
           seconds: float, world_size: int) -> Row:  # fmt: skip
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

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Row:
        return cls(**{**raw, "broken": tuple(raw["broken"])})

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
    rows: tuple[Row, ...]
    overrides: tuple[str, ...] = ()  # as typed for all scenarios, if they change what is measured
    schema_version: int = 1

    @property
    def exit_code(self) -> int:
        """Returns 1 if an expectation was broken, else 5, else 3 (inconclusive, or some could not
        run), 4 if none could run, 0 if all is as expected."""
        codes = {row.exit_code for row in self.rows}
        known = [code for code in _WORSE if code in codes]
        if not known:
            return ExitCode.CANNOT_RUN_HERE if codes else ExitCode.INCONCLUSIVE
        missing = len(self.rows) < len(self.planned) or codes - set(_WORSE)
        worst = known[-1]
        return ExitCode.INCONCLUSIVE if worst == ExitCode.OK and missing else worst

    def to_json(self) -> dict[str, Any]:
        rows = [{**dataclasses.asdict(row), "status": row.status} for row in self.rows]
        return {**dataclasses.asdict(self), "rows": rows, "exit_code": self.exit_code}

    def write(self, folder: Path) -> Path:
        return write_json(folder / SUMMARY_FILE, self.to_json())


def render(sweep: Sweep, console: Console, folder: str) -> None:
    for line in lines(sweep, folder, min(console.width, WIDEST)):
        show(line, console)


def lines(sweep: Sweep, folder: str, width: int) -> Iterator[Line]:
    head = ["scenario", "ranks", "expected", "reproduced", "fixes", "time", ""]
    cells = columns([head, *(_cells(row) for row in sweep.rows)])
    yield ((" " + "  ".join(cells[0]).rstrip(), "label"),)
    for row, texts in zip(sweep.rows, cells[1:], strict=True):
        yield (" " + "  ".join(texts[:-1]) + "  ", "plain"), (row.status, _style(row))
    for row in sweep.rows:
        for text in filter(None, (row.problem, *row.broken)):
            yield from labelled(f"{row.scenario} ", text, width, _style(row))
    yield from labelled("RESULT", sentence(sweep), width, "plain")
    yield from labelled("EVIDENCE", folder, width)
    yield from labelled("NEXT", f"moediag report {folder}/*/ --html page.html", width)


def sentence(sweep: Sweep) -> str:
    """Returns ``41 scenarios, 512 trials judged: 40 as expected, 1 BROKEN; 12 min``."""
    statuses = [row.status for row in sweep.rows]
    parts = [f"{statuses.count(s)} {s}" for s in (*STATUS.values(), OTHER) if s in statuses]
    left = len(sweep.planned) - len(sweep.rows)
    parts += [f"{left} not begun"] if left else []
    met, expected = sum(r.met for r in sweep.rows), sum(r.expected for r in sweep.rows)
    return (
        f"{wording.plural(len(sweep.planned), 'scenario')}: {', '.join(parts)}; {met} of "
        f"{wording.plural(expected, 'expectation')} met; {wording.seconds(sweep.seconds)}"
        + (f"; with {' '.join(sweep.overrides)}" if sweep.overrides else "")
    )


def markdown(sweep: Sweep) -> str:
    """Returns a table for an issue or a step summary."""
    head = ("scenario", "ranks", "expectations met", "claims reproduced", "fixes", "time", "")
    rows = [head, ("---",) * len(head), *(tuple(_cells(row)) for row in sweep.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{sentence(sweep)}\n"


def _cells(row: Row) -> Sequence[str]:
    return [
        row.scenario,
        "" if row.world_size is None else str(row.world_size),
        f"{row.met} of {row.expected}" if row.expected else "",
        f"{row.reproduced} of {row.claims}" if row.claims else "",
        ", ".join(f"{number} {effect}" for effect, number in row.fixes.items()),
        wording.seconds(row.seconds) if row.seconds else "",
        row.status,
    ]


def _style(row: Row) -> str:
    return _STYLE.get(row.status, "doubt")
