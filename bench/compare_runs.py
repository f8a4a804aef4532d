"""Compare two run directories: every trial's verdict and culprits, and each rank's collectives.

Usage: python -m bench.compare_runs BEFORE AFTER [--skip SCENARIO]... [--json]

BEFORE and AFTER are what ``moediag run --out`` or ``moediag run --all --out`` wrote. Two ranks have
the same schedule when they issued the same sequence of (group, op, sizes, dtype, reduction, peer,
phase). Timing, addresses and log texts are not compared. Exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moediag.evidence.events import RankLog, read_log

RESULT = "result.json"
_LOG = re.compile(r"^rank-(\d+)\.events\.jsonl$")
Call = tuple[Any, ...]


@dataclass
class Comparison:
    """What was compared, and one line for each difference."""

    scenarios: int = 0
    # Trials with a verdict, and those that also met their expectation in both runs.
    trials: int = 0
    met: int = 0
    # Ranks whose recorded schedules were compared, and the calls of the first run.
    schedules: int = 0
    calls: int = 0
    differences: list[str] = field(default_factory=list)


def compare(before: Path, after: Path, skip: tuple[str, ...] = ()) -> Comparison:
    """All scenarios of two runs. A scenario or trial that only one of them has is a difference."""
    found = Comparison()
    first, second = _scenarios(before), _scenarios(after)
    for name in sorted((first.keys() | second.keys()) - set(skip)):
        if name not in first or name not in second:
            found.differences.append(f"{name}: only in {before if name in first else after}")
            continue
        found.scenarios += 1
        _compare_results(name, first[name], second[name], found)
        _compare_schedules(name, first[name], second[name], found)
    return found


def _scenarios(run: Path) -> dict[str, Path]:
    """Scenario -> its folder: ``run`` itself, or the folders of `run --all`."""
    places = (
        [run] if (run / RESULT).is_file() else [file.parent for file in run.glob(f"*/{RESULT}")]
    )
    return {str(_result(place)["scenario"]): place for place in places}


def _result(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / RESULT).read_text(encoding="utf-8"))
    return found


def _compare_results(name: str, before: Path, after: Path, found: Comparison) -> None:
    first, second = ({t["evidence"]: t for t in _result(p)["trials"]} for p in (before, after))
    for trial in sorted(first.keys() | second.keys()):
        if trial not in first or trial not in second:
            run = before if trial in first else after
            found.differences.append(f"{name}/{trial}: only in {run}")
            continue
        found.trials += 1
        found.met += bool(first[trial]["met"] and second[trial]["met"])
        for what in ("verdict", "culprits", "met"):
            one, other = first[trial][what], second[trial][what]
            if one != other:
                found.differences.append(f"{name}/{trial}: {what} {one} -> {other}")


def _compare_schedules(name: str, before: Path, after: Path, found: Comparison) -> None:
    first, second = _recorded(before), _recorded(after)
    for trial, rank in sorted(first & second):
        one, other = (_calls(read_log(p / trial, rank)) for p in (before, after))
        found.schedules += 1
        found.calls += len(one)
        if one != other:
            where = _difference(one, other)
            found.differences.append(f"{name}/{trial}: rank {rank}: {where}")
    for trial, rank in sorted(first ^ second):
        run = before if (trial, rank) in first else after
        found.differences.append(f"{name}/{trial}: rank {rank}: recorded only in {run}")


def _recorded(place: Path) -> set[tuple[str, int]]:
    """(Trial, rank) of every recorder log."""
    return {
        (file.parent.name, int(match[1]))
        for file in place.glob("*/rank-*.events.jsonl")
        if (match := _LOG.match(file.name))
    }


def _calls(log: RankLog) -> list[Call]:
    """What is the same in two runs of the same program; names of groups are not."""
    groups = {name: (group.ranks, group.axis) for name, group in log.groups.items()}
    return [
        (
            groups.get(call.group, call.group), call.op, call.numel_in, call.numel_out, call.dtype,
            call.reduce, call.peer, call.phase,
        )
        for call in log.collectives
    ]  # fmt: skip


def _difference(one: list[Call], other: list[Call]) -> str:
    for index, (a, b) in enumerate(zip(one, other)):  # noqa: B905 - lengths are compared below
        if a != b:
            return f"call {index}: {a} -> {b}"
    return f"{len(one)} calls -> {len(other)}; the shorter schedule is the beginning of the longer"


def _lines(found: Comparison) -> Iterator[str]:
    yield from found.differences
    yield (
        f"{found.scenarios} scenarios, {found.trials} trials ({found.met} met their expectation in "
        f"both runs), {found.schedules} ranks with {found.calls} recorded calls: "
        f"{len(found.differences)} differences"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--skip", action="append", default=[], metavar="SCENARIO")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    given = parser.parse_args(arguments)
    found = compare(given.before, given.after, tuple(given.skip))
    if not found.scenarios:
        parser.error(f"no {RESULT} in both {given.before} and {given.after}")
    text = json.dumps(asdict(found), indent=1) if given.json else "\n".join(_lines(found))
    sys.stdout.write(f"{text}\n")
    return int(bool(found.differences))


if __name__ == "__main__":
    sys.exit(main())
