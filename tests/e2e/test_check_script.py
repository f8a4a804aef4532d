"""`moediag check --script` on programs that run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from moediag.errors import ExitCode
from tests.e2e.pipeline import Command

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

fault = sys.argv[1]
dist.init_process_group("nccl" if fault == "nccl" else "gloo")
rank = dist.get_rank()
shared = [rank]
dist.broadcast_object_list(shared, src=0)
assert shared == [0]
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(9):
    if fault == "alone" and rank == 0:
        dist.barrier()  # here
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(f"{total.item():.3f}")
    if fault == "branch" and total > -rank:
        dist.barrier()
    if fault == "raises" and rank == 1:
        raise KeyError("x")
"""


def checked(command: Command, tmp_path: Path, fault: str) -> tuple[int, dict[str, Any]]:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    words = ["check", "--script", shlex.join([str(script), fault]), "--world", "64", "--json"]
    code, stdout, _ = command.call(*words, "--out", str(tmp_path / "out"))
    return code, json.loads(stdout)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_healthy_program_agrees(command: Command, tmp_path: Path, backend: str) -> None:
    code, found = checked(command, tmp_path, backend)
    assert code == ExitCode.OK, found
    assert [one["rank"] for one in found["ranks"]] == [0, 1, 8, 63]
    assert all(one["compared"] == one["calls"] > 4 for one in found["ranks"])


def test_a_barrier_on_one_rank_is_found(command: Command, tmp_path: Path) -> None:
    code, found = checked(command, tmp_path, "alone")
    assert code == ExitCode.FAILURE_FOUND and found["culprits"] == [0]
    line = PROGRAM.splitlines().index("        dist.barrier()  # here") + 1
    assert f"train.py:{line}" in found["cause"]


def test_a_branch_on_data_of_others_is_not_judged(command: Command, tmp_path: Path) -> None:
    code, found = checked(command, tmp_path, "branch")
    assert code == ExitCode.OK and not found["cause"]
    assert all(one["answer"]["read"] and one["answer"]["read_after"] == 1 for one in found["ranks"])


def test_an_exception_leaves_it_undecided(command: Command, tmp_path: Path) -> None:
    code, found = checked(command, tmp_path, "raises")
    assert code == ExitCode.INCONCLUSIVE and "KeyError" in found["undecided"]
