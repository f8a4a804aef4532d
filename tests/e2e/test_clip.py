"""The gradient norm on real ranks: plain tensors, DTensors of two meshes and plain shards together.

Every rank must report the same norm of the whole gradient as a single process, and scale its own
pieces by the same factor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moediag.lab.step.shard import clipping  # noqa: E402
from moediag.lab.step.shard.declared_slices import PlainShards  # noqa: E402
from moediag.recorder.step.pieces import local  # noqa: E402
from tests.forked_ranks import on_ranks  # noqa: E402

pytestmark = pytest.mark.e2e
LIMIT = 0.5


def whole() -> dict[str, torch.Tensor]:
    """The gradients of the model in one process; no world size divides the sizes evenly."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"plain": (5, 3), "fsdp": (7, 4), "experts": (8, 3, 2), "both": (9, 6), "rows": (8, 5)}
    shapes["own"] = (8, 4)
    return {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def sharded(world: int, rank: int) -> tuple[dict[str, Any], PlainShards]:
    """``plain`` is replicated; ``fsdp`` lies on a mesh of all ranks; ``experts`` on the ep axis
    (replicated over dp where there is one); ``both`` on both axes; ``rows`` are plain shards;
    ``own`` are shards of the dp axis, of other rows for each place on the ep axis."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    full = whole()
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    grid = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "ep"))
    at, count = rank % 2, 4
    pieces = {
        "plain": full["plain"].clone(),
        "fsdp": distribute_tensor(full["fsdp"], line, [Shard(0)]),
        "experts": distribute_tensor(full["experts"], grid, [Replicate(), Shard(0)]),
        "both": distribute_tensor(full["both"], grid, [Shard(1), Shard(0)]),
        "rows": full["rows"][at * count : (at + 1) * count].clone(),
    }
    mine = full["own"][at * count : (at + 1) * count].clone()
    pieces["own"] = distribute_tensor(mine, grid["dp"], [Shard(0)], src_data_rank=None)
    parameters = {}
    for name, piece in pieces.items():
        parameters[name] = torch.nn.Parameter(torch.zeros_like(piece))
        parameters[name].grad = piece
    rows = dict.fromkeys(("rows", "own"), (at * count, (at + 1) * count))
    return parameters, PlainShards(rows, grid.get_group("ep"))


def of_rank(rank: int, world: int, how: str) -> tuple[Any, ...]:
    parameters, plain = sharded(world, rank)
    before = {name: local(p.grad).clone() for name, p in parameters.items()}
    norm = clipping.clip(parameters, LIMIT, how, plain)
    return norm, before, {name: local(p.grad).clone() for name, p in parameters.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_per_mesh_clipping_gives_the_single_process_norm_on_every_rank(
    world: int, tmp_path: Path
) -> None:
    gradients = [torch.nn.Parameter(torch.zeros_like(g)) for g in whole().values()]
    for parameter, gradient in zip(gradients, whole().values(), strict=True):
        parameter.grad = gradient
    true = float(torch.nn.utils.clip_grad_norm_(gradients, LIMIT))
    for norm, before, after in on_ranks(world, tmp_path, of_rank, world, "per-mesh"):
        assert norm == pytest.approx(true, rel=1e-6)
        for name in before:
            assert torch.allclose(after[name], before[name] * (LIMIT / (true + 1e-6))), name


@pytest.mark.parametrize("world", [2, 4])
def test_the_norm_of_local_tensors_differs_between_ranks(world: int, tmp_path: Path) -> None:
    norms = [norm for norm, _, _ in on_ranks(world, tmp_path, of_rank, world, "local")]
    assert len({round(norm, 3) for norm in norms}) == world
