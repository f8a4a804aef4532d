"""``python -m bench.labelled [SEEDS] [FIRST] [RING]``: counts answers on simulated jobs with a
known fault.

Right: exactly the injected rank is named. None: no rank is named. Wrong: another rank is named.
This is for tuning. The unit tests use seed 11 and small seeds; use others (FIRST 100, for example)
for cases that were not used. Seeds from TESTING on are for ``bench.accuracy`` only.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from rich.console import Console
from rich.table import Table

from bench import jobs
from moediag.diagnosis import diagnose
from moediag.evidence import flight_dump, foreign
from moediag.evidence.sources import Found
from moediag.result import Verdict

TESTING = 2000
LAYOUTS = (
    (jobs.Layout(2, 4, 2, 2), 2, 2),
    (jobs.Layout(4, 2, 2, 2), 3, 2),
    (jobs.Layout(1, 8, 2, 4), 2, 3),
    (jobs.Layout(2, 2, 4, 2), 4, 1),
    (jobs.Layout(1, 16, 1, 4), 2, 2),
    (jobs.Layout(4, 4, 2, 4), 2, 4),
    (jobs.Layout(2, 8, 4, 4), 2, 2),
)


def answers(seeds: range, ring: int = 2000) -> tuple[dict[str, Counter[str]], float, int]:
    """Returns (answers of each kind by fault, seconds of diagnosis, calls read)."""
    found: dict[str, Counter[str]] = {}
    seconds, calls = 0.0, 0
    for layout, micro_batches, layers in LAYOUTS:
        base = jobs.healthy(layout, 5, micro_batches, layers)
        for fault in ("none", *jobs.FAULTS):
            for seed in seeds if fault != "none" else (0,):
                try:
                    job = base if fault == "none" else jobs.faulty(base, fault, seed)
                except ValueError:
                    continue
                raw = dict(jobs.dumps(job, ring=ring))
                began = time.process_time()
                dumps = {rank: flight_dump.read(one) for rank, one in raw.items()}
                answer = diagnose(foreign.evidence(Found(dumps=dumps, files=len(dumps))))
                seconds += time.process_time() - began
                calls += sum(len(dump.kind) for dump in dumps.values())
                healthy = fault == "none" and answer.verdict == Verdict.CLEAN
                right = healthy or (fault != "none" and answer.culprits == job.culprits)
                kind = (
                    "right" if right else "wrong" if answer.culprits or fault == "none" else "none"
                )
                found.setdefault(fault, Counter())[kind] += 1
    return found, seconds, calls


def main() -> None:
    count, first, ring = ([int(a) for a in sys.argv[1:]] + [4, 100, 2000][len(sys.argv) - 1 :])[:3]
    if first + count > TESTING:
        sys.exit(f"seeds from {TESTING} on are kept for `make accuracy`")
    found, seconds, calls = answers(range(first, first + count), ring)
    table = Table(title=f"simulated jobs of 16 to 64 ranks, seeds from {first}, ring of {ring}")
    for column in ("fault", "right", "nobody named", "wrong"):
        table.add_column(column)
    for fault, kinds in found.items():
        table.add_row(fault, *(str(kinds[kind]) for kind in ("right", "none", "wrong")))
    Console().print(table)
    Console().print(f"{calls:,} calls diagnosed in {seconds:.1f} s of CPU, without reading files")


if __name__ == "__main__":
    main()
