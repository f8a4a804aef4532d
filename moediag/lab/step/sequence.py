"""Several trials one after the other in the same processes, which start and connect only once."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Iterator

from moediag.protocol import TRIAL_FILE, SequenceTask, Trial, heartbeat_file, output_file

TOGETHER = 1.0  # seconds in which all ranks raise, if they raise for the same reason


def run(task: SequenceTask, folder: Path, rank: int, one: Callable[[Trial, Path], None]) -> None:
    """Calls ``one`` with each trial and its folder. An exception ends the sequence, unless every
    rank raises: then none waits for another."""
    for name in task.trials:
        place = folder / name
        trial = Trial.read(place / TRIAL_FILE)
        with contextlib.suppress(FileExistsError):  # the watchdog reads the launch's heartbeat
            (place / heartbeat_file(rank)).symlink_to(Path("..", heartbeat_file(rank)))
        with _unchanged():
            try:
                one(trial, place)
            except Exception:
                (place / output_file(rank)).write_text(traceback.format_exc(), encoding="utf-8")
                if not _all_raise(place, 1 if task.single else trial.world_size):
                    raise


def _all_raise(place: Path, ranks: int) -> bool:
    deadline = time.monotonic() + TOGETHER
    while not all((place / output_file(rank)).exists() for rank in range(ranks)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@contextlib.contextmanager
def _unchanged() -> Iterator[None]:
    """Restores what a trial changes in this process: the environment, the states of the random
    generators and accelerate's shared state."""
    import torch

    environment, state, tensors = dict(os.environ), random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        random.setstate(state)
        torch.set_rng_state(tensors)
        shared: Any = sys.modules.get("accelerate.state")
        if shared is not None:
            shared.AcceleratorState._reset_state(True)
            shared.GradientState._reset_state()
        gc.collect()  # hooks and groups of a model that is gone
