"""Which rank holds which experts at each moment, in words and as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moediag.evidence.model import Evidence, HeldWeights
from moediag.result import Table
from moediag.result.wording import compact, plural

if TYPE_CHECKING:
    from moediag.protocol import ExpertRows

HEADINGS = {"loaded": "after loading", "prepared": "after sharding", "resumed": "after resuming"}
# Shown, not judged: by design the other ranks hold nothing yet.
BY_RANK_0 = "loaded by rank 0"
AT_REST = ("loaded", "prepared", "resumed")


def moments_of(evidence: Evidence) -> dict[str, dict[int, HeldWeights]]:
    """Moment -> rank -> what the rank held then."""
    found: dict[str, dict[int, HeldWeights]] = {}
    for rank, seen in sorted(evidence.ranks.items()):
        for held in seen.weights:
            found.setdefault(held.when, {})[rank] = held
    return found


def by_parameter(now: Mapping[int, HeldWeights]) -> dict[str, dict[int, ExpertRows]]:
    """FQN of an expert parameter -> rank -> its rows."""
    found: dict[str, dict[int, ExpertRows]] = {}
    for rank, weights in now.items():
        for rows in weights.experts:
            found.setdefault(rows.fqn, {})[rank] = rows
    return found


def numbers(experts: Sequence[int]) -> str:
    """``0-3, 6``; ``none of the checkpoint's`` for rows that match no expert."""
    known = sorted({e for e in experts if e >= 0})
    if not known:
        return "none of the checkpoint's" if experts else "nothing"
    runs: list[list[int]] = []
    for expert in known:
        if runs and expert == runs[-1][1] + 1:
            runs[-1][1] = expert
        else:
            runs.append([expert, expert])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    lost = sum(1 for e in experts if e < 0)
    return f"{text} and {plural(lost, 'row')} of none" if lost else text


def tables(evidence: Evidence, lost: bool) -> tuple[Table, ...]:
    """Tables of the experts on each rank at each moment; if experts were ``lost``, also values."""
    moments = moments_of(evidence)
    if not any(by_parameter(now) for now in moments.values()):
        return ()
    held = _table(
        "Experts held by each rank, matched with the checkpoint's bytes", moments, _held_cell
    )
    if not lost:
        return (held,)
    fqn = next(fqn for now in moments.values() for fqn in by_parameter(now))
    only = {
        when: {
            rank: replace(weights, experts=tuple(r for r in weights.experts if r.fqn == fqn))
            for rank, weights in now.items()
        }
        for when, now in moments.items()
    }
    values = _table(f"First value of {fqn} on each rank", only, _value_cell)
    should = {
        f"rank {rank}": rows.should
        for now in only.values()
        for rank, weights in now.items()
        for rows in weights.experts
    }
    lines = tuple((*row, _value(should.get(str(row[0])))) for row in values.rows)
    return held, replace(values, columns=(*values.columns, "checkpoint"), rows=lines, note="")


def _table(
    title: str,
    moments: Mapping[str, Mapping[int, HeldWeights]],
    cell: Callable[[ExpertRows, str], str],
) -> Table:
    """One row per rank where all expert parameters agree, else one per rank and parameter."""
    cells: dict[str, dict[int, dict[str, str]]] = {}
    for when, now in moments.items():
        for fqn, by_rank in by_parameter(now).items():
            for rank, rows in by_rank.items():
                row = cells.setdefault(fqn, {}).setdefault(rank, {})
                row["loaded" if when == BY_RANK_0 else when] = cell(rows, when)
    columns = [when for when in AT_REST if when != "resumed" or when in moments]
    alike: dict[str, list[str]] = {}
    for fqn, by_rank_of in cells.items():
        alike.setdefault(repr(sorted(by_rank_of.items())), []).append(fqn)
    lines: list[tuple[str, ...]] = []
    for names in alike.values():
        for rank, row in sorted(cells[names[0]].items()):
            line = (f"rank {rank}", *(row.get(when, "-") for when in columns))
            lines.append(line if len(alike) == 1 else (", ".join(compact(names)), *line))
    first = () if len(alike) == 1 else ("parameter",)
    return Table(
        title=title,
        columns=(*first, "rank", *(HEADINGS[when] for when in columns)),
        rows=tuple(lines),
        note=f"of {', '.join(compact(cells))}" if len(alike) == 1 else "",
    )


def _held_cell(rows: ExpertRows, when: str) -> str:
    if when == BY_RANK_0 and rows.held and max(rows.held) < 0:
        return "nothing yet: rank 0 loads"
    return f"{numbers(rows.held)} ({rows.placement})"


def _value_cell(rows: ExpertRows, when: str) -> str:
    if when == BY_RANK_0 and rows.held and max(rows.held) < 0:
        return "nothing yet"
    return _value(rows.first)


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.7f}"
