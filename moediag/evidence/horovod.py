"""Horovod's report of tensors that only some ranks have submitted.

Formats: horovod/horovod, common/stall_inspector.cc (``Missing ranks:`` since 0.21, ``Stalled
ranks:`` since 0.16.3), common/operations.cc (``[missing ranks: 0]`` since 0.14) and
tensorflow/mpi_ops.cc (``[ready ranks: 3]`` before). It repeats until all ranks have come: a job
that then goes on was slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from moediag.evidence.model import Report
from moediag.result.wording import plural, ranks

_BEGINS = re.compile(
    r"tensors were submitted to be.{0,200}?waiting for remainder of ranks for more than "
    r"(?P<seconds>\d{1,9}) seconds",
    re.DOTALL,
)
_TENSOR = re.compile(
    r"(?:^|(?<=[ ,\]\n]))(?P<name>[^\s,\[\]]{1,300}) "
    r"\[(?P<what>ready|missing) ranks: (?P<ranks>[\d, ]+)"
)
_RANK = re.compile(r"^(?P<rank>\d{1,7})!?: \[(?P<names>[^\]\n]{1,4000})\]?", re.MULTILINE)
#: A line of training after a report: the ranks came.
GOES_ON = re.compile(r"\b(?:step|epoch|iter(?:ation)?|loss)\b[^\n]{0,40}\d", re.IGNORECASE)
_MOST_NAMES = 3


def read(text: str) -> tuple[Report, ...]:
    """What the last report in a text says; () without any."""
    begins = list(_BEGINS.finditer(text))
    if not begins:
        return ()
    seconds = float(begins[-1]["seconds"])
    part = text[begins[-1].end() :]
    missing: dict[str, set[int]] = {}
    ready: dict[str, set[int]] = {}
    end = 0
    for one in _TENSOR.finditer(part):
        of = ready if one["what"] == "ready" else missing
        of.setdefault(one["name"], set()).update(map(int, re.findall(r"\d{1,7}", one["ranks"])))
        end = one.end()
    for one in _RANK.finditer(part):
        for name in re.findall(r"[^\s,]+", one["names"].removesuffix(" ...")):
            missing.setdefault(name, set()).add(int(one["rank"]))
        end = max(end, one.end())
    if GOES_ON.search(part, end):
        told = f"Horovod reported ranks that came more than {seconds:g} s late"
        return (Report("stall-over", text=told, seconds=seconds),)
    if not missing and not ready:
        return ()
    return (_report(missing, ready, seconds),)


def _report(missing: dict[str, set[int]], ready: dict[str, set[int]], seconds: float) -> Report:
    absent = set().union(*missing.values())
    size = max(absent.union(*ready.values()), default=-1) + 1
    if len(absent) == 1:
        said = _names(missing)
        return Report(
            "not-submitted", about=tuple(absent), size=max(2, size), seconds=seconds, detail=said
        )
    pieces = [
        f"{ranks(who)} did not submit {_names(names)}" for who, names in _by_ranks(missing)
    ] + [f"{ranks(who)} submitted {_names(names)}" for who, names in _by_ranks(ready)]
    return Report("submitted-apart", size=size, seconds=seconds, detail="; ".join(pieces))


def _by_ranks(tensors: dict[str, set[int]]) -> list[tuple[tuple[int, ...], list[str]]]:
    found: dict[tuple[int, ...], list[str]] = {}
    for name, who in tensors.items():
        found.setdefault(tuple(sorted(who)), []).append(name)
    return list(found.items())


def _names(names: Iterable[str] | Sequence[str]) -> str:
    known = list(names)
    more = len(known) - _MOST_NAMES
    return ", ".join(known[:_MOST_NAMES]) + (
        f" and {plural(more, 'more tensor')}" if more > 0 else ""
    )
