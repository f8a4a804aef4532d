"""Times the ways to load full weights from rank 0 into a model that FSDP2 shards.

Prints a page of markdown. Exit code 0: every load delivered the right bytes; 1: one did not, or
nothing was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench import torchrun
from bench.load_cost import page
from bench.load_cost.timing import DTYPES, METHODS, RankTimings, Spec, Timing
from moediag.errors import MoediagError
from moediag.lab.stacks import environment
from moediag.protocol import write_json

STACK = {"transformers": "5.23.0", "accelerate": "1.15.0"}


def main(arguments: Sequence[str] | None = None) -> int:
    typed = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(typed)
    spec = Spec(options.parameters, options.numel, options.method or list(METHODS), options.rounds,
                options.bucket_mb, options.dtype)  # fmt: skip
    try:
        stack = environment.ensure(STACK)
    except MoediagError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    by_rank, problem = measure(spec, stack, options.ranks, options.timeout)
    if problem or not by_rank:
        sys.stderr.write(f"{problem or 'no rank wrote its times'}\n")
        return 1
    sys.stdout.write(page.page(by_rank, shlex.join(["python", "-m", "bench.load_cost", *typed])))
    return 1 if page.wrong(by_rank) else 0


def measure(
    spec: Spec,
    stack: environment.Stack,
    ranks: int,
    timeout: float,
    module: str = "bench.load_cost.rank",
) -> tuple[dict[int, RankTimings], str]:
    """What each rank measured, and "" or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "spec.json", dataclasses.asdict(spec))
        command = [*torchrun.command(stack, ranks, module), folder]
        problem = torchrun.launch(command, torchrun.variables(stack), folder, timeout)
        files = {r: Path(folder) / f"rank-{r}.json" for r in range(ranks)}
        return {r: _read(path) for r, path in files.items() if path.exists()}, problem


def _read(path: Path) -> RankTimings:
    raw = json.loads(path.read_text(encoding="utf-8"))
    return RankTimings([Timing(**one) for one in raw["timings"]], raw["notes"], raw["versions"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.load_cost", description=__doc__)
    default = Spec()
    parser.add_argument("--ranks", type=_count, default=2)
    parser.add_argument("--parameters", type=_sizes, default=default.parameters,
                        help="sizes of the model, in tensors: 500,2000,6000,18000")  # fmt: skip
    parser.add_argument("--numel", type=_count, default=default.numel, help="elements of a matrix")
    parser.add_argument("--method", action="append", choices=METHODS, help="one alone; repeatable")
    parser.add_argument("--rounds", type=_count, default=default.rounds)
    parser.add_argument("--bucket-mb", type=float, default=default.bucket_mb,
                        help="of coalesced: size of one broadcast, in 10^6 bytes")  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default=default.dtype)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of the whole run")
    return parser


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1")
    return int(text)


def _sizes(text: str) -> list[int]:
    return [_count(size) for size in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
