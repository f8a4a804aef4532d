"""Healthy training loops of many layouts, on two or four ranks: ``torchrun layouts.py NAME``."""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as pipelines
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

STEPS = 7


def net(seed=0, width=16):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))


def batches(rank, number=STEPS):
    for step in range(number):
        torch.manual_seed(100 * step + rank)
        yield torch.randn(4, 8)


def train(model, optimizer, rank, after=lambda step: None):
    for step, batch in enumerate(batches(rank), 1):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        after(step)


def shared_folder():
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return folder[0]


def two_by_two(*names):
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)


# ------------------------------------------------------------------------ saved while training


def _saves(model, optimizer, rank):
    folder, running = shared_folder(), []
    aside = dist.new_group()  # the saving thread may not share the group of the training

    def after(step):
        if step % 3 == 0:
            for one in running:
                one.result()
            weights, moments = get_state_dict(model, optimizer)
            state = {"weights": weights, "moments": moments}
            running[:] = [
                dcp.async_save(state, checkpoint_id=f"{folder}/{step}", process_group=aside)
            ]

    train(model, optimizer, rank, after)
    for one in running:
        one.result()


def async_save(rank):
    model = DDP(net())
    _saves(model, torch.optim.AdamW(model.parameters()), rank)


def async_save_fsdp2(rank):
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    _saves(model, torch.optim.AdamW(model.parameters()), rank)


