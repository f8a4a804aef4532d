"""What a load-cost trial shows: whether each method delivered the right bytes, and its times.

Pure. Times are rank 0's, taken between barriers; wrong bytes are anybody's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moediag.evidence.model import Evidence
from moediag.protocol import LoadTiming
from moediag.result import Cell, Table
from moediag.result.wording import plural, ranks

BASELINE = "per-parameter"
GROWTH = " Growth: exponent of the number of parameters, 1 is in proportion to it."


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """``loads``: of the lowest rank that left any. ``wrong``: what was delivered wrong, in words, a
    method and size each; ``methods``: which did so."""

    loads: tuple[LoadTiming, ...] = ()
    wrong: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        methods = dict.fromkeys(load.method for load in self.loads)
        sizes = sorted({load.parameters for load in self.loads})
        span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        return (
            f"Models of {span} parameters, loaded by {plural(len(methods), 'method')}: each shard "
            "equals its cut of the true tensor bit by bit, on every rank and in every round."
        )


def load_facts(evidence: Evidence) -> LoadFacts:
    with_loads = {
        rank: seen.outcome.loads
        for rank, seen in sorted(evidence.ranks.items())
        if seen.outcome is not None and seen.outcome.loads
    }
    wrong: dict[tuple[str, int], dict[int, list[str]]] = {}
    for rank, loads in with_loads.items():
        for load in loads:
            if load.wrong:
                wrong.setdefault((load.method, load.parameters), {})[rank] = load.wrong
    told = tuple(
        f"{method} of {size:,} parameters delivered wrong bytes to {ranks(by_rank)} "
        f"(first in {next(iter(by_rank.values()))[0]})"
        for (method, size), by_rank in wrong.items()
    )
    methods = tuple(dict.fromkeys(method for method, _ in wrong))
    return LoadFacts(tuple(next(iter(with_loads.values()), ())), told, methods)


def load_tables(loads: Sequence[LoadTiming]) -> tuple[Table, ...]:
    """Two tables of whole loads and two of their communication alone: milliseconds with growth,
    and how many times faster than one broadcast per parameter. Empty without timings."""
    if not loads:
        return ()
    whole = {(load.method, load.parameters): load.seconds for load in loads}
    bare = {(load.method, load.parameters): load.communication for load in loads}
    size = max(loads, key=lambda load: load.parameters)
    what = f"{size.bytes / 1e6:,.4g} MB at {plural(size.parameters, 'parameter')}"
    rounds = plural(min(len(load.seconds) for load in loads), "round")
    tables = [
        _times(
            "Loading the weights, in ms",
            whole,
            f"From rank 0's full weights to a sharded model, {what}; median of {rounds}, taken in "
            "turn." + (GROWTH if len(_axes(whole)[1]) > 1 else ""),
        ),
        _faster("Loading, times faster than one broadcast per parameter", whole),
    ]
    if any(bare.values()):
        note = "The same collectives on buffers that exist, nothing else; median. Collectives: "
        note += f"of a whole load of {plural(size.parameters, 'parameter')}."
        table = _times("Communication alone, in ms", bare, note)
        tables += [_with_calls(table, loads), _faster("Communication, times faster", bare)]
    return tuple(table for table in tables if table.rows)


Timings = Mapping[tuple[str, int], Sequence[float]]  # method, parameters -> seconds by round


def growth(seconds: Mapping[int, float]) -> float | None:
    """The exponent e of ``parameters ** e`` that fits best (least squares of the logarithms).
    ``seconds``: by number of parameters; None with fewer than two sizes or a time of 0."""
    if len(seconds) < 2 or min(seconds.values()) <= 0:
        return None
    xs = [math.log(count) for count in seconds]
    ys = [math.log(time) for time in seconds.values()]
    return statistics.linear_regression(xs, ys).slope


def _axes(timings: Timings) -> tuple[list[str], list[int]]:
    return list(dict.fromkeys(m for m, _ in timings)), sorted({n for _, n in timings})


def _times(title: str, timings: Timings, note: str) -> Table:
    methods, sizes = _axes(timings)
    rows = []
    for method in methods:
        medians = {n: statistics.median(t) for n in sizes if (t := timings.get((method, n)))}
        exponent = growth(medians)
        largest = max(medians, default=0)
        row = (
            method,
            *(_rounded(medians.get(n), 1e3, 1) for n in sizes),
            _rounded(medians.get(largest), 1e6 / max(largest, 1), 1),
            _rounded(exponent, 1, 2),
        )
        rows.append(row if len(sizes) > 1 else row[:-1])
    columns = ("method", *(f"{n:,} parameters" for n in sizes), "per 1,000", "growth")
    columns = columns if len(sizes) > 1 else columns[:-1]
    return Table(title, columns, tuple(rows), note)


def _faster(title: str, timings: Timings) -> Table:
    """Round by round, so that what slowed the machine meanwhile slowed both."""
    methods, sizes = _axes(timings)
    rows = []
    for method in methods:
        cells: list[Cell] = []
        spread = ""
        for n in sizes:
            pairs = zip(timings.get((BASELINE, n), ()), timings.get((method, n), ()), strict=False)
            ratios = [base / own for base, own in pairs if own > 0]
            cells.append(_rounded(statistics.median(ratios), 1, 2) if ratios else None)
            if len(ratios) > 1:
                low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
                spread = f"{low:.2f} to {high:.2f}"
        if method != BASELINE and any(cell is not None for cell in cells):
            rows.append((method, *cells, spread or None))
    columns = ("method", *(f"{n:,} parameters" for n in sizes), f"quartiles at {sizes[-1]:,}")
    note = f"{BASELINE} / method, median of the ratio of each round; below 1 is slower."
    return Table(title, columns, tuple(rows), note)


def _with_calls(table: Table, loads: Sequence[LoadTiming]) -> Table:
    largest = max(load.parameters for load in loads)
    calls = {
        load.method: ", ".join(f"{number:,} {op}" for op, number in load.calls.items()) or "none"
        for load in loads
        if load.parameters == largest
    }
    rows = tuple((*row, calls.get(str(row[0]))) for row in table.rows)
    return Table(table.title, (*table.columns, "collectives"), rows, table.note)


def _rounded(value: float | None, factor: float, digits: int) -> float | None:
    return None if value is None else round(value * factor, digits)
