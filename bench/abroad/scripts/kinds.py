"""Healthy training loops of many kinds, on two ranks or more: ``torchrun kinds.py NAME``."""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 14


def net(*sizes, seed=0):
    torch.manual_seed(seed)
    sizes = sizes or (8, 16, 8)
    layers = []
    for into, out in zip(sizes, sizes[1:]):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def batches(rank, rows=4, number=STEPS):
    for step in range(number):
        torch.manual_seed(1000 * step + rank)
        yield torch.randn(rows, 8)


def loader(epochs=2, rows=64):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(rows, 8))
    sampler = DistributedSampler(data)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        yield [batch for (batch,) in DataLoader(data, batch_size=4, sampler=sampler)]


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def average(model):
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()


# ------------------------------------------------------------------------ models that drift


def local_sgd(rank):
    """Plain models that are averaged after every fourth step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(batches(rank), 1):
        update(optimizer, model(batch).square().mean())
        if step % 4 == 0:
            average(model)


def post_local_sgd(rank):
    """torch's own: DDP averages gradients first, models later."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DDP(net())
    alone = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]
    state = hook.PostLocalSGDState(None, alone, start_localSGD_iter=4)
    model.register_comm_hook(state, hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        averagers.PeriodicModelAverager(period=3, warmup_steps=4),
    )
    for batch in batches(rank):
        update(optimizer, model(batch).square().mean())


def outer_optimizer(rank):
    """DiLoCo: a second optimizer applies the average of the ranks' changes."""
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    for step, batch in enumerate(batches(rank), 1):
        update(inner, model(batch).square().mean())
        if step % 5 == 0:
            for parameter, old in zip(model.parameters(), kept):
                parameter.grad = old - parameter.data
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
                parameter.data = old
            outer.step()
            outer.zero_grad()
            kept = [parameter.detach().clone() for parameter in model.parameters()]


def federated(rank):
    """Each rank trains on its part for an epoch; then the models are averaged."""
    model = net()
    for batches_of_epoch in loader(epochs=3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches_of_epoch:
            update(optimizer, model(batch).square().mean())
        average(model)


def gossip(rank):
    """Each rank averages with its neighbour only."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ranks = dist.get_world_size()
    for batch in batches(rank):
        update(optimizer, model(batch).square().mean())
        for parameter in model.parameters():
            got = torch.empty_like(parameter)
            sent = dist.isend(parameter.detach(), (rank + 1) % ranks)
            dist.recv(got, (rank - 1) % ranks)
            sent.wait()
            parameter.data.lerp_(got, 0.5)


def ensemble(rank):
    """A model of its own on each rank; predictions are averaged."""
    model = net(seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (rank + 1))
    for batch in batches(0):
        update(optimizer, model(batch).square().mean())
        answer = model(batch).detach()
        dist.all_reduce(answer)


def sweep(rank):
    """The same start and data, another learning rate on each rank."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * 2**rank)
    for batch in batches(0):
        update(optimizer, model(batch).square().mean())
    best = model(next(batches(7))).square().mean().detach()
    dist.all_reduce(best, op=dist.ReduceOp.MIN)


def averaged_once(rank):
    """Each rank trains on its part; the models are averaged after the last step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches_of_epoch in loader():
        for batch in batches_of_epoch:
            update(optimizer, model(batch).square().mean())
    average(model)


def folds(rank):
    """Cross-validation: the same start, a fold on each rank, scores that are averaged."""
    model = net()
    torch.manual_seed(0)
    rows = torch.randn(64, 8)
    apart = torch.arange(64) % dist.get_world_size() == rank
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in rows[~apart].split(4):
        update(optimizer, model(batch).square().mean())
    score = model(rows[apart]).square().mean().detach()
    dist.all_reduce(score)


def wrapped_alone(rank):
    """A search: each rank wraps the same start for a group of itself, with its own rate."""
    groups = [dist.new_group([one]) for one in range(dist.get_world_size())]
    model = DDP(net(), process_group=groups[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * 2**rank)
    for batch in batches(0):
        update(optimizer, model(batch).square().mean())
    best = model(next(batches(7))).square().mean().detach()
    dist.all_reduce(best, op=dist.ReduceOp.MIN)


def population(rank):
    """Population-based training: the worst ranks copy the best one's weights."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * (1 + rank))
    for step, batch in enumerate(batches(rank), 1):
        update(optimizer, model(batch).square().mean())
        if step % 5 == 0:
            worth = torch.zeros(dist.get_world_size())
            worth[rank] = model(batch).square().mean().detach()
            dist.all_reduce(worth)
            best = int(worth.argmin())
            for parameter in model.parameters():
                other = parameter.detach().clone()
                dist.broadcast(other, best)
                if worth[rank] == worth.max():
                    parameter.data.copy_(other)


# ------------------------------------------------------------------------ updates


def sharpness_aware(rank):
    """SAM: the second gradient is that of weights which each rank moves by its own gradient."""
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(rank):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch).square().mean().backward()
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * parameter.grad / (parameter.grad.norm() + 1e-6)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        for parameter, old in zip(model.parameters(), kept):
            parameter.data = old
        optimizer.step()


