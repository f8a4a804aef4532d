"""Healthy programs of designs that contradict what a law takes for granted, two ranks each. No law
may say that they are broken.

Run as ``torchrun premise_jobs.py NAME``.
"""

import math
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from healthy_jobs import batches, model, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Optimizer = torch.optim.Optimizer


def updates(rank: int, number: int, loss: Callable[[torch.Tensor], Any], *step: Any) -> None:
    for batch in batches(rank, number):
        for one in step:
            one.zero_grad()
        loss(batch).backward()
        for one in step:
            one.step()


# ------------------------------------------------------------------ replicas


class Remembers(nn.Module):
    """Each rank keeps its own last features, in a parameter that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.queue = nn.Parameter(torch.zeros(4, 8), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.net(inputs)
        near = (found @ self.queue.T.clone()).mean()
        self.queue.data.copy_(found.detach())
        return found.square().mean() + 0.01 * near


def own_memory(rank: int) -> None:
    wrapped = DDP(Remembers())
    updates(rank, 7, wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))


def divided(rank: int) -> DataLoader[Any]:
    torch.manual_seed(1)
    samples = TensorDataset(torch.randn(96, 8))
    return DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples))


def exchange_objects(net: nn.Module) -> None:
    """The average of all ranks' weights, sent as objects."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, {k: v.clone() for k, v in net.state_dict().items()})
    net.load_state_dict({k: sum(s[k] for s in states) / len(states) for k in states[0]})


