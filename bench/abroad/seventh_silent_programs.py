"""The programs of the seventh round of silent faults, and how each is started on CPU ranks. They
run unmodified but for the edits here, which remove GPUs, downloads and size, and repair what is
silently wrong in a program as published, where `seventh_silent_round` says so."""

from __future__ import annotations

from pathlib import Path

from bench.abroad.programs import Program, on_cpu
from bench.abroad.silent_programs import write

# ------------------------------------------------------- hindsight-experience-replay, fff9994c

_MPI = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")


class World:
    def Get_rank(self):
        return dist.get_rank()

    def Get_size(self):
        return dist.get_world_size()

    def Bcast(self, array, root):
        dist.broadcast(torch.from_numpy(array), root)

    def Allreduce(self, array, into, op):
        into[...] = array
        dist.all_reduce(torch.from_numpy(into), op)

    def allreduce(self, number, op):
        total = torch.tensor(float(number))
        dist.all_reduce(total, op)
        return total.item()


class MPI:
    COMM_WORLD, SUM = World(), dist.ReduceOp.SUM
"""
# A point that is to be moved to a place.
_GYM = """\
from types import SimpleNamespace

import numpy as np


class Reach:
    _max_episode_steps = 10
    action_space = SimpleNamespace(shape=(3,), high=np.ones(3))

    def seed(self, seed):
        self.draw = np.random.default_rng(seed)

    def reset(self):
        self.place, self.goal = self.draw.uniform(-1, 1, (2, 3))
        return self.seen()

    def seen(self):
        observation = np.concatenate([self.place, np.sin(3 * self.place)])
        return {"observation": observation, "achieved_goal": self.place.copy(),
                "desired_goal": self.goal.copy()}

    def compute_reward(self, achieved, goal, info):
        return -(np.linalg.norm(achieved - goal, axis=-1) > 0.4).astype(np.float32)

    def step(self, action):
        self.place = np.clip(self.place + 0.2 * action, -1, 1)
        reward = self.compute_reward(self.place, self.goal, None)
        return self.seen(), reward, False, {"is_success": float(reward == 0)}


def make(name):
    return Reach()
"""


def _for_her(folder: Path) -> None:
    write(folder, {"mpi4py/__init__.py": _MPI, "gym/__init__.py": _GYM})


_HER = Program(
    "her", "hindsight-experience-replay", "train.py",
    ("--n-epochs=2", "--n-cycles=4", "--n-batches=4", "--batch-size=32", "--buffer-size=1000",
     "--n-test-rollouts=4"),
    needs=("numpy",), prints=r"success rate is: [0-9.]+", prepare=_for_her,
    adapt=(
        # As published, gradients are added up (TianhongDai/hindsight-experience-replay#4).
        *on_cpu(
            "mpi_utils/mpi_utils.py",
            ("comm.Allreduce(flat_grads", "{line}\nglobal_grads /= comm.Get_size()"),
        ),
    ),
)  # fmt: skip

SEVENTH_SILENT_PROGRAMS = (_HER,)
