"""Healthy programs of many kinds, on which no law may report a failure. Two ranks or more.

Run as ``torchrun healthy_jobs.py NAME``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 7
DDP = DistributedDataParallel


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def batches(rank: int, number: int = STEPS) -> Iterator[torch.Tensor]:
    for step in range(number):
        torch.manual_seed(100 * step + rank)
        yield torch.randn(4, 8)


def train(
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    after: Callable[[], object] = lambda: None,
) -> None:
    for batch in batches(rank):
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
        after()


def ddp(rank: int) -> None:
    wrapped = DDP(model())
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


def ddp_options(rank: int) -> None:
    wrapped = DDP(model(), gradient_as_bucket_view=True, static_graph=True)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9), rank)


def ddp_unused_head(rank: int) -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = model(), nn.Linear(8, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.body(inputs)

    wrapped = DDP(Headed(), find_unused_parameters=True)
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


def ddp_bfloat16(rank: int) -> None:
    wrapped = DDP(model())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for batch in batches(rank):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(batch).square().mean()
        loss.backward()
        optimizer.step()


def bfloat16_parameters(rank: int) -> None:
    wrapped = DDP(model().to(torch.bfloat16))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for batch in batches(rank):
        optimizer.zero_grad()
        wrapped(batch.bfloat16()).float().square().mean().backward()
        optimizer.step()


def comm_hook(rank: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = DDP(model())
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


def batch_norm(rank: int) -> None:
    torch.manual_seed(0)
    wrapped = DDP(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)))
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


def batch_norm_alone(rank: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    wrapped = DDP(net, broadcast_buffers=False)
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


def tied(rank: int) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    last.weight = first.weight
    wrapped = DDP(nn.Sequential(first, nn.ReLU(), last))
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


def frozen_tower(rank: int) -> None:
    net = nn.Sequential(model(1).requires_grad_(False), model())
    wrapped = DDP(net)
    train(wrapped, torch.optim.AdamW(net[1].parameters()), rank)


def teacher(rank: int) -> None:
    """A frozen copy of the model computes the targets."""
    student = model()
    target = copy.deepcopy(student).requires_grad_(False).eval()
    wrapped = DDP(student)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for batch in batches(rank):
        optimizer.zero_grad()
        (wrapped(batch) - target(batch) - 1).square().mean().backward()
        optimizer.step()


def copy_on_rank_0(rank: int) -> None:
    """An average that only rank 0 keeps, to save it."""
    from torch.optim.swa_utils import AveragedModel

    wrapped = DDP(model())
    average = AveragedModel(wrapped.module) if rank == 0 else None
    update = (lambda: average.update_parameters(wrapped.module)) if average else (lambda: None)
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank, update)


def schedule(rank: int) -> None:
    """A warm-up from a learning rate of zero."""
    wrapped = DDP(model())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 5, 1.0))
    train(wrapped, optimizer, rank, warm.step)


def groups(rank: int) -> None:
    """Two groups of parameters, of which one does not decay."""
    wrapped = DDP(model())
    parts = [{"params": [p for p in wrapped.parameters() if p.ndim == n]} for n in (1, 2)]
    parts[0]["weight_decay"] = 0.0
    train(wrapped, torch.optim.AdamW(parts, lr=0.01), rank)


def closure(rank: int) -> None:
    wrapped = DDP(model())
    optimizer = torch.optim.LBFGS(wrapped.parameters(), max_iter=2)
    for batch in batches(rank):

        def loss(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            value = wrapped(batch).square().mean()
            value.backward()
            return value

        optimizer.step(loss)


def in_backward(rank: int) -> None:
    """An optimizer for each parameter, which steps as soon as its gradient is reduced."""
    wrapped = DDP(model())
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in wrapped.parameters()]
    for batch in batches(rank):
        wrapped(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def rounds_of_two(rank: int) -> None:
    """A discriminator that makes two steps for each of the generator."""
    critic, maker = DDP(model()), DDP(model(1))
    of_critic = torch.optim.Adam(critic.parameters())
    of_maker = torch.optim.Adam(maker.parameters())
    for step, batch in enumerate(batches(rank, 12)):
        if step % 3 == 2:
            of_maker.zero_grad()
            critic.module(maker(batch)).square().mean().backward()
            of_maker.step()
        else:
            of_critic.zero_grad()
            critic(maker.module(batch).detach()).square().mean().backward()
            of_critic.step()


def zero_optimizer(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DDP(model())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01)
    train(wrapped, optimizer, rank)


def recomputed(rank: int) -> None:
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = model(), model(1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.two(checkpoint(self.one, inputs, use_reentrant=False))

    wrapped = DDP(Recomputing())
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


def compiled(rank: int) -> None:
    wrapped = torch.compile(DDP(model()), backend="eager")
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


def saved_and_loaded(rank: int) -> None:
    """A checkpoint of model and optimizer in memory, after which training goes on."""
    wrapped = DDP(model())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    train(wrapped, optimizer, rank)
    saved = copy.deepcopy((wrapped.state_dict(), optimizer.state_dict()))
    again = DDP(model(3))
    other = torch.optim.AdamW(again.parameters())
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(again, other, rank)


def evaluates(rank: int) -> None:
    wrapped = DDP(model())
    optimizer = torch.optim.AdamW(wrapped.parameters())

    def evaluate() -> None:
        wrapped.eval()
        with torch.no_grad():
            wrapped.module(torch.ones(1, 8))
        wrapped.train()

    train(wrapped, optimizer, rank, evaluate)


def reduced_by_hand(rank: int) -> None:
    """Plain parameters whose gradients the program averages."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    for batch in batches(rank):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()


