"""The page of a run: whether each method delivered the right bytes, and how long it took.

Times are rank 0's, taken between barriers; wrong bytes are those of any rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from bench.load_cost.timing import RankTimings, Timing
from moediag.report.tables import markdown
from moediag.result import Cell, Table
from moediag.result.wording import plural, ranks

BASELINE = "per-parameter"
GROWTH = " Growth: exponent of the number of parameters, 1 is in proportion to it."


def page(by_rank: Mapping[int, RankTimings], command: str) -> str:
    """The page in markdown."""
    first = by_rank[min(by_rank)]
    versions = ", ".join(f"{name} {v}" for name, v in first.versions.items() if v is not None)
    found = wrong(by_rank)
    bytes_line = (
        "**Wrong bytes, so the times mean nothing:** " + "; ".join(found)
        if found
        else "Each shard equals its cut of the true tensor bit by bit, on every rank and in every "
        "round."
    )
    lines = [f"`{command}`", "", versions, "", bytes_line, ""]
    lines += [f"- {note}" for note in dict.fromkeys(n for r in by_rank.values() for n in r.notes)]
    return "\n".join([*lines, "", *map(markdown, tables(first.timings))])


def wrong(by_rank: Mapping[int, RankTimings]) -> list[str]:
    """One sentence for each method and size that delivered wrong bytes; empty when none did."""
    found: dict[tuple[str, int], dict[int, list[str]]] = {}
    for rank, measured in sorted(by_rank.items()):
        for one in measured.timings:
            if one.wrong:
                found.setdefault((one.method, one.parameters), {})[rank] = one.wrong
    return [
        f"{method} of {size:,} parameters delivered wrong bytes to {ranks(names)} "
        f"(first in {next(iter(names.values()))[0]})"
        for (method, size), names in found.items()
    ]


def tables(loads: Sequence[Timing]) -> tuple[Table, ...]:
    """Two tables of whole loads and two of their communication alone.

    They hold milliseconds with growth, and how many times faster a method is than one broadcast per
    parameter. Empty without timings.
    """
    if not loads:
        return ()
    whole = {(load.method, load.parameters): load.seconds for load in loads}
    bare = {(load.method, load.parameters): load.communication for load in loads}
    size = max(loads, key=lambda load: load.parameters)
    what = f"{size.bytes / 1e6:,.4g} MB at {plural(size.parameters, 'parameter')}"
    rounds = plural(min(len(load.seconds) for load in loads), "round")
    found = [
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
        found += [_with_calls(table, loads), _faster("Communication, times faster", bare)]
    return tuple(table for table in found if table.rows)


Timings = Mapping[tuple[str, int], Sequence[float]]  # method, parameters -> seconds by round


def growth(seconds: Mapping[int, float]) -> float | None:
    """The exponent e with which ``parameters ** e`` fits best (least squares of the logarithms).

    ``seconds`` is by number of parameters. None with fewer than two sizes or a time of 0.
    """
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
    """Ratios taken round by round: what slows the machine during a round slows both."""
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


def _with_calls(table: Table, loads: Sequence[Timing]) -> Table:
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
