"""Times `moediag diagnose` and torchfrtrace on the same files, with and without their start-up, and
the growth of `moediag diagnose` with the number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from bench import jobs

ROOT = Path(__file__).parents[1]
OURS = [sys.executable, "-m", "moediag", "diagnose", "--json"]
THEIRS = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
RING = 2000  # entries that a rank keeps unless it is told otherwise
# With these steps no ring buffer wraps; torchfrtrace gives up on those that have.
FULL, STEPS = jobs.Layout(pp=2, dp=8, tp=4, ep=4), 45
# From 16 to 1,024 ranks with the same program, all of whose ring buffers are full.
SMALL, LARGE = jobs.Layout(2, 4, 2, 2), jobs.Layout(2, 256, 2, 2)
WRAPPED = 90  # steps
HUGE, SHORT, FEW = jobs.Layout(8, 1024, 2, 2), 4, 200  # ranks, steps, entries that a rank keeps
ACTIVE = {"timing": False, "active_only": True}  # as most dumps of jobs that hung on NCCL


@contextmanager
def dumped(
    layout: jobs.Layout, steps: int, ring: int = RING, **options: Any
) -> Iterator[tuple[Path, int]]:
    """Yields the dumps of a job in which one rank hangs, and their number of entries."""
    job = jobs.faulty(jobs.healthy(layout, steps), "stuck", 7)
    run = jobs.Run(job)
    entries = sum(min(ring, issued) for issued in run.issued)
    with tempfile.TemporaryDirectory(prefix="moediag-bench-") as place:
        yield jobs.write(job, Path(place) / "dumps", ring=ring, run=run, **options), entries


def command(words: list[str], folder: Path | None = None) -> tuple[float, float, float]:
    """Returns (wall seconds, CPU seconds, peak megabytes) of one command. Its exit code depends on
    what it finds, so only a signal or wrong usage is an error."""
    env = dict(os.environ, OMP_NUM_THREADS="1")
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed command has its bytecode
    began = time.perf_counter()
    process = subprocess.Popen(
        [*words, *([str(folder)] if folder is not None else [])], cwd=ROOT, env=env,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def _best(
    words: list[str], folder: Path | None = None, times: int = 3
) -> tuple[float, float, float]:
    """Returns the run with the least CPU time: other processes can only add to it."""
    return min((command(words, folder) for _ in range(times)), key=lambda found: found[1])


@cache
def against_torchfrtrace() -> dict[str, float]:
    """Returns the CPU seconds of both commands and of their starts (two ranks), and the entries."""
    with dumped(jobs.Layout(dp=2), 1) as (little, _), dumped(FULL, STEPS) as (folder, entries):
        found = {"entries": float(entries)}
        for name, words in (("ours", OURS), ("theirs", THEIRS)):
            found[name] = _best(words, folder)[1]
            found[f"{name} start"] = _best(words, little)[1]
    return found


def starts() -> tuple[float, str]:
    """Returns the CPU seconds of `moediag --version` beyond those of an interpreter that does
    nothing; in words also those of other commands."""
    moediag = OURS[:3]
    bare = _best([sys.executable, "-c", "pass"], times=7)[1]
    found = {word: _best([*moediag, word], times=7)[1] for word in ("--version", "list")}
    with dumped(jobs.Layout(dp=2), 1) as (little, _):
        found["diagnose of two dumps"] = _best(OURS, little, 7)[1]
    told = ", ".join(f"{name} {seconds - bare:.2f} s" for name, seconds in found.items())
    return found["--version"] - bare, f"CPU beyond the {bare:.2f} s of python -c pass: {told}"


def throughput() -> tuple[float, str]:
    """Returns entries per second, `moediag diagnose` : torchfrtrace, as commands."""
    found = against_torchfrtrace()
    ours, theirs = (found["entries"] / found[name] for name in ("ours", "theirs"))
    return ours / theirs, (
        f"{FULL.world} ranks, {found['entries']:,.0f} entries: {ours:,.0f} against {theirs:,.0f} "
        f"entries a second of CPU ({found['ours']:.1f} s and {found['theirs']:.1f} s)"
    )


def throughput_after_start() -> tuple[float, str]:
    """Returns the same without the time of each command for two ranks and one step."""
    found = against_torchfrtrace()
    ours, theirs = (found[name] - found[f"{name} start"] for name in ("ours", "theirs"))
    return theirs / ours, (
        f"{ours:.1f} s and {theirs:.1f} s; the starts take {found['ours start']:.2f} s and "
        f"{found['theirs start']:.1f} s"
    )


def sixteen_dumps() -> tuple[float, str]:
    """Returns the CPU seconds for 16 dumps beyond those of an interpreter that does nothing."""
    bare = _best([sys.executable, "-c", "pass"], times=5)[1]
    with dumped(SMALL, STEPS, **ACTIVE) as (folder, _):
        active = _best(OURS, folder, 5)[1] - bare
    with dumped(SMALL, STEPS) as (folder, entries):
        whole, theirs = (_best(words, folder)[1] - bare for words in (OURS, THEIRS))
    return active, (
        f"active-only; with {entries / SMALL.world:,.0f} entries each {whole:.2f} s, "
        f"torchfrtrace {theirs:.1f} s ({theirs / whole:.1f} x)"
    )


@cache
def _of_large() -> tuple[float, float, float, int]:
    with dumped(LARGE, WRAPPED) as (folder, entries):
        return *_best(OURS, folder, 1), entries


def largest() -> tuple[float, str]:
    """Returns the seconds for 1,024 dumps of 2,000 entries, start included."""
    wall, cpu, peak, entries = _of_large()
    found = against_torchfrtrace()
    theirs = found["theirs"] / found["entries"]  # so many would not fit into its memory
    return wall, (
        f"{entries:,} entries, {cpu:.1f} s of CPU, {peak:,.0f} MB; per entry "
        f"{theirs * entries / cpu:.0f} x as fast as torchfrtrace on {FULL.world} ranks"
    )


def huge() -> tuple[float, str]:
    """Returns the seconds for 16,384 dumps, start included. They take 2 GB of disk."""
    with dumped(HUGE, SHORT, FEW) as (folder, entries):
        wall, cpu, peak = _best(OURS, folder, 1)
    return wall, f"{HUGE.world:,} ranks, {entries:,} entries, {cpu:.1f} s of CPU, {peak:,.0f} MB"


def growth() -> tuple[float, str]:
    """Returns CPU seconds per entry at 1,024 ranks : at 16, start included; 1 is linear."""
    with dumped(SMALL, WRAPPED) as (folder, entries):
        small = _best(OURS, folder)[1] / entries
    _, cpu, _, entries = _of_large()
    return cpu / entries / small, f"{cpu / entries * 1e6:.0f} and {small * 1e6:.0f} microseconds"


def main() -> None:
    for measure in (
        starts,
        sixteen_dumps,
        throughput,
        throughput_after_start,
        largest,
        huge,
        growth,
    ):
        value, detail = measure()
        print(json.dumps({"row": measure.__name__, "value": round(value, 3), "detail": detail}))  # noqa: T201


if __name__ == "__main__":
    main()