def side_by_side(rank: int) -> None:
    """Each rank trains a model of its own."""
    net = model(rank)
    train(net, torch.optim.AdamW(net.parameters(), lr=0.01 * (1 + rank)), rank)


def _fsdp1(rank: int, strategy: str, **options: object) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    wrapped = FullyShardedDataParallel(
        model(), sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"), **options,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    for batch in batches(rank):
        optimizer.zero_grad()
        (100 * wrapped(batch).square().mean()).backward()
        wrapped.clip_grad_norm_(1.0)
        optimizer.step()


def fsdp1(rank: int) -> None:
    _fsdp1(rank, "FULL_SHARD")


def fsdp1_original_parameters(rank: int) -> None:
    _fsdp1(rank, "FULL_SHARD", use_orig_params=True)


def fsdp1_gradients_only(rank: int) -> None:
    _fsdp1(rank, "SHARD_GRAD_OP")


def fsdp1_whole(rank: int) -> None:
    _fsdp1(rank, "NO_SHARD")


def _fully_sharded(net: nn.Module, shape: tuple[int, ...], names: tuple[str, ...]) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for child in net.children():
        if next(child.parameters(), None) is not None:
            fully_shard(child, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def fsdp2(rank: int) -> None:
    """Each rank initialises the model with its own seed."""
    net = _fully_sharded(model(rank), (dist.get_world_size(),), ("dp",))
    optimizer = torch.optim.AdamW(net.parameters())
    for batch in batches(rank):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


def fsdp2_accumulates(rank: int) -> None:
    net = _fully_sharded(model(), (dist.get_world_size(),), ("dp",))
    optimizer = torch.optim.AdamW(net.parameters())
    for number, batch in enumerate(batches(rank, 12)):
        net.set_requires_gradient_sync(number % 2 == 1)
        net(batch).square().mean().backward()
        if number % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()


def fsdp2_on_meta(rank: int) -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    net = _fully_sharded(net, (dist.get_world_size(),), ("dp",))
    net.to_empty(device="cpu")
    torch.manual_seed(rank)
    for layer in (net[0], net[2]):
        layer.reset_parameters()
    train(net, torch.optim.AdamW(net.parameters()), rank)


def fsdp2_loads_afterwards(rank: int) -> None:
    """The checkpoint is on rank 0, which sends each rank its shards."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    net = _fully_sharded(model(rank), (dist.get_world_size(),), ("dp",))
    state = model(7).state_dict() if rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, state, options=options)
    train(net, torch.optim.AdamW(net.parameters()), rank)


def hsdp(rank: int) -> None:
    net = _fully_sharded(model(), (dist.get_world_size(), 1), ("dp_replicate", "dp_shard"))
    train(net, torch.optim.AdamW(net.parameters()), rank)


def sequence_parallel(rank: int) -> None:
    """The norm sees a part of each sequence; dropout differs on these parts."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(32, 8), nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 12), nn.Linear(12, 8)
    )
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": SequenceParallel(),
        "3": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    }
    parallelize_module(net, mesh, plan)
    parallelize_module(net, mesh, {"3": ColwiseParallel(), "4": RowwiseParallel()})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    for step in range(STEPS):
        torch.manual_seed(step)
        tokens = torch.randint(32, (2, 2 * size))
        optimizer.zero_grad()
        net(tokens).square().mean().backward()
        optimizer.step()