def async_save_zero(rank):
    """The optimizer's parts are gathered on rank 0 for each save."""
    model = DDP(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

    def after(step):
        if step % 3 == 0:
            optimizer.consolidate_state_dict(to=0)

    train(model, optimizer, rank, after)


# ------------------------------------------------------------------------ pipelines


def _pipeline(rank, schedule, parts=1, batches_of=4):
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(ranks * parts)]
    own = [layers[rank + part * ranks] for part in range(parts)]
    stages = [
        PipelineStage(one, rank + part * ranks, ranks * parts, torch.device("cpu"))
        for part, one in enumerate(own)
    ]
    made = schedule(stages if parts > 1 else stages[0], batches_of, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(p for one in own for p in one.parameters())
    for step in range(STEPS):
        torch.manual_seed(step)
        whole, want = torch.randn(8, 8), torch.randn(8, 8)
        optimizer.zero_grad()
        words = (whole,) if rank == 0 else ()
        made.step(*words, target=want) if rank == ranks - 1 else made.step(*words)
        optimizer.step()


def one_forward_one_backward(rank):
    _pipeline(rank, pipelines.Schedule1F1B)


def interleaved(rank):
    _pipeline(rank, pipelines.ScheduleInterleaved1F1B, parts=2)


def looped(rank):
    _pipeline(rank, pipelines.ScheduleLoopedBFS, parts=2)


def zero_bubble(rank):
    _pipeline(rank, pipelines.ScheduleInterleavedZeroBubble, parts=2)


def replicated_pipeline(rank):
    """Two pipelines; each stage averages its gradients with its twin."""
    mesh = two_by_two("dp", "pp")
    group, stage = mesh.get_group("pp"), mesh.get_local_rank("pp")
    stages = mesh.size(1)
    torch.manual_seed(stage)
    own = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    part = PipelineStage(own, stage, stages, torch.device("cpu"), group=group)
    made = pipelines.ScheduleGPipe(part, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(10 * step + mesh.get_local_rank("dp"))
        whole, want = torch.randn(4, 8), torch.randn(4, 8)
        optimizer.zero_grad()
        words = (whole,) if stage == 0 else ()
        made.step(*words, target=want) if stage == stages - 1 else made.step(*words)
        for parameter in own.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
            parameter.grad /= mesh.size(0)
        optimizer.step()


# ------------------------------------------------------------------------ experts and servers


class _Exchange(torch.autograd.Function):
    """All-to-all of equal parts; its gradient takes the way back."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        out = torch.empty_like(gradient)
        dist.all_to_all_single(out, gradient.contiguous(), group=ctx.group)
        return out, None


def expert_groups(rank):
    """Experts by rank of the expert group; DDP ignores them, their twins average by hand."""
    mesh = two_by_two("replica", "expert")
    group, twins = mesh.get_group("expert"), mesh.get_group("replica")
    count, mine = mesh.size(1), mesh.get_local_rank("expert")

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.into, self.router, self.out = nn.Linear(8, 8), nn.Linear(8, count), nn.Linear(8, 8)
            self.expert = net(seed=7 + mine)

        def forward(self, rows):
            rows = self.into(rows)
            gate = self.router(rows).softmax(-1)
            sent = _Exchange.apply(rows.repeat(count, 1), group)  # each expert sees all rows
            back = _Exchange.apply(self.expert(sent), group).view(count, *rows.shape)
            return self.out((back * gate.T[..., None]).sum(0))

    model = Mixture()
    names = [f"expert.{name}" for name, _ in model.expert.named_parameters()]
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches(rank):
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        for parameter in model.expert.parameters():
            dist.all_reduce(parameter.grad, group=twins)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


def server(rank):
    """Rank 0 owns the weights: it gets gradients from all others and sends weights back."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if rank == 0 else None
    ranks = dist.get_world_size()
    for batch in batches(rank):
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        model.zero_grad()
        if rank:
            model(batch).square().mean().backward()
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.reduce(gradient, 0)
            parameter.grad = gradient / (ranks - 1)
        if optimizer:
            optimizer.step()


def one_evaluator(rank):
    """The last rank only evaluates the weights that the others train."""
    ranks = dist.get_world_size()
    trainers = dist.new_group(list(range(ranks - 1)))
    model = net()
    wrapped = DDP(model, process_group=trainers) if rank < ranks - 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches(rank), 1):
        if rank < ranks - 1:
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()
        if step % 3 == 0:
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
            if rank == ranks - 1:
                model.eval()(batch)


def two_jobs(rank):
    """Two models, each on a half of the ranks, with losses that are exchanged."""
    half = dist.get_world_size() // 2
    halves = [dist.new_group(list(range(at, at + half))) for at in (0, half)]
    side = rank // half
    model = DDP(net(seed=side, width=8 * (side + 1)), process_group=halves[side])
    optimizer = torch.optim.AdamW(model.parameters(), lr=10 ** (-2 - side))
    for batch in batches(rank):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        told = loss.detach()
        dist.all_reduce(told)


# ------------------------------------------------------------------------ sharded


def fsdp1_mixed(rank):
    from torch.distributed.fsdp import MixedPrecision

    low = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    model = FullyShardedDataParallel(
        net(), mixed_precision=low, use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches(rank):
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()


def fsdp2_mixed(rank):
    model = net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model[0], model[2], model):
        fully_shard(part, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for batch in batches(rank):
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def fsdp2_lora(rank):
    """A frozen base in low precision, adapters in full, both sharded."""

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = net().requires_grad_(False)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, rows):
            return self.base(rows) + self.up(self.down(rows))

    model = Adapted()
    fully_shard(model.base)
    fully_shard(model)
    train(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), rank)


def tensor_and_data(rank):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = two_by_two("dp", "tp")
    model = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    train(model, torch.optim.AdamW(model.parameters()), mesh.get_local_rank("dp"))


def recomputed_and_compiled(rank):
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(net(seed) for seed in range(3))

        def forward(self, rows):
            for block in self.blocks:
                rows = rows + checkpoint(block, rows, use_reentrant=False)
            return rows

    model = DDP(torch.compile(Blocks(), backend="aot_eager"), static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches(rank):
        optimizer.zero_grad()
        for part in batch.chunk(2):
            (model(part).square().mean() / 2).backward()
        optimizer.step()


def compressed(rank):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = DDP(net())
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    model.register_comm_hook(state, power.powerSGD_hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)


def halved(rank):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DDP(net(), gradient_as_bucket_view=True)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)


