"""Dumps of two attempts of one job, whose groups are equal."""

from __future__ import annotations

import pytest

from bench import jobs
from bench.jobs.dimensions import _shift
from moediag.evidence import flight_dump
from moediag.evidence.flight_calls import Dump
from moediag.evidence.one_job import jobs as of_jobs

RING = 20  # calls: attempts of different lengths then have none in common


def dumps(steps: int, seconds: float = 0.0) -> dict[int, Dump]:
    job = jobs.faulty(jobs.healthy(jobs.Layout(dp=8), steps), "stuck", 1)
    raw = dict(jobs.dumps(job, ring=RING, timing=False))
    for one in raw.values():
        _shift(one, seconds)
    return {rank: flight_dump.read(one) for rank, one in raw.items()}


def parts(first: dict[int, Dump], second: dict[int, Dump]) -> list[list[int]]:
    both = {**{r: first[r] for r in range(4)}, **{r: second[r] for r in range(4, 8)}}
    return sorted(sorted(job.ranks) for job in of_jobs(both))


@pytest.mark.parametrize("minutes", [3, 5, 10])
def test_calls_that_completed_before_others_issued_them_are_of_another_attempt(
    minutes: float,
) -> None:
    assert parts(dumps(12), dumps(3, minutes * 60)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_one_attempt_stays_together_although_ranks_are_apart() -> None:
    assert parts(dumps(12), dumps(12)) == [list(range(8))]
    # A rank that is behind and issued nothing meanwhile: the others wait for it.
    assert parts(dumps(12, 300), dumps(3)) == [list(range(8))]


def test_without_times_nothing_is_concluded() -> None:
    early, late = dumps(12), dumps(3, 600)
    for one in (*early.values(), *late.values()):
        one.created = type(one.created)("q", [0] * len(one.created))
    assert parts(early, late) == [list(range(8))]
