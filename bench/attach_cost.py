"""Measures what `moediag attach` does to a job: the same job of two gloo ranks runs alone, and
looked at again and again; its output, exit code, weights and seconds per step are compared.

Within the second run, steps during a look are compared with the steps between two looks: the load
of the machine, which differs from run to run, is the same for both."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.launchers import TORCHRUN

PAUSE = 4.0  # seconds between two looks
_JOB = """\
import json, os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
weights = torch.zeros(256, 256)
rows = []
for step in range(int(sys.argv[2])):
    began, cpu = time.time(), time.thread_time()
    batch = torch.randn(256, 256)
    for _ in range(4):
        batch = torch.tanh(batch @ batch.T / 256 + weights)
    dist.all_reduce(batch)
    weights += 1e-3 * batch
    rows.append((began, time.time(), time.thread_time() - cpu))
with open(f"{sys.argv[1]}/rank-{rank}.json", "w") as file:
    json.dump(rows, file)
os.write(1, f"rank {rank}: {weights.sum().item():.17g} {weights[3, 5].item():.17g}\\n".encode())
dist.destroy_process_group()
sys.exit(7 * rank)
"""


@dataclass(frozen=True)
class Run:
    """One run of the job."""

    code: int
    said: list[str]
    steps: list[tuple[float, float, float]]  # of rank 0: begin, end, CPU seconds
    looks: list[tuple[float, float]]
    verdicts: list[str]


def run(steps: int, *, looked_at: bool) -> Run:
    with tempfile.TemporaryDirectory(prefix="moediag-bench-") as place:
        script = Path(place) / "train.py"
        script.write_text(_JOB)
        job = subprocess.Popen(
            [*TORCHRUN, "2", str(script), place, str(steps)], stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        looks, verdicts = [], []
        while looked_at and job.poll() is None:
            time.sleep(PAUSE)
            began = time.time()
            found = _look(job.pid)
            if found is not None:
                looks.append((began, time.time()))
                verdicts.append(found)
        said, _ = job.communicate()
        rows = json.loads((Path(place) / "rank-0.json").read_text())
    return Run(job.returncode, sorted(said.splitlines()), [tuple(r) for r in rows], looks, verdicts)


def _look(pid: int) -> str | None:
    with tempfile.TemporaryDirectory(prefix="moediag-bench-") as place:
        command = [sys.executable, "-m", "moediag", "attach", str(pid), "--json", "--out", place]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    made: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return str(made["trials"][0]["verdict"]) if made else None


def shown(steps: list[tuple[float, float, float]]) -> str:
    wall = sorted(1000 * (end - began) for began, end, _ in steps)
    cpu = statistics.median(1000 * seconds for _, _, seconds in steps)
    quarters = statistics.quantiles(wall, n=4)
    last = statistics.quantiles(wall, n=100)[-1]
    return (
        f"{len(steps)} steps, median {quarters[1]:.1f} ms (quartiles {quarters[0]:.1f}, "
        f"{quarters[2]:.1f}), 99 % {last:.0f} ms, longest {wall[-1]:.0f} ms, CPU {cpu:.1f} ms"
    )


def compared(steps: int) -> list[str]:
    alone, other = run(steps, looked_at=False), run(steps, looked_at=True)
    inside = [s for s in other.steps if any(a < s[1] and s[0] < b for a, b in other.looks)]
    took = statistics.median(b - a for a, b in other.looks)
    same = (alone.code, alone.said) == (other.code, other.said)
    return [
        f"alone:         {shown(alone.steps)}",
        f"between looks: {shown([s for s in other.steps if s not in inside])}",
        f"during looks:  {shown(inside)}",
        f"{len(other.looks)} looks, each {took:.1f} s: {', '.join(sorted(set(other.verdicts)))}",
        f"exit codes {alone.code} and {other.code}; output and weights "
        + ("the same" if same else f"DIFFER: {alone.said} {other.said}"),
    ]


if __name__ == "__main__":
    print(*compared(int(sys.argv[1])), sep="\n")  # noqa: T201