def composable(rank):
    from torch.distributed._composable import replicate

    model = replicate(net(), device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model, torch.optim.AdamW(model.parameters()), rank)


# ------------------------------------------------------------------------ without a wrapper


class _OwnTables(torch.autograd.Function):
    """From the rows of a rank's own tables to all tables of the rank's own samples."""

    @staticmethod
    def forward(ctx, rows, widths):
        ctx.sent, ctx.widths = rows.shape, widths
        size = dist.get_world_size()
        own = rows.shape[0] // size
        got = rows.new_empty(own * sum(widths))
        dist.all_to_all_single(
            got, rows.flatten(), [own * w for w in widths], [own * rows.shape[1]] * size
        )
        return torch.cat([part.view(own, -1) for part in got.split([own * w for w in widths])], 1)

    @staticmethod
    def backward(ctx, gradient):
        sent = torch.cat([part.flatten() for part in gradient.split(ctx.widths, 1)])
        got = gradient.new_empty(ctx.sent)
        own, size = gradient.shape[0], dist.get_world_size()
        dist.all_to_all_single(
            got.view(-1), sent, [own * ctx.sent[1]] * size, [own * w for w in ctx.widths]
        )
        return got / size, None


def _tables(rank, numbers):
    """Each rank has tables of its own, which begin equal, and its part of the samples."""
    ranks, width = dist.get_world_size(), 4
    torch.manual_seed(0)
    tables = nn.ModuleList(nn.Embedding(20, width, sparse=True) for _ in range(numbers[rank]))
    top = DDP(nn.Linear(sum(numbers) * width, 1))
    optimizer = torch.optim.SGD([*tables.parameters(), *top.parameters()], lr=0.1)
    model = nn.ModuleDict({"tables": tables, "top": top})
    for step in range(STEPS):
        torch.manual_seed(step)
        index = torch.randint(20, (4 * ranks, sum(numbers)))
        own = index[:, sum(numbers[:rank]) : sum(numbers[: rank + 1])]
        optimizer.zero_grad()
        rows = torch.cat([table(own[:, n]) for n, table in enumerate(model["tables"])], 1)
        seen = _OwnTables.apply(rows, [number * width for number in numbers])
        model["top"](seen).square().mean().backward()
        optimizer.step()


def tables(rank):
    _tables(rank, [2] * dist.get_world_size())


def unequal_tables(rank):
    _tables(rank, [2 + n % 2 for n in range(dist.get_world_size())])


class _Slices(torch.optim.Optimizer):
    """Reduces the gradients, updates the rank's rows of each parameter, and gathers them."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        for parameter in self.param_groups[0]["params"]:
            rows = parameter.shape[0] // size
            own, gradient = parameter[rank * rows :][:rows], torch.empty_like(parameter[:rows])
            dist.reduce_scatter_tensor(gradient, parameter.grad)
            own -= self.param_groups[0]["lr"] * gradient / size
            dist.all_gather_into_tensor(parameter.data, own.clone())


def sliced_updates(rank):
    model = net()
    train(model, _Slices(model.parameters()), rank)


KINDS = {
    one.__name__: one
    for one in (
        async_save, async_save_fsdp2, async_save_zero, one_forward_one_backward, interleaved,
        looped, zero_bubble, replicated_pipeline, expert_groups, server, one_evaluator, two_jobs,
        fsdp1_mixed, fsdp2_mixed, fsdp2_lora, tensor_and_data, recomputed_and_compiled, compressed,
        halved, composable, tables, unequal_tables, sliced_updates,
    )
}  # fmt: skip

if __name__ == "__main__":
    dist.init_process_group("gloo")
    KINDS[sys.argv[1]](dist.get_rank())
    print("done", flush=True)
    dist.destroy_process_group()