def federated_by_objects(rank: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number, (batch,) in enumerate(divided(rank), 1):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
        if number % 4 == 0:
            exchange_objects(net)


def unreduced_by_objects(rank: int) -> None:
    wrapped = DDP(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for number, (batch,) in enumerate(divided(rank), 1):
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(batch).square().mean().backward()
            optimizer.step()
        if number % 4 == 0:
            exchange_objects(wrapped.module)


def folds_in_groups_of_one(rank: int) -> None:
    """Cross-validation: each fold has a group of its own, here of one rank."""
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    wrapped = DDP(model(), process_group=groups[rank])
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)


def bagging(rank: int) -> None:
    """Each rank trains a model of its own on its part, and saves it."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for (batch,) in divided(rank):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(net.state_dict(), f"{folder}/expert_{rank}.pt")


def averaged_once_by_gathering(rank: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for (batch,) in divided(rank):
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    flat = nn.utils.parameters_to_vector(net.parameters()).detach()
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    nn.utils.vector_to_parameters(torch.stack(every).mean(0), net.parameters())


def critic_first_on_rank_0(rank: int) -> None:
    """Rank 0 tries the critic out before training; one optimizer has both models."""
    actor, critic = DDP(model()), DDP(model(1))
    if rank == 0:
        with torch.no_grad():
            critic.module(torch.ones(1, 8))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])
    updates(rank, 7, lambda b: critic(actor(b)).square().mean(), optimizer)


def gossip(rank: int) -> None:
    """A communication hook that weights a rank's own gradients more than the others'."""
    wrapped = DDP(model())

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        mine = bucket.buffer()
        other = mine.clone()
        dist.all_reduce(other)
        mine.mul_(0.2).add_(other, alpha=0.4)
        done: Any = torch.futures.Future()
        done.set_result(mine)
        return done

    wrapped.register_comm_hook(None, hook)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), rank)


def meta_learning(rank: int) -> None:
    """First-order MAML: each rank adapts to a task of its own, and takes the outer gradient, which
    DistributedDataParallel averages, where it got to."""
    wrapped = DDP(model())
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    outer = torch.optim.Adam(wrapped.parameters(), lr=0.01)
    for batch in batches(rank, 6):
        kept = [p.detach().clone() for p in wrapped.parameters()]
        for _ in range(2):
            inner.zero_grad()
            wrapped.module(batch).square().mean().backward()
            inner.step()
        outer.zero_grad()
        wrapped(batch + 1).square().mean().backward()
        with torch.no_grad():
            for parameter, old in zip(wrapped.parameters(), kept, strict=True):
                parameter.copy_(old)
        outer.step()


# ------------------------------------------------------------------ gradients


class Accumulating(torch.optim.SGD):
    """Updates in every fifth call of step(), and clears the gradients itself."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls % 5 == 0:
            super().step(closure)
            self.zero_grad()


def optimizer_that_accumulates(rank: int) -> None:
    wrapped = DDP(model())
    optimizer = Accumulating(wrapped.parameters(), lr=0.1)
    for batch in batches(rank, 14):
        wrapped(batch).square().mean().backward()
        optimizer.step()


def scaled(rank: int, bound: Callable[[Any, list[float]], float]) -> None:
    wrapped = DDP(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    history: list[float] = []
    for batch in batches(rank, 7):
        optimizer.zero_grad()
        scaler.scale(wrapped(batch).square().mean()).backward()
        norms = [p.grad.norm() for p in wrapped.parameters() if p.grad is not None]
        history.append(float(torch.stack(norms).norm()))
        nn.utils.clip_grad_norm_(wrapped.parameters(), bound(scaler, history))
        scaler.step(optimizer)
        scaler.update()


def bound_times_scale(rank: int) -> None:
    scaled(rank, lambda scaler, _: 0.1 * scaler.get_scale())


def bound_from_history(rank: int) -> None:
    """A bound that follows the norms is scaled as they are."""
    scaled(rank, lambda _, history: 0.7 * sorted(history)[len(history) // 2])


def clips_each_client(rank: int) -> None:
    """Each client's gradient is bounded, then averaged, with noise."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, batch in enumerate(batches(rank)):
        optimizer.zero_grad()
        (3 * net(batch).square().mean()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        noise = torch.Generator().manual_seed(step)
        for p in net.parameters():
            dist.all_reduce(p.grad)
            assert p.grad is not None
            p.grad.add_(0.01 * torch.randn(p.shape, generator=noise)).div_(2)
        optimizer.step()


def second_forward_unreduced(rank: int) -> None:
    """Two forwards and one backward; only the first forward is outside no_sync."""
    wrapped = DDP(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for batch in batches(rank):
        optimizer.zero_grad()
        one = wrapped(batch)
        with wrapped.no_sync():
            two = wrapped(batch + 0.1)
        (one.square().mean() + (one - two).square().mean()).backward()
        optimizer.step()


def perturbs_inputs(rank: int) -> None:
    """After its own backward the frozen model gives gradients of a perturbation."""
    wrapped = DDP(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    delta = torch.zeros(4, 8, requires_grad=True)
    for batch in batches(rank):
        optimizer.zero_grad()
        wrapped(batch + delta.detach()).square().mean().backward()
        kept = [p.grad for p in wrapped.parameters()]
        for p in wrapped.parameters():
            p.grad = None
        with wrapped.no_sync():
            (-wrapped(batch + delta).square().mean()).backward()
        delta.data.sub_(0.01 * delta.grad.sign())
        delta.grad = None
        for p, g in zip(wrapped.parameters(), kept, strict=True):
            p.grad = g
        optimizer.step()


class ZerothOrder(Optimizer):
    """Moves along a direction that all ranks draw, by the difference of losses that they share."""

    difference = 0.0

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * self.difference * torch.randn_like(p))


def without_gradients(rank: int) -> None:
    net = model()
    optimizer = ZerothOrder(net.parameters(), {"lr": 0.01})
    for step, batch in enumerate(batches(rank)):
        with torch.no_grad():
            loss = net(batch).square().mean()
        dist.all_reduce(loss)
        optimizer.difference = float(loss)
        torch.manual_seed(step)
        optimizer.step()


class Fused(Optimizer):
    """Updates in the backward; its step() is there for callers that need one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        for group in self.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(self._update)

    def _update(self, p: Any) -> None:
        dist.all_reduce(p.grad)
        p.data.sub_(0.01 * p.grad)
        p.grad = None

    def step(self, closure: Any = None) -> None:
        pass


def updates_in_backward(rank: int) -> None:
    net = model()
    updates(rank, 7, lambda b: net(b).square().mean(), Fused(net.parameters()))


class Masters(Optimizer):
    """Keeps weights in float32, and reads the gradients of the model's itself."""

    def __init__(self, params: Any) -> None:
        self.of_model = list(params)
        super().__init__([p.detach().float().clone().requires_grad_() for p in self.of_model], {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for master, p in zip(self.param_groups[0]["params"], self.of_model, strict=True):
                master.sub_(0.5 * p.grad.float())
                p.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.of_model:
            p.grad = None


def masters(rank: int) -> None:
    wrapped = DDP(model().bfloat16())
    updates(
        rank, 7, lambda b: wrapped(b.bfloat16()).float().square().mean(),
        Masters(wrapped.parameters()),
    )  # fmt: skip


# ------------------------------------------------------------------ values that are put back


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()
        self.scale = nn.Parameter(torch.tensor(math.log(100.0)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = nn.functional.normalize(self.net(inputs), dim=1)
        loss = nn.functional.cross_entropy(found @ found.T, torch.arange(len(inputs)))
        return loss - 0.1 * self.scale


def clamped_scale(rank: int) -> None:
    """A scale that began at its bound, as that of a trained model, and is pressed against it."""
    wrapped = DDP(Contrastive())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for batch in batches(rank):
        optimizer.zero_grad()
        wrapped(batch).backward()
        optimizer.step()
        with torch.no_grad():
            wrapped.module.scale.clamp_(0, math.log(100.0))


def pruned_layer(rank: int) -> None:
    """A mask that prunes all of a residual layer."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.gone = model(), nn.Linear(8, 8, bias=False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.net(inputs)
            return found + self.gone(found)

    net = Residual()
    nn.init.zeros_(net.gone.weight)
    wrapped = DDP(net)
    train(
        wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9), rank,
        net.gone.weight.data.zero_,
    )  # fmt: skip


# ------------------------------------------------------------------ modes


def dropping() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))


def second_phase_without_dropout(rank: int) -> None:
    """Supervised training, then a phase that compares probabilities with those of its samples."""
    wrapped = DDP(dropping())
    train(wrapped, torch.optim.AdamW(wrapped.parameters()), rank)
    wrapped.eval()
    train(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-4), rank)


def parts_in_training_mode(rank: int) -> None:
    """After an evaluation only the parts are set to training mode again."""

    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = dropping()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.net(inputs)
            return found

    task = Task()
    wrapped = DDP(task)
    optimizer = torch.optim.AdamW(wrapped.parameters())

    def evaluate() -> None:
        task.eval()
        with torch.no_grad():
            task(torch.ones(1, 8))
        task.net.train()

    train(wrapped, optimizer, rank, evaluate)


def attacked_at_the_end(rank: int) -> None:
    """An evaluation by an attack whose optimizer moves the inputs."""
    wrapped = DDP(dropping())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    train(wrapped, optimizer, rank)
    wrapped.eval()
    delta = torch.zeros(4, 8, requires_grad=True)
    attack = torch.optim.Adam([delta], lr=0.01)
    for batch in batches(rank, 12):
        attack.zero_grad()
        with wrapped.no_sync():
            (-wrapped(batch + delta).square().mean()).backward()
        attack.step()
    del optimizer


# ------------------------------------------------------------------ samples


class Rays(nn.Module):
    """Draws other points of the same picture on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        points = torch.randint(pictures.shape[1], (4,))
        return self.net(pictures[:, points]).square().mean()


def rays_of_the_same_pictures(rank: int) -> None:
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(7, 32, 8)), batch_size=1)
    wrapped = DDP(Rays())
    optimizer = torch.optim.AdamW(wrapped.parameters())
    torch.manual_seed(rank)
    for (picture,) in loader:
        optimizer.zero_grad()
        wrapped(picture).backward()
        optimizer.step()


class Slices(nn.Module):
    """Each of two ranks computes half of each sequence."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.net, self.group = model(), group

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mine = inputs.chunk(2, dim=1)[dist.get_rank(self.group)]
        hidden = self.net(mine)
        other = [torch.empty_like(hidden) for _ in range(2)]
        dist.all_gather(other, hidden.detach().contiguous(), group=self.group)
        return (hidden - torch.cat(other, 1).mean(1, keepdim=True)).square().mean()


def sequence_slices(rank: int) -> None:
    """Four ranks: two parts of the samples, and two slices of each sequence."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(1)
    samples = TensorDataset(torch.randn(28, 6, 8))
    sampler = DistributedSampler(samples, num_replicas=2, rank=rank // 2)
    wrapped = DDP(Slices(groups[rank // 2]))
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for (batch,) in DataLoader(samples, batch_size=2, sampler=sampler):
        optimizer.zero_grad()
        wrapped(batch).backward()
        optimizer.step()


# ------------------------------------------------------------------ phases


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 4)
        self.adapt = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.base(inputs)
        return self.head(found + self.lora_B(self.lora_A(inputs)) if self.adapt else found)


def adapters_later(rank: int) -> None:
    """The head trains alone first."""
    torch.manual_seed(0)
    net = Adapted()
    wrapped = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    for number, batch in enumerate(batches(rank, 20)):
        net.adapt = number >= 13
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()


PROGRAMS: dict[str, Callable[[int], None]] = {
    one.__name__: one
    for one in (
        own_memory, federated_by_objects, unreduced_by_objects, folds_in_groups_of_one, bagging,
        averaged_once_by_gathering, critic_first_on_rank_0, gossip, meta_learning,
        optimizer_that_accumulates, bound_times_scale, bound_from_history, clips_each_client,
        second_forward_unreduced, perturbs_inputs,  without_gradients,
        updates_in_backward, masters, clamped_scale, pruned_layer, second_phase_without_dropout,
        parts_in_training_mode, attacked_at_the_end, rays_of_the_same_pictures,
         adapters_later,
    )
}  # fmt: skip
OF_FOUR = {one.__name__: one for one in (sequence_slices,)}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    (PROGRAMS | OF_FOUR)[sys.argv[1]](dist.get_rank())
    dist.destroy_process_group()