def expert_slices(rank: int) -> None:
    """Each rank has experts of its own, and tokens travel to them."""
    from torch.distributed.nn.functional import all_to_all_single

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.shared = nn.Linear(8, 8)
            torch.manual_seed(rank)
            self.own = nn.Linear(8, 8)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.shared(inputs)
            sent = all_to_all_single(torch.empty_like(hidden), hidden.contiguous())
            done = self.own(sent)
            return all_to_all_single(torch.empty_like(done), done.contiguous())

    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters())
    size = dist.get_world_size()
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        net(torch.randn(4 * size, 8)).square().mean().backward()
        for parameter in net.shared.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def pipeline(rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    size = dist.get_world_size()
    torch.manual_seed(rank)
    stage_model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.AdamW(stage_model.parameters())
    stage = PipelineStage(stage_model, rank, size, torch.device("cpu"))
    made = ScheduleGPipe(
        stage, n_microbatches=2, loss_fn=lambda out, want: (out - want).square().mean()
    )
    for step in range(STEPS):
        torch.manual_seed(step)
        whole, want = torch.randn(4, 8), torch.randn(4, 8)
        optimizer.zero_grad()
        args = (whole,) if rank == 0 else ()
        made.step(*args, target=want) if rank == size - 1 else made.step(*args)
        optimizer.step()


def whole_model_average(rank: int) -> None:
    """A moving average by hand, on every rank."""
    net = model()
    average = copy.deepcopy(net)
    wrapped = DDP(net)

    def update() -> None:
        with torch.no_grad():
            for kept, now in zip(average.parameters(), net.parameters(), strict=True):
                kept.lerp_(now, 0.1)

    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank, update)


def skips_together(rank: int) -> None:
    """A scaler that skips step 2 on every rank, since the gradients are reduced."""
    wrapped = DDP(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, batch in enumerate(batches(rank), 1):
        optimizer.zero_grad()
        loss = wrapped(batch).square().mean()
        if step == 2 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def pretrained(rank: int) -> None:
    """Weights of a backbone, and a new head."""
    net = nn.Sequential(model(), nn.Linear(8, 2))
    net.load_state_dict({f"0.{k}": v for k, v in model(4).state_dict().items()}, strict=False)
    wrapped = DDP(net)
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


PROGRAMS: dict[str, Callable[[int], None]] = {
    one.__name__: one
    for one in (
        ddp, ddp_options, ddp_unused_head, ddp_bfloat16, bfloat16_parameters, comm_hook,
        batch_norm, batch_norm_alone, tied, frozen_tower, teacher, copy_on_rank_0, schedule,
        groups, closure, in_backward, rounds_of_two, zero_optimizer, recomputed, compiled,
        saved_and_loaded, evaluates, reduced_by_hand, side_by_side, fsdp1,
        fsdp1_original_parameters, fsdp1_gradients_only, fsdp1_whole, fsdp2, fsdp2_accumulates,
        fsdp2_on_meta, fsdp2_loads_afterwards, hsdp, sequence_parallel, expert_slices, pipeline,
        whole_model_average, skips_together, pretrained,
    )
}  # fmt: skip

if __name__ == "__main__":
    dist.init_process_group("gloo")
    PROGRAMS[sys.argv[1]](dist.get_rank())
    dist.destroy_process_group()