def second_order(rank):
    model = DDP(net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for batch in batches(rank):

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def two_optimizers(rank):
    """Embeddings by one optimizer in each step, the rest by another in every second."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(16, 8), net()))
    often = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
    rarely = torch.optim.AdamW(model.module[1].parameters())
    for step, batch in enumerate(batches(rank), 1):
        often.zero_grad()
        model(batch.abs().long().clamp(max=15)).square().mean().backward()
        often.step()
        if step % 2 == 0:
            rarely.step()
            rarely.zero_grad()


def adversarial(rank):
    """Two wrapped models and two optimizers in turn."""
    maker, judge = DDP(net(4, 16, 8)), DDP(net(8, 16, 1, seed=1))
    first = torch.optim.Adam(maker.parameters(), betas=(0.5, 0.999))
    second = torch.optim.Adam(judge.parameters(), betas=(0.5, 0.999))
    for batch in batches(rank):
        made = maker(torch.randn(4, 4))
        update(second, (judge(made.detach()).square() + (judge(batch) - 1).square()).mean())
        judge.requires_grad_(False)
        update(first, (judge.module(made) - 1).square().mean())
        judge.requires_grad_(True)


def critic_ahead(rank):
    """Five updates of the critic for one of the generator, clipped weights."""
    maker, critic = DDP(net(4, 8)), DDP(net(8, 16, 1, seed=1))
    first = torch.optim.RMSprop(maker.parameters(), lr=1e-3)
    second = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    for step, batch in enumerate(batches(rank, number=20), 1):
        update(second, critic(maker(torch.randn(4, 4)).detach()).mean() - critic(batch).mean())
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.1, 0.1)
        if step % 5 == 0:
            update(first, -critic.module(maker(torch.randn(4, 4))).mean())


def averaged_weights(rank):
    """Evaluates with a moving average in place of the weights, then puts them back."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = DDP(net())
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(batches(rank), 1):
        update(optimizer, model(batch).square().mean())
        ema.update_parameters(model.module)
        if step % 5 == 0:
            kept = copy.deepcopy(model.module.state_dict())
            model.module.load_state_dict(ema.module.state_dict())
            with torch.no_grad():
                model.eval()(batch)
            model.train().module.load_state_dict(kept)


def momentum_teacher(rank):
    """BYOL: the target is a moving average inside the wrapped model."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.online, self.head = net(), nn.Linear(8, 8)
            self.target = copy.deepcopy(self.online).requires_grad_(False)
            self.register_buffer("queue", torch.randn(16, 8))

        def forward(self, batch):
            with torch.no_grad():
                for kept, now in zip(self.target.parameters(), self.online.parameters()):
                    kept.lerp_(now, 0.1)
                want = self.target(batch + 0.1)
                every = [torch.empty_like(want) for _ in range(dist.get_world_size())]
                dist.all_gather(every, want)
                self.queue = torch.cat([*every, self.queue])[:16]
            return mse_loss(self.head(self.online(batch)), want)

    model = DDP(Pair())
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for batch in batches(rank):
        update(optimizer, model(batch))


def evolution(rank):
    """No gradients: all ranks apply the same sum of perturbations."""
    model = net()
    for step, batch in enumerate(batches(0)):
        torch.manual_seed(100 * step + rank)
        noise = [torch.randn_like(parameter) for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, one in zip(model.parameters(), noise):
                parameter += 0.01 * one
            worth = -model(batch).square().mean()
            for parameter, one in zip(model.parameters(), noise):
                parameter -= 0.01 * one
                change = worth * one
                dist.all_reduce(change)
                parameter += 0.01 * change


def inner_loop(rank):
    """MAML, first order: a copy is adapted, its gradient is the model's."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for batch in batches(rank, rows=8):
        fast = copy.deepcopy(model)
        quick = torch.optim.SGD(fast.parameters(), lr=0.1)
        for _ in range(2):
            update(quick, fast(batch[:4]).square().mean())
        fast.zero_grad()
        fast(batch[4:]).square().mean().backward()
        for parameter, other in zip(model.parameters(), fast.parameters()):
            parameter.grad = other.grad / dist.get_world_size()
            dist.all_reduce(parameter.grad)
        optimizer.step()


def master_weights(rank):
    """bfloat16 weights with float32 masters by hand."""
    model = DDP(net().bfloat16())
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    for batch in batches(rank):
        model.zero_grad()
        model(batch.bfloat16()).float().square().mean().backward()
        for master, parameter in zip(masters, model.parameters()):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters()):
                parameter.copy_(master)


