"""The order of cells: none twice, exact changes, runs on both sides of them; for thousands of
random histories."""

from __future__ import annotations

import itertools
import random

import pytest

from moediag.lab.campaign.matrix.cells import Cell, Key, Mode
from moediag.lab.campaign.matrix.work import Way, plan

SUBJECTS = ("s a", "s b")
WORDS = {
    "B": ("susceptible", True), "G": ("not-susceptible", False), "N": ("not-applicable", None),
    "S": ("could-not-run", None), "O": ("nonfinite", None),
}  # fmt: skip


def releases(count: int) -> list[str]:
    return [f"1.{number // 5}.{number % 5}" for number in range(count)]


def drive(way: Way, asked: list[str], listed: list[str], truth: dict[str, str]) -> list[Key]:
    """Returns all cells in order. ``truth``: subject -> a letter for each release."""
    cells: dict[Key, Cell] = {}
    made: list[Key] = []
    while True:
        work = plan(way, SUBJECTS, asked, listed, cells).work
        if not work:
            return made
        for subject, version, mode in work:
            verdict, shows = WORDS[truth[subject][listed.index(version)]]
            cell = Cell(subject, version, mode, verdict, shows)
            assert cell.key not in cells, "made again"
            cells[cell.key] = cell
            made.append(cell.key)
        assert len(made) <= 2 * len(SUBJECTS) * len(listed)


@pytest.mark.parametrize("way", [Way.REAL, Way.FAST])
def test_every_cell_is_planned_once_release_by_release(way: Way) -> None:
    listed = releases(12)
    made = drive(way, listed[::3], listed, dict.fromkeys(SUBJECTS, "GBGBGBGBGBGB"))
    mode = Mode.REAL if way == Way.REAL else Mode.FAST
    assert made == [(s, v, mode) for v in listed[::3] for s in SUBJECTS]


def test_runs_are_planned_on_both_sides_of_a_change() -> None:
    listed = releases(20)
    truth = {"s a": "G" * 7 + "B" * 13, "s b": "G" * 20}
    made = drive(Way.CONFIRM, listed[4::5], listed, truth)
    real = {(s, v) for s, v, mode in made if mode == Mode.REAL}
    assert {("s a", listed[6]), ("s a", listed[7])} <= real
    # both ends of the table; without a change only those
    assert {v for s, v in real if s == "s b"} == {listed[4], listed[19]}
    fast = [v for s, v, mode in made if (s, mode) == ("s a", Mode.FAST)]
    assert len(fast) == len(set(fast)) <= 4 + 3


@pytest.mark.parametrize("seed", range(300))
def test_every_change_is_located_and_run_on_both_sides(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(2, 40)
    listed = releases(count)
    asked = sorted(rng.sample(range(count), rng.randrange(1, count + 1)))
    truth = {s: "".join(rng.choices("BGNSO", [5, 5, 1, 1, 1], k=count)) for s in SUBJECTS}
    made = drive(Way.CONFIRM, [listed[i] for i in asked], listed, truth)
    assert len(made) == len(set(made))
    for subject in SUBJECTS:
        fast = sorted(listed.index(v) for s, v, m in made if (s, m) == (subject, Mode.FAST))
        real = {listed.index(v) for s, v, m in made if (s, m) == (subject, Mode.REAL)}
        assert real <= set(fast)
        told = [i for i in fast if truth[subject][i] != "S"]
        for old, new in itertools.pairwise(told):
            pair = truth[subject][old] + truth[subject][new]
            if pair in ("BG", "GB"):
                between = set(range(old + 1, new))
                assert between <= set(fast), "a release between was not tried"
            if pair[0] != pair[1]:
                assert {i for i in (old, new) if truth[subject][i] != "N"} <= real
        assert {i for i in fast if truth[subject][i] == "S"} <= real


def test_later_releases_run_only_their_cells() -> None:
    listed = releases(10)
    cells = {
        (s, v, Mode.REAL): Cell(s, v, Mode.REAL, "clean", False)
        for s in SUBJECTS for v in listed[:4]
    }  # fmt: skip
    work = plan(Way.REAL, (*SUBJECTS, "s c"), listed[:5], listed, cells).work
    assert {(s, v) for s, v, _ in work} == {
        *(("s c", v) for v in listed[:5]), *((s, listed[4]) for s in SUBJECTS)
    }  # fmt: skip
