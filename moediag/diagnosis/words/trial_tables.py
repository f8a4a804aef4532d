"""The tables of a trial: what each check reports of one step, what looks at a running job saw, and
what a program measured.

A fix is often checked with only one check. Equal replicas may all hold a wrong gradient, a router
that learns correctly may pass a wrong gradient down, and the loss of the first step is exact
whatever the backward does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moediag.diagnosis.end_states.whereabouts import program_line
from moediag.diagnosis.numbers import by_part
from moediag.diagnosis.numbers.by_part import Part
from moediag.diagnosis.numbers.gradients import GradientFacts
from moediag.diagnosis.numbers.replicas import GRADIENTS, ReplicaFacts
from moediag.evidence import looks
from moediag.evidence.looks import RankLook
from moediag.evidence.model import Evidence
from moediag.protocol.tolerance import SAME_LOSS
from moediag.records import dataclass
from moediag.result import Cell, Table
from moediag.result.wording import ranks

LOSS, REPLICAS, ROUTER, INPUT, OTHERS = "loss", "replicas", "router", "input", "others"
_NOTE = (
    "Errors of the first step: of the loss; of gradients that replicas should have alike, as "
    "shares of their norm; of the gradients of the router, of the block's input and of all others, "
    "as shares of the largest reference value. 0: within the tolerance."
)
LOOKS = "What the ranks did"
_LOOK_COLUMNS = ("ranks", "did", "at", "for at least", "CPU")
_GPU, _LAST = "GPU", "numbers there"
_MOST_NUMBERS = 3
_TIMES = 1e9  # numbers with a fraction from here on are seconds since 1970


@dataclass(frozen=True, slots=True)
class Seen:
    """What one detector saw in the first step."""

    detector: str
    error: float
    """Relative; infinite where only some ranks have the gradient."""
    wrong: bool
    """The error exceeds the tolerance."""


def seen(evidence: Evidence, numbers: GradientFacts, replicas: ReplicaFacts) -> tuple[Seen, ...]:
    """All five, in table order; empty where no block input was compared, which the table is about,
    or where the trial ran a whole model."""
    outcomes = [s.outcome for s in evidence.ranks.values() if s.outcome is not None]
    if not evidence.program or not any(o.inputs for o in outcomes):
        return ()
    found = by_part.parts(evidence, 1)
    loss = numbers.loss_error if numbers.step in (None, 1) else None
    apart = [d for d in replicas.found if d.what == GRADIENTS and d.step == 1]
    size = max((math.inf if d.size is None else d.size for d in apart), default=0.0)
    return (
        Seen(LOSS, loss or 0.0, (loss or 0.0) > SAME_LOSS),
        Seen(REPLICAS, size, bool(apart)),
        _of_parts(ROUTER, [p for p in found if p.kind == by_part.ROUTER]),
        _of_parts(INPUT, [p for p in found if p.kind == by_part.INPUT]),
        _of_parts(OTHERS, [p for p in found if p.kind in (by_part.EXPERTS, by_part.REST)]),
    )


def _of_parts(detector: str, of_kind: Sequence[Part]) -> Seen:
    wrong = [p for p in of_kind if p.wrong]
    errors = [p.error / p.scale if p.scale else math.inf for p in wrong]
    worst = math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)
    return Seen(detector, worst, bool(wrong))


def table(found: Sequence[Seen]) -> Table | None:
    """One row; the run's table stacks those of its variants."""
    if not found:
        return None
    who = [s.detector for s in found if s.wrong]
    row: tuple[Cell, ...] = (
        # Two digits: further ones differ between machines.
        *(float(f"{s.error:.2g}") if s.wrong else 0.0 for s in found),
        "wrong" if who else "right",
        ", ".join(who) or "-",
    )
    return Table(
        title="What each detector sees in step 1",
        columns=(*(s.detector for s in found), "judged", "seen by"),
        rows=(row,),
        note=_NOTE,
    )


def tables(evidence: Evidence) -> tuple[Table, ...]:
    """One table per title, in the order of the lowest rank. Rows that several ranks share appear
    once. Rows that begin with a word are sorted by it, because ranks take turns to report them.
    A table without rows is left out."""
    rows: dict[tuple[str, tuple[str, ...]], dict[tuple[Cell, ...], None]] = {}
    notes: dict[str, str] = {}
    for _, seen in sorted(evidence.ranks.items()):
        for table in seen.outcome.tables if seen.outcome is not None else ():
            key = (table.title, tuple(table.columns))
            rows.setdefault(key, {}).update({tuple(row): None for row in table.rows})
            notes.setdefault(table.title, table.note)
    return tuple(
        Table(title, columns, _sorted(tuple(found)), notes[title])
        for (title, columns), found in rows.items()
        if found
    )


def _sorted(rows: tuple[tuple[Cell, ...], ...]) -> tuple[tuple[Cell, ...], ...]:
    if all(isinstance(row[0], str) for row in rows):
        return tuple(sorted(rows, key=lambda row: str(row[0])))
    return rows


def looked(evidence: Evidence) -> Table | None:
    """None if the job was not looked at."""
    seen = evidence.looks
    if seen is None or not seen.ranks:
        return None
    together: dict[tuple[str, str], list[int]] = {}
    for rank, look in sorted(seen.ranks.items()):
        line = program_line(evidence.ranks[rank]) if rank in evidence.ranks else ""
        together.setdefault((_did(look), line), []).append(rank)
    gpus = any(look.gpu is not None for look in seen.ranks.values())
    rows = []
    for (did, line), who in together.items():
        those = [seen.ranks[rank] for rank in who]
        still = min(look.still for look in those)
        cpu = max(look.cpu for look in those)
        rows.append((ranks(who), did, line or None, f"{still:.0f} s" if still else None,
                     f"{cpu:.0%}", *((_gpu(those),) if gpus else ()),
                     _numbers(those) or None))  # fmt: skip
    return Table(LOOKS, (*_LOOK_COLUMNS, *((_GPU,) if gpus else ()), _LAST), tuple(rows))


def _gpu(those: list[RankLook]) -> str | None:
    known = [look.gpu for look in those if look.gpu is not None]
    return f"{max(known):.0%}" if known else None


def _did(look: RankLook) -> str:
    if look.does in (looks.IDLE, looks.STOPPED) and look.held:
        return look.held
    return look.words or {looks.WAITS: "waits in communication", looks.IDLE: "sleeps",
                          looks.ON_DEVICE: "waits for the device",
                          looks.MOVES: "moved on", looks.GONE: "ended",
                          looks.UNREAD: "could not be read"}.get(look.does, look.does)  # fmt: skip


def _numbers(those: list[RankLook]) -> str:
    """``step=3``: local variables that all of these ranks have alike; others say how many values
    there are. Times are left out."""
    told: list[str] = []
    for name in those[0].values:
        found = {look.values.get(name, "") for look in those}
        times = any("." in number and float(number) > _TIMES for number in found)
        if "" not in found and len(told) < _MOST_NUMBERS and not times:
            told.append(f"{name}={found.pop()}" if len(found) == 1 else f"{name}=({len(found)})")
    return ", ".join(told)
