"""Runs programs one after the other in the same ranks, each recorded by ``moediag.laws``.

    python tests/victims/law_runs.py FOLDER RANKS NAME...

The ranks are forked after torch was imported; FOLDER/NAME has what ``moediag diagnose`` reads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import healthy_jobs  # noqa: E402
import law_jobs  # noqa: E402
import model_jobs  # noqa: E402
import premise_jobs  # noqa: E402

import moediag.laws  # noqa: E402


def program(name: str, rank: int) -> Callable[[], None]:
    healthy = healthy_jobs.PROGRAMS | premise_jobs.PROGRAMS | premise_jobs.OF_FOUR
    if name in healthy:
        return lambda: healthy[name](rank)
    if name in model_jobs.PROGRAMS:
        return lambda: model_jobs.PROGRAMS[name](name, rank)
    return lambda: law_jobs.PROGRAMS.get(name, law_jobs.train)(name, rank)


def run(folder: Path, rank: int, ranks: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder.absolute() / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    for name in names:
        try:
            with moediag.laws.recording(str(folder / name)):
                program(name, rank)()
        except Exception as error:  # the other programs still run
            os.write(2, f"{name}: rank {rank}: {error!r}\n".encode())
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder, ranks, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(folder, rank, ranks, names)
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    sys.exit(max(os.waitpid(child, 0)[1] for child in children) and 1)


if __name__ == "__main__":
    main()
