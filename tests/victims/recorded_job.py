"""A two-rank training job with a hand-made mixture of experts, for the recorder's tests.

    python recorded_job.py FOLDER SCENE...

One process imports torch and forks the ranks of one scene after the other. Each rank writes
``rank-N.result.json`` (losses, gradient checksums) into FOLDER/SCENE and, unless the scene is
``off``, is recorded there; ``exits.json`` holds the ranks' exit codes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

WORLD = 2
HIDDEN, EXPERTS, TOP_K, TOKENS = 8, 4, 2, 64


class Block(nn.Module):
    """Router plus a list of experts, looping over those that got tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.banned: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        torch.topk(scores.view(-1, 2, EXPERTS // 2), 1)  # group-limited routers call top-k twice
        if self.banned is not None:
            scores = scores.index_fill(-1, torch.tensor([self.banned]), 0.0)
        weights, chosen = torch.topk(scores, TOP_K, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def build(scene: str) -> nn.Module:
    torch.manual_seed(0)
    model = Model(recompute=scene == "checkpoint")
    if scene == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if scene == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    if scene == "hsdp":
        mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    else:
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(rank: int, folder: Path, scene: str, recorder: object) -> dict[str, object]:
    if scene == "calls":
        return calls(rank)
    if scene == "flight":
        return flight(rank, folder)
    model = build(scene)
    if scene in ("divergent", "silent"):
        layer = model.layers[1]
        layer.mlp.banned = 3 if rank == 1 else (1 if scene == "silent" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, sums = [], []
    for step in range(1, 4):
        if scene == "kill" and step == 2 and rank == 1:
            dist.all_reduce(torch.ones(1), async_op=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if scene == "disk-full" and step == 2:
            os.close(recorder.log._fd)  # type: ignore[attr-defined]
        if scene == "broken" and step == 2:
            recorder.groups.info = None  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randn(TOKENS, HIDDEN, generator=generator)).square().mean()
        loss.backward()
        if scene not in ("fsdp1", "ddp"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is not None:
                local = getattr(gradient, "_local_tensor", gradient)
                sums.append(local.double().sum().item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "sums": sums}


def calls(rank: int) -> dict[str, object]:
    """One call of each kind that gloo has."""
    import torch.distributed._functional_collectives as functional

    peer = 1 - rank
    two = [torch.zeros(3), torch.zeros(3)]
    mine = torch.full((3,), float(rank))
    dist.all_gather(two, mine)
    dist.all_gather_into_tensor(torch.zeros(6), mine)
    dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(6), op=dist.ReduceOp.MAX)
    dist.broadcast(mine, src=1)
    dist.reduce(mine, dst=1)
    dist.gather(mine, two if rank == 0 else None, dst=0)
    dist.scatter(mine, two if rank == 1 else None, src=1)
    sizes = [1, 2] if rank == 0 else [2, 3]
    columns = [1, 2] if rank == 0 else [2, 3]
    dist.all_to_all_single(torch.zeros(sum(columns), 4), torch.ones(sum(sizes), 4), columns, sizes)
    if rank == 0:
        dist.send(mine, dst=peer)
    else:
        dist.recv(mine, src=peer)
    ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, two[0], peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.barrier()
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    result = functional.all_reduce(torch.ones(5), "sum", dist.group.WORLD)
    result = functional.wait_tensor(result)
    never = dist.all_reduce(torch.ones(2), async_op=True)
    del never
    return {"functional": result.tolist()}


def flight(rank: int, folder: Path) -> dict[str, object]:
    """Asks for a Flight Recorder dump and waits for the answer."""
    from moediag import protocol

    dist.all_reduce(torch.ones(7))
    dist.all_gather_into_tensor(torch.empty(2 * 3), torch.ones(3))
    dist.broadcast(torch.ones(5), src=0)
    other = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(11), group=other)
    dist.all_to_all_single(torch.empty(4), torch.ones(4))
    dist.barrier()
    open_ = dist.all_reduce(torch.ones(2), async_op=True)
    open_.wait()
    answer = folder / protocol.flight_file(rank)
    (folder / protocol.dump_request_file(rank)).touch()
    deadline = time.monotonic() + 60
    while not answer.exists() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return {"answered": answer.exists()}


def attributes() -> dict[str, int]:
    """Identities of what the recorder replaces."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import _runtime_utils
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
    from torch.nn.modules import module
    from torch.optim import optimizer

    found = {}
    for owner in (dist.ProcessGroup, dist.Work, DeviceMesh, group, group.FSDPParamGroup,
                  _runtime_utils, torch.Tensor, torch):  # fmt: skip
        for name, value in list(vars(owner).items()):
            if callable(value) or type(value).__name__ == "instancemethod":
                found[f"{owner.__name__}.{name}"] = id(value)
    found["global forward hooks"] = len(module._global_forward_pre_hooks)
    found["optimizer hooks"] = len(optimizer._global_optimizer_pre_hooks) + len(
        optimizer._global_optimizer_post_hooks
    )
    return found


def rank_main(rank: int, folder: Path, scene: str) -> None:
    torch.set_num_threads(1)
    output = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    recorder = None
    before = attributes() if scene == "uninstall" else {}
    if scene != "off":
        from moediag.recorder import install, lifeline

        lifeline.attach(str(folder), rank)
        recorder = install(str(folder), rank, WORLD)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    try:
        result = train(rank, folder, scene, recorder)
    except BaseException as error:
        if recorder is not None:
            recorder.error(error)
        raise
    if recorder is not None:
        recorder.finish()
    if scene == "uninstall":
        recorder.uninstall()
        after = attributes()
        result["changed"] = [name for name in before if before[name] != after.get(name)]
        result["added"] = sorted(set(after) - set(before))
        dist.all_reduce(torch.ones(1))
    (folder / f"rank-{rank}.result.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def play(folder: Path, scene: str) -> None:
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(r, folder, scene)) for r in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    codes = [process.exitcode for process in ranks]
    (folder / "exits.json").write_text(json.dumps(codes))


def main() -> None:
    import torch._dynamo  # noqa: F401 - clip_grad_norm_ imports it at its first call

    for scene in sys.argv[2:]:
        play(Path(sys.argv[1]) / scene, scene)


if __name__ == "__main__":
    main()
