"""Times a step without the recorder and with it, in turn."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from bench.speed.words import OFF, RECORDED
from moediag.protocol import ENV_GUARD, ENV_LAWS
from moediag.recorder import install


def in_turn(one: Callable[[], float], rounds: int, folder: str) -> dict[str, list[float]]:
    """Returns the seconds of ``rounds`` steps of each kind: off, on, with the guard, and with laws
    (a step that is not checked, and one that is). ``one`` runs a step and returns its seconds.
    Records are written to ``folder``. Collective."""
    seconds: dict[str, list[float]] = {kind: [] for kind in (OFF, *RECORDED)}
    for number in range(rounds + 1):
        # Who goes first alternates, and round 0 warms up.
        for kind in (OFF, "on", "guard", "laws")[:: 1 if number % 2 else -1]:
            os.environ[ENV_GUARD] = str(int(kind == "guard"))
            os.environ[ENV_LAWS] = "0" if kind == "laws" else ""
            recorder = None
            if kind != OFF:
                recorder = install(folder, dist.get_rank(), dist.get_world_size())
            # The first forward under a fresh recorder finds the modules: not a cost per step.
            # Laws check the steps 1 to 3.
            for timed in ("", "checked", "", "laws") if kind == "laws" else ("", kind):
                took = one()
                if timed and number:
                    seconds[timed].append(took)
            if recorder is not None:
                recorder.uninstall()
    return seconds
