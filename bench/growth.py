"""How the cost of a trial, a bisect and a hunt grows: ``python -m bench.growth`` prints measured
points as markdown tables (10 minutes; the environments are built first).

``diagnose`` has its own rows in ``python -m bench``, and ``check`` in ``reports/check-layouts.md``.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.bisect_probes import CHECKS, probes_made

MOEDIAG = [sys.executable, "-m", "moediag"]
VARIANT = "zero-fill"  # of expert-starvation: ends by itself and compares every gradient
RELEASE = "5.23.0"
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "glm4_moe")


def moediag(*words: str) -> tuple[float, Any]:
    """Returns the seconds of a command and its result. Raises ValueError if it prints none."""
    began = time.perf_counter()
    done = subprocess.run([*MOEDIAG, *words, "--json"], capture_output=True, text=True, timeout=900)
    return time.perf_counter() - began, json.loads(done.stdout)


def trial(folder: Path, ranks: int, *sizes: str) -> tuple[float, int]:
    """Returns the seconds of a trial without its reference, and the parameters it compared."""
    changed = [word for size in sizes for word in ("--set", f"model.{size}")]
    out = folder / f"{ranks}-{'-'.join(sizes)}"
    _, result = moediag(
        "run", "expert-starvation", "--cpu", str(ranks), "--variant", VARIANT, "--no-cost",
        *changed, "--out", str(out),
    )  # fmt: skip
    (found,) = result["trials"]
    return found["seconds"]["total"], found["parameters_compared"]


def by_ranks(folder: Path) -> Iterator[Sequence[object]]:
    yield "ranks", "seconds of a trial"
    for ranks in (2, 4, 8, 16):
        yield ranks, f"{trial(folder, ranks)[0]:.2f}"


def by_parameters(folder: Path) -> Iterator[Sequence[object]]:
    yield "layers", "hidden size", "parameter tensors", "seconds of a trial on 2 ranks"
    for layers, hidden in ((2, 32), (8, 32), (32, 32), (2, 128), (2, 512)):
        seconds, compared = trial(folder, 2, f"layers={layers}", f"hidden={hidden}")
        yield layers, hidden, compared, f"{seconds:.2f}"


def by_releases() -> Iterator[Sequence[object]]:
    yield "releases", "ceil(log2 n) + 4", "probes, mean of all boundaries", "most"
    for count in (8, 20, 50, 132):
        made = [probes_made(count, first, count - 1, 0) for first in range(1, count)]
        least = math.ceil(math.log2(count - 1)) + CHECKS
        yield count, least, f"{sum(made) / len(made):.1f}", max(made)


def by_families(folder: Path) -> Iterator[Sequence[object]]:
    yield "families", "cells", "seconds, 2 cells at once", "seconds a cell"
    for count in (1, 2, 4):
        names = ",".join(FAMILIES[:count])
        seconds, result = moediag(
            "hunt", "--release", RELEASE, "--family", names, "--cpu", "2",
            "--out", str(folder / f"hunt-{count}"),
        )  # fmt: skip
        cells = len(result["cells"])
        yield count, cells, f"{seconds:.0f}", f"{seconds / cells:.2f}"


def table(rows: Iterator[Sequence[object]]) -> str:
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        trial(folder, 3)  # builds the environment
        for rows in (by_ranks(folder), by_parameters(folder), by_releases(), by_families(folder)):
            print(table(rows) + "\n", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
