"""Known histories of releases, and a driver that runs a search against one."""

from __future__ import annotations

import random
from collections.abc import Callable

from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD, ProbeVerdict, flaky, other, skip
from moediag.lab.campaign.bisect.search.answer import Answer
from moediag.lab.campaign.bisect.search.search import Probe, Search

KINDS = {
    "B": BAD,
    "G": GOOD,
    "O": other("crash:KeyError:elsewhere.py load:one-rank"),
    "S": skip("it cannot be imported"),
    "F": flaky(1, 1),
    "N": skip("not-applicable: this release has no such family"),
}


def history(letters: str) -> Callable[[Probe], ProbeVerdict]:
    """The same verdict whenever a release is probed; index 0 is the first letter."""
    return lambda probe: KINDS[letters[probe.index]]


def drive(
    search: Search,
    world: Callable[[Probe], ProbeVerdict],
    jobs: int = 1,
    shuffled: random.Random | None = None,
) -> tuple[Answer, list[Probe]]:
    """Runs ``jobs`` probes at once until there is an answer; with ``shuffled`` they finish in any
    order, and those that are no longer wanted run on. Returns the answer and all probes made."""
    running: list[Probe] = []
    made: list[Probe] = []
    while search.answer is None:
        for probe in search.next(jobs):
            if probe not in running and len(running) < jobs:
                running.append(probe)
                made.append(probe)
        place = shuffled.randrange(len(running)) if shuffled else 0
        probe = running.pop(place)
        search.told(probe, world(probe))
        assert len(made) < 10 * search.count + 20, "the search does not end"
    assert search.next(jobs) == []
    assert len(set(made)) == len(made), "a finished probe was made again"
    return search.answer, made


def tightest(letters: str, bad: int, sign: int) -> tuple[int, int | None]:
    """By looking at everything: of one stretch of bad releases around ``bad`` and good ones beyond
    it, (outermost bad, innermost good or None) in the direction ``sign``."""
    outwards = range(bad + sign, len(letters) if sign > 0 else -1, sign)
    good = next((i for i in outwards if letters[i] == "G"), None)
    inside = [i for i in outwards if letters[i] == "B" and (good is None or (good - i) * sign > 0)]
    return (inside[-1] if inside else bad), good


def one_stretch(rng: random.Random, count: int, unknown: str = "OSF") -> tuple[str, int]:
    """Good, bad, good with unknown ones inserted at a random density; (letters, a bad index)."""
    start = rng.randrange(count)
    end = rng.randint(start + 1, count)
    letters = ["B" if start <= i < end else "G" for i in range(count)]
    bad = rng.randrange(start, end)
    if unknown:
        density = rng.choice([0, 0.05, 0.2, 0.5, 0.9])
        stretch = rng.randrange(count)
        length = rng.choice([0, 0, 2, count // 3])
        for i in range(count):
            if i != bad and (rng.random() < density or stretch <= i < stretch + length):
                letters[i] = rng.choice(unknown)
    return "".join(letters), bad
