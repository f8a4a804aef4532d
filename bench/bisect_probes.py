"""Counts the probes of a bisect against the minimum for halving, and times them.

The count is a simulation: no process, every history of one stretch of bad releases. The wall time
is real: `moediag bisect` on environments that are built, on a cache that is empty, and a plain
serial bisect (a new environment and a torchrun for each probe). ``python -m bench --bisect`` runs
it; it takes some ten minutes and an index.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD
from moediag.lab.campaign.bisect.search.search import Options, Probe, Search
from moediag.lab.stacks import environment
from moediag.lab.stacks.base import ENV_CACHE

HERE = Path(__file__).parent
CHECKS = 4  # both ends, and both neighbours of the boundary again
COUNTS = (8, 20, 50, 132)
# A stretch of real releases around a boundary, for the wall time.
GOOD_END, BAD_END = "4.51.0", "4.53.3"


def probes_made(count: int, first_bad: int, bad: int, good: int | None) -> int:
    """Returns the number of probes until the answer, one at a time. Without ``good`` the search
    takes growing steps. Raises AssertionError if the answer is wrong."""
    search = Search(count, Options(bad=bad, good=good))
    made = 0
    while search.answer is None:
        (probe,) = search.next(1)
        search.told(probe, _truth(probe, first_bad))
        made += 1
    assert search.answer.began is not None
    assert (search.answer.began.bad, search.answer.began.good) == (first_bad, first_bad - 1)
    return made


def _truth(probe: Probe, first_bad: int) -> object:
    return BAD if probe.index >= first_bad else GOOD


def fewest(distance: int) -> int:
    """Returns the halvings for ``distance`` releases, plus the checks."""
    return math.ceil(math.log2(distance)) + CHECKS


def ratios(count: int, given: bool) -> Iterator[float]:
    """Yields (probes made : the minimum) for every position of the boundary. Without a good end the
    minimum is that of a search that knows the oldest release."""
    for first_bad in range(1, count):
        made = probes_made(count, first_bad, count - 1, 0 if given else None)
        yield made / fewest(count - 1)


def both_ends_given() -> tuple[float, str]:
    """Returns the worst ratio over :data:`COUNTS`."""
    worst = {count: max(ratios(count, given=True)) for count in COUNTS}
    return max(worst.values()), f"worst of all boundaries in {_counts()} releases"


def no_good_end() -> tuple[float, str]:
    found = [ratio for count in COUNTS for ratio in ratios(count, given=False)]
    mean = sum(found) / len(found)
    return max(found), f"worst; mean {mean:.2f}; growing steps, then halving"


def _counts() -> str:
    return ", ".join(map(str, COUNTS))


# ------------------------------------------------------------------------ wall time


def warm_against_serial() -> tuple[float, str]:
    """Returns (the same probes one after the other, each in a new environment, each trial by
    torchrun : `moediag bisect` with environments built). The plain probes compare nothing."""
    with tempfile.TemporaryDirectory() as folder:
        _bisect(f"{folder}/first")  # builds what is missing
        warm, probes, trials = _bisect(f"{folder}/warm")
        two, *_ = _bisect(f"{folder}/two", "--jobs", "2")
        cold, *_ = _bisect(f"{folder}/cold", MOEDIAG_CACHE=f"{folder}/cache")
    first, again = _plain_probe()
    serial = first * probes + again * (trials - probes)
    detail = (
        f"warm {warm:.0f} s, with --jobs 2 {two:.0f} s, cold {cold:.0f} s; plain {serial:.0f} s: "
        f"{first:.1f} s for environment and first trial, {again:.1f} s for each other trial"
    )
    return serial / warm, f"{probes} probes, {trials} trials: {detail}"


def _bisect(out: str, *options: str, **variables: str) -> tuple[float, int, int]:
    """Returns the seconds, and how many probes and trials were made."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "moediag", "bisect", "expert-starvation", "--cpu", "2",
               "--good", GOOD_END, "--bad", BAD_END, "--json", "--out", out, *options]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800,
                   env={**os.environ, **variables})  # fmt: skip
    took = time.perf_counter() - began
    probes = [json.loads(file.read_text()) for file in Path(out).glob("probes/*/result.json")]
    return took, len(probes), sum(len(probe["trials"]) for probe in probes)


def _plain_probe() -> tuple[float, float]:
    """Returns the seconds of a new environment with a torchrun of the bare step, and of one more
    torchrun there."""
    with tempfile.TemporaryDirectory() as cache:
        before, os.environ[ENV_CACHE] = os.environ.get(ENV_CACHE), cache
        began = time.perf_counter()
        try:
            stack = environment.ensure({"transformers": BAD_END})
        finally:
            if before is None:
                del os.environ[ENV_CACHE]
            else:
                os.environ[ENV_CACHE] = before
        command = [str(stack.python), "-m", "torch.distributed.run", "--nproc-per-node", "2",
                   str(HERE / "bare_step.py")]  # fmt: skip
        variables = {**stack.environ(), "OMP_NUM_THREADS": "1"}
        seconds = []
        for _ in range(2):
            subprocess.run(command, check=True, capture_output=True, timeout=900, env=variables)
            seconds.append(time.perf_counter() - began)
    return seconds[0], seconds[1] - seconds[0]
