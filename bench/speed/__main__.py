"""Measures the speed of the real step and prints a page of markdown. Without options: every run
that this machine can do.

On a machine without a GPU the tiny size runs, to show that the code works: its times say nothing
about a GPU, and the Triton kernels are interpreted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.speed import suite
from bench.speed.words import KERNELS, ROUTINGS, WHATS
from moediag import hardware
from moediag.protocol import write_json

SIZES = ("tiny", "small", "mid", "large")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU"
    )
    parser.add_argument("--what", choices=WHATS, help="with --size: one run alone")
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--ranks", type=int, default=1, help="more than GPUs: they share")
    parser.add_argument("--kernel", action="append", default=[], choices=KERNELS)
    parser.add_argument("--routing", action="append", default=[], choices=ROUTINGS)
    parser.add_argument("--out", type=Path, help="the rows as JSON as well")
    parser.add_argument("--timeout", type=float, default=suite.TIMEOUT, help="seconds, of one run")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if hardware.gpus() or hardware.driver_gpus() else "cpu")
    kernels, routings = tuple(options.kernel), tuple(options.routing)
    if options.size:
        asked = [suite.Run(options.what or "kernels", options.size, device, options.ranks,
                           kernels, routings)]  # fmt: skip
    else:
        asked = list(suite.runs(device))
    measured = []
    for run in asked:
        sys.stderr.write(f"{run.command}\n")
        measured.append(suite.measure(run, options.timeout))
    if device == "cpu" and not options.size:
        measured += suite.elsewhere()
    sys.stdout.write("\n".join(suite.page(measured)))
    if options.out:
        write_json(options.out, [one.to_json() for one in measured])
    return 0 if any(not row["reason"] for one in measured for row in one.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
