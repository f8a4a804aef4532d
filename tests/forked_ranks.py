"""Real ranks as forked processes of this one, with gloo over a file."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LONGEST = 90  # seconds


def on_ranks(world: int, folder: Path, act: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs ``act(rank, *args)`` in a process group of ``world`` ranks; returns its results."""
    context = mp.get_context("fork")
    ranks = [
        context.Process(target=_of_rank, args=(rank, world, folder, act, args))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LONGEST)
        if process.is_alive():
            process.kill()
    errors = [file.read_text() for file in sorted(folder.glob("*.error"))]
    assert not errors, errors[0]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _of_rank(rank: int, world: int, folder: Path, act: Callable[..., Any], args: Any) -> None:
    try:
        torch.set_num_threads(1)
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        torch.save(act(rank, *args), folder / f"{rank}.pt")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
