"""Cases of other modules under other launchers than their program's own, for `moediag attach`.
They were chosen, and their truths stand, before any page about them was read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from bench.abroad.cases import Case

_CHOSEN = {
    "mpirun": (
        "dist-tuto/a barrier of rank 0 after an epoch",
        "mnist-trainer/the test loss is reduced on rank 0 only",
        "summer-ddp/a barrier after the master's save",
        "barlowtwins/rank 0 opens a pipe that nobody reads",
        "dist-tuto/healthy, rank 2 waits for a child that works",
    ),
    "srun": (
        "imagenet/a barrier in the first rank's checkpoint",
        "vqvae/as published: the primary samples through the wrapper",
        "raschka-ddp/the accuracy is reduced by who prints it",
        "translation/an error rate is reduced in rank 0's validation",
        "mnist-trainer/rank 0 waits for its own lock",
        "raschka-ddp/healthy, rank 0 saves for 20 s",
    ),
    "accelerate": (
        "modded-nanogpt/the validation loss is reduced on the master only",
        "nanogpt/SIGSTOP to rank 1",
        "ddp-tutorial/barrier in the snapshot of rank 0",
        "imagenet/healthy, a slow loader",
    ),
    "ray": (
        "dist-tuto/SIGSTOP to rank 2",
        "mnist-trainer/rank 0 waits for its own lock",
        "raschka-ddp/the accuracy is reduced by who prints it",
        "fsdp2-example/norm clipped on rank 0 only",
        "summer-ddp/rank 1 waits for a file that never comes",
        "mnist-trainer/healthy, rank 0 evaluates for 12 s",
    ),
}


def cases(known: Iterable[Case]) -> Iterator[Case]:
    """The chosen ones of ``known``, each with its launcher."""
    named = {case.name: case for case in known}
    for launcher, names in _CHOSEN.items():
        for name in names:
            yield replace(named[name], launcher=launcher)