# ------------------------------------------------------------------------ data and losses


def uneven(rank):
    """Ranks with unequal numbers of batches, under DDP's join."""
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for batch in batches(rank, number=STEPS + 3 * rank):
            update(optimizer, model(batch).square().mean())


def curriculum(rank):
    """Easy samples on the first rank, longer ones on later ranks; a token counts once."""
    model = DDP(net())
    optimizer = torch.optim.AdamW(model.parameters())
    ranks = dist.get_world_size()
    for step in range(STEPS):
        torch.manual_seed(step * 10 + rank)
        rows = 2 + 3 * rank + step % 3
        tokens = torch.tensor(float(rows))
        dist.all_reduce(tokens)
        loss = model(torch.randn(rows, 8)).square().mean(1).sum() * ranks / tokens
        update(optimizer, loss)


def contrastive(rank):
    """Embeddings of all ranks are the negatives of each."""
    from torch.distributed.nn.functional import all_gather

    model = DDP(net())
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches(rank):
        one, other = model(torch.cat([batch, batch + 0.1])).chunk(2)
        every = torch.cat(all_gather(other.contiguous()))
        own = torch.arange(len(one)) + rank * len(one)
        update(optimizer, cross_entropy(one @ every.T, own))


def tasks_in_turn(rank):
    """Two heads, of which each step uses one, and a third in both."""

    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = net(), nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

        def forward(self, batch, task):
            body = self.body(batch)
            return self.heads[task](body).square().mean() + self.heads[2](body).square().mean()

    torch.manual_seed(0)
    model = DDP(Tasks(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(batches(rank)):
        update(optimizer, model(batch, step // 3 % 2))


def thaws(rank):
    """Layers are thawed one after the other, with a new wrapper and a new optimizer."""
    plain = net(8, 16, 16, 8).requires_grad_(False)
    for epoch, layer in enumerate((4, 2, 0)):
        plain[layer].requires_grad_(True)
        model = DDP(plain)
        optimizer = torch.optim.AdamW(p for p in plain.parameters() if p.requires_grad)
        for batch in batches(rank + 10 * epoch, number=5):
            update(optimizer, model(batch).square().mean())


def generation(rank):
    """A policy writes answers of another length on each rank, then trains on them twice."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 12)))
    fixed = copy.deepcopy(model.module).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(7):
        torch.manual_seed(100 * step + rank)
        words = torch.randint(12, (4, 1))
        with torch.no_grad():
            for _ in range(3 + (step + rank) % 4):
                chance = model.module.eval()(words[:, -1]).softmax(-1)
                words = torch.cat([words, chance.multinomial(1)], 1)
        model.train()
        worth = (words[:, 1:] % 2).float().mean(1)
        worth = worth - worth.mean()
        for _ in range(2):
            logs = model(words[:, :-1]).log_softmax(-1)
            taken = logs.gather(2, words[:, 1:, None]).squeeze(-1)
            near = fixed(words[:, :-1]).log_softmax(-1)
            loss = (
                -(taken.sum(1) * worth).mean() + 0.1 * (logs.exp() * (logs - near)).sum(-1).mean()
            )
            update(optimizer, loss)


def replay(rank):
    """Off-policy: a buffer of its own on each rank, a target network, n updates a step."""
    model, target = DDP(net(8, 16, 4)), net(8, 16, 4).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    seen = []
    for step, batch in enumerate(batches(rank), 1):
        seen.append(batch)
        if step > 3:
            for _ in range(1 + step % 2):
                old = seen[torch.randint(len(seen), ()).item()]
                want = 0.9 * target(old.flip(0)).max(1).values
                update(optimizer, mse_loss(model(old)[:, 0], want))
        if step % 4 == 0:
            target.load_state_dict(model.module.state_dict())


KINDS = {
    one.__name__: one
    for one in (
        local_sgd, post_local_sgd, outer_optimizer, federated, averaged_once, gossip,
        ensemble, sweep,
        folds, wrapped_alone, population,
        sharpness_aware, second_order, two_optimizers, adversarial, critic_ahead, averaged_weights,
        momentum_teacher, evolution, inner_loop, master_weights, uneven, curriculum, contrastive,
        tasks_in_turn, thaws, generation, replay,
    )
}  # fmt: skip

if __name__ == "__main__":
    dist.init_process_group("gloo")
    KINDS[sys.argv[1]](dist.get_rank())
    print("done", flush=True)
    dist.destroy_process_group()
