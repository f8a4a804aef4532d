"""What one rank records for the laws."""

from __future__ import annotations

import copy
import importlib
import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from moediag.evidence.events import read_log  # noqa: E402
from moediag.evidence.law_records import read_laws  # noqa: E402
from moediag.protocol import ENV_LAWS  # noqa: E402
from moediag.recorder import Recorder, install  # noqa: E402
from moediag.recorder.laws.context import is_checked, next_checked  # noqa: E402
from moediag.recorder.laws.replica_sets import ReplicaSets  # noqa: E402
from tests.unit.recorder.written import laws  # noqa: E402


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone, in which DistributedDataParallel works."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def train(net: nn.Module, optimizer: object, batches: object) -> None:
    for (batch,) in batches:  # type: ignore[attr-defined]
        net(batch).sum().backward()
        optimizer.step()  # type: ignore[attr-defined]
        optimizer.zero_grad()  # type: ignore[attr-defined]


def samples(number: int) -> TensorDataset:
    return TensorDataset(torch.randn(number, 4))


@pytest.mark.usefixtures("group")
def test_an_optimizer_made_before_anything_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program does not update by itself: its models are not read again for that."""
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    monkeypatch.setenv(ENV_LAWS, "0")
    made = install(str(tmp_path), 0, 1, of_job=True)
    try:
        train(wrapped, optimizer, DataLoader(samples(3)))
    finally:
        made.uninstall()
    assert [(one.step, bool(one.hyper)) for one in laws(tmp_path).checks][-2:] == [
        (2, True), (3, True),
    ]  # fmt: skip


def test_the_checked_steps_become_rarer() -> None:
    assert [s for s in range(200) if is_checked(s)] == [1, 2, 3, 6, 12, 24, 48, 96, 192]
    assert [s for s in range(30) if is_checked(s, 10)] == [1, 2, 3, 10, 20]


@pytest.mark.parametrize("every", [0, 1, 2, 7, 10])
def test_the_next_checked_step(every: int) -> None:
    for step in range(100):
        later = (s for s in range(step + 1, 300) if is_checked(s, every))
        assert next_checked(step, every) == next(later)


def test_names_that_two_models_of_an_optimizer_have_are_numbered(
    recorder: Recorder, tmp_path: Path
) -> None:
    """An actor and a critic of one class."""
    actor, critic = model(), model()
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.5)
    for _ in range(2):
        (actor(torch.ones(1, 4)).sum() + critic(torch.ones(1, 4)).sum()).backward()
        optimizer.step()
    names = [piece.name for piece in laws(tmp_path).checks[-1].pieces]
    assert names[::4] == ["0.weight", "0.weight (2)"] and len(set(names)) == 8


def test_a_part_that_is_called_alone_first_has_its_name_in_the_model(
    recorder: Recorder, tmp_path: Path
) -> None:
    part = model()
    part(torch.ones(1, 4))
    whole = nn.Sequential(part, nn.LazyLinear(2))
    whole(torch.ones(1, 4)).sum().backward()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    optimizer.step()
    assert next(piece.name for piece in laws(tmp_path).checks[-1].pieces) == "0.0.weight"


def test_an_engine_of_deepspeed_names_its_data_parallel_ranks(
    recorder: Recorder, group: None
) -> None:
    engine = type("DeepSpeedEngine", (nn.Linear,), {"data_parallel_group": None})(2, 2)
    sets = ReplicaSets(recorder)
    assert sets.data_parallel(engine) == ()
    engine.data_parallel_group = dist.group.WORLD
    assert sets.data_parallel(engine) == (0,)


def test_a_check_has_every_parameter_by_name(recorder: Recorder, tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    train(net, optimizer, DataLoader(samples(7)))
    found = laws(tmp_path)
    assert [check.step for check in found.checks] == [1, 2, 3, 6]
    assert [check.age for check in found.checks] == [-1, 1, 2, 5]
    last = found.checks[-1]
    assert [piece.name for piece in last.pieces] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert (last.count, last.optimizer, last.hyper[0]["lr"]) == (5, "AdamW", "0.5")
    assert last.line.startswith("test_optimizer_checks.py:") and last.line.endswith(" train")
    assert len({check.params for check in found.checks}) == 4
    assert set(last.state) == {"step", "exp_avg", "exp_avg_sq"}


def test_gradients_that_are_absent_zero_or_frozen(recorder: Recorder, tmp_path: Path) -> None:
    net = model()
    net[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.zeros(2, 4)).sum().backward()
    net[1].bias.grad = None
    optimizer.step()
    weight, frozen, used, none = laws(tmp_path).checks[0].grads
    assert (weight, frozen, none) == ("zero", None, "")
    assert used not in (None, "", "zero")


def test_gradients_of_a_sparse_embedding(recorder: Recorder, tmp_path: Path) -> None:
    table = nn.Embedding(9, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for rows in ([1, 2], [2, 1], [1, 3]):
        optimizer.zero_grad()
        table(torch.tensor(rows)).sum().backward()
        optimizer.step()
    first, same, others = (check.grads[0] for check in laws(tmp_path).checks)
    assert first == same != others and None not in (first, others)


def test_two_optimizers_of_equal_names_are_two(recorder: Recorder, tmp_path: Path) -> None:
    nets = model(), model()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    sum(net(torch.ones(1, 4)).sum() for net in nets).backward()  # type: ignore[union-attr]
    for optimizer in optimizers:
        optimizer.step()
    assert len({check.key for check in laws(tmp_path).checks}) == 2


@pytest.mark.parametrize("keeps", [False, True])
def test_a_model_that_was_discarded_is_told(
    recorder: Recorder, tmp_path: Path, keeps: bool
) -> None:
    kept = []
    for _ in range(3):
        net = model()
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(samples(3)))
        kept += [net] if keeps else []
    found = laws(tmp_path)
    told = [event["model"] for event in found.others.get("discarded", ())]
    models = dict.fromkeys(check.key.partition(".")[0] for check in found.checks)
    assert told == ([] if keeps else list(models)[:2])


@pytest.mark.parametrize(
    ("at", "checks"),
    [(1, [(1, 0), (2, 2), (3, 3), (6, 6)]), (2, [(1, 0), (2, 1), (3, 3), (6, 6)])],
)
def test_a_second_call_of_step_belongs_to_the_same_step(
    recorder: Recorder, tmp_path: Path, at: int, checks: list[tuple[int, int]]
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(net, optimizer, DataLoader(samples(at)))
    optimizer.step()
    train(net, optimizer, DataLoader(samples(6 - at)))
    assert [(check.step, check.count) for check in laws(tmp_path).checks] == checks


def test_a_model_that_comes_later_is_followed_from_there(
    recorder: Recorder, tmp_path: Path
) -> None:
    first, second = model(), model()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
    train(first, optimizers[0], DataLoader(samples(12)))
    before = recorder.current_step
    train(second, optimizers[1], DataLoader(samples(12)))
    assert recorder.current_step > before + 6
    assert not any("laws" in text for text in read_log(tmp_path, 0).not_seen)
    assert len({check.key for check in laws(tmp_path).checks}) == 2


def test_a_model_that_is_wrapped_again_is_followed(
    recorder: Recorder, tmp_path: Path, group: None
) -> None:
    base = model()
    optimizer = torch.optim.SGD(base.parameters(), lr=0.1)
    train(DistributedDataParallel(base), optimizer, DataLoader(samples(3)))
    before = recorder.current_step
    train(DistributedDataParallel(base), optimizer, DataLoader(samples(6)))
    assert recorder.current_step >= before + 5


def test_the_model_inside_a_wrapper_that_is_called_is_told_with_its_line(
    recorder: Recorder, tmp_path: Path, group: None
) -> None:
    wrapped = DistributedDataParallel(model())
    wrapped(torch.ones(1, 4)).sum().backward()
    with torch.no_grad():
        wrapped.module(torch.ones(1, 4))
    copy.deepcopy(wrapped.module)(torch.ones(1, 4)).sum().backward()
    assert not laws(tmp_path).others.get("bare")
    for _ in range(2):
        wrapped.module(torch.ones(1, 4)).sum().backward()
    (found,) = laws(tmp_path).others["bare"]
    assert Path(__file__).name in found["line"]


@pytest.mark.parametrize("left", [False, True])
def test_an_update_without_a_backward_outside_of_no_sync_is_told(
    recorder: Recorder, tmp_path: Path, group: None, left: bool
) -> None:
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with wrapped.no_sync():
        wrapped(torch.ones(1, 4)).sum().backward()
    if left:
        wrapped(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert len(laws(tmp_path).others.get("unreduced", ())) == (not left)


@pytest.mark.parametrize("reduced", [(True, False), (False, True), (False, False)])
def test_a_last_backward_inside_no_sync_is_told(
    recorder: Recorder, tmp_path: Path, group: None, reduced: tuple[bool, ...]
) -> None:
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(2):
        for one in reduced:
            wrapped.require_backward_grad_sync = one
            wrapped(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert len(laws(tmp_path).others.get("late", ())) == (reduced == (True, False))


@pytest.mark.parametrize("joins", [True, False])
def test_the_calls_before_each_update(
    recorder: Recorder, tmp_path: Path, group: None, joins: bool
) -> None:
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with wrapped.join(enable=joins):
        train(wrapped, optimizer, DataLoader(samples(3)))
    *_, last = laws(tmp_path).checks
    assert [one[0] for one in last.past] == ([0] if joins else [0, 1, 2])


def test_a_wrapper_in_another_mode_than_its_model(
    recorder: Recorder, tmp_path: Path, group: None
) -> None:
    wrapped = DistributedDataParallel(model())
    wrapped.eval().module.train()
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), DataLoader(samples(2)))
    found = laws(tmp_path)
    assert len(found.inputs) == 2 and all(one.training for one in found.modes)


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, run: Any, given: Any) -> Any:
        return run(given)

    @staticmethod
    def backward(_: Any, gradient: Any) -> tuple[None, Any]:
        return None, gradient


class Table(nn.Module):
    """Reads the parameter of a part that it never calls."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.rows, self.reads = nn.Embedding(1, 4), reads

    def forward(self, given: Any) -> Any:
        return given + self.rows.weight if self.reads else given


@pytest.mark.parametrize("how", ["no_grad", "unused", "checkpointed", "trained"])
def test_a_part_that_is_read_without_gradients(
    recorder: Recorder, tmp_path: Path, how: str
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table = nn.Linear(4, 4), Table(how in ("no_grad", "trained"))

        def forward(self, given: Any) -> Any:
            made = self.first(given)
            if how == "checkpointed":
                return torch.utils.checkpoint.checkpoint(self.table, made, use_reentrant=True)
            with torch.set_grad_enabled(how != "no_grad"):
                apart = self.table(given)
            return made + apart

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for (batch,) in DataLoader(samples(6)):
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    cut = laws(tmp_path).of("no_grad", lambda event: event["modules"])
    assert cut == {"no_grad": (["table.rows"],) * 3, "trained": ()}.get(how, ([],) * 3)


@pytest.mark.parametrize("how", ["cut", "no_grad", "unused", "trained"])
def test_modules_that_run_without_gradients(recorder: Recorder, tmp_path: Path, how: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, given: Any) -> Any:
            made = self.first(given)
            if how == "no_grad":
                with torch.no_grad():
                    apart = self.part(given)
                return made + apart
            return made if how == "unused" else self.run(made)

        def run(self, made: Any) -> Any:
            return Cut.apply(self.part, made) if how == "cut" else self.part(made)

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for (batch,) in DataLoader(samples(6)):
        net(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # an evaluation
            net.part(batch)
    cut = laws(tmp_path).of("no_grad", lambda event: event["modules"])
    assert cut == (["part"],) * (3 if how in ("cut", "no_grad") else 0)
    assert not any(module._forward_pre_hooks for module in net.modules() if module is not net)


def test_a_program_that_updates_by_itself(recorder: Recorder, tmp_path: Path) -> None:
    net = model()
    for _ in range(3):
        net(torch.ones(1, 4)).sum().backward()
        for parameter in net.parameters():
            parameter.data -= 0.1 * parameter.grad  # type: ignore[operator]
            parameter.grad = None
    found = laws(tmp_path)
    assert [(one.optimizer, one.step, one.count) for one in found.checks] == [
        ("", step, step - 1) for step in (1, 2, 3)
    ]
    assert len({one.params for one in found.checks}) == 3
    assert [one.training for one in found.modes] == [True] * 3


@pytest.mark.parametrize("engine", [True, False])
def test_partitions_of_deepspeed(recorder: Recorder, tmp_path: Path, engine: bool) -> None:
    flat: Any = nn.Parameter(torch.ones(8))
    inner = torch.optim.SGD([flat], lr=0.1)
    kind = type("DeepSpeedEngine" if engine else "Engine", (nn.Linear,), {"data_parallel_group": 0})
    net: Any = kind(4, 2)
    net.optimizer = SimpleNamespace(optimizer=inner)
    with mock.patch.object(ReplicaSets, "data_parallel", return_value=(0, 1)):
        net(torch.ones(1, 4)).sum().backward()
        flat.grad = torch.ones(8)
        inner.step()
    checks = [one for one in laws(tmp_path).checks if one.optimizer]
    told = [(one.pieces[0].how, one.pieces[0].ranks, one.hyper[0]["lr"]) for one in checks]
    assert told == [("part", (0, 1), "0.1")] * engine


@pytest.mark.parametrize("forgets", [False, True])
def test_copies_that_an_optimizer_has_are_compared_with_the_model(
    recorder: Recorder, tmp_path: Path, forgets: bool
) -> None:
    net = model().bfloat16()
    copies = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    for _ in range(3):
        net(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        for copy_, parameter in zip(copies, net.parameters(), strict=True):
            copy_.grad = parameter.grad.float()
        optimizer.step()
        for copy_, parameter in list(zip(copies, net.parameters(), strict=True))[forgets:]:
            parameter.data.copy_(copy_.data)
    checks = laws(tmp_path).checks
    assert [check.step for check in checks] == [1, 2, 3]
    of_first = [(check.params[0], check.copies[0]) for check in checks]
    assert of_first[0][0] == of_first[0][1]
    assert (of_first[-1][0] != of_first[-1][1]) is forgets
    assert all(check.copies[2] == check.params[2] for check in checks)
    assert len({check.params[2] for check in checks}) == 3


@pytest.mark.parametrize("how", ["loaded", "loaded in time", "elsewhere"])
def test_copies_of_deepspeed_that_do_not_have_what_was_loaded(
    recorder: Recorder, tmp_path: Path, how: str
) -> None:
    """It has copies in float32 of those elements of which this rank makes the updates."""
    net = model().bfloat16()
    late = torch.randn(2, 3)
    if how == "loaded in time":
        net[1].weight.data.copy_(late)
    flat = nn.Parameter(torch.cat([p.detach().float().reshape(-1)[1:] for p in net.parameters()]))
    begin, parts = 0, []
    for parameter in net.parameters():
        own: Any = parameter
        parts.append((parameter, flat.detach()[begin : begin + own.numel() - 1]))
        address = SimpleNamespace(start=1, numel=own.numel() - 1)
        known = SimpleNamespace(hp_fragment=parts[-1][1], lp_fragment_address=address)
        own._hp_mapping = None if how == "elsewhere" else known
        begin += own.numel() - 1
    net[1].weight.data.copy_(late)
    optimizer = torch.optim.SGD([flat], lr=0.1)
    for _ in range(3):
        net(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        flat.grad = torch.ones_like(flat)
        optimizer.step()
        for parameter, copied in parts:
            parameter.data.reshape(-1)[1:].copy_(copied)
    found = laws(tmp_path).of("copied", lambda row: (row["step"], row["apart"]))
    first = ["1.weight"] if how == "loaded" else []
    wanted: Any = ((1, first), (2, []), (3, []))
    assert found == (() if how == "elsewhere" else wanted)


@pytest.mark.parametrize("wraps", [False, True])
def test_a_model_of_which_an_optimizer_has_a_part_is_compared_as_a_whole(
    recorder: Recorder, tmp_path: Path, group: None, wraps: bool
) -> None:
    net = DistributedDataParallel(model()) if wraps else model()
    owned = list(net.parameters())[:1]
    train(net, torch.optim.SGD(owned, lr=0.1), DataLoader(samples(3)))
    whole = [check for check in laws(tmp_path).checks if not check.optimizer]
    assert [check.step for check in whole] == [1, 2, 3]
    assert len(whole[0].pieces) == len(list(net.parameters())) > len(whole[0].owned) == 1


def test_inputs_of_models_with_the_sampler(recorder: Recorder, tmp_path: Path) -> None:
    net = model()
    data = samples(6)
    sampler = DistributedSampler(data, num_replicas=2, rank=1)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, sampler=sampler))
    net.eval()
    net(torch.ones(1, 4))
    found = laws(tmp_path).inputs
    assert [one.step for one in found] == [1, 2, 3]
    assert found[0].digest != found[1].digest
    assert (found[0].sampler, found[0].replicas, found[0].number) == ("DistributedSampler", 2, 1)


def test_where_the_samples_of_averaging_ranks_come_from(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplicaSets, "averaged", lambda *_: (0, 1))
    net, data = model(), samples(6)
    sampler = DistributedSampler(samples(4), num_replicas=2, rank=1, seed=7)
    sampler.set_epoch(3)
    with torch.autocast("cpu", torch.bfloat16):
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data, sampler=sampler))
    first, settings = laws(tmp_path).inputs[0], laws(tmp_path).others["settings"][0]
    assert "autocast = cpu, torch.bfloat16" in settings["of"] and settings["over"] == [0, 1]
    assert first.over == (0, 1) and not first.data
    known = first.seed, first.epoch, first.drawn, first.given, first.replicas, first.number
    assert known == (7, 3, 4, 6, 2, 1)


class Drawn(torch.utils.data.Dataset[torch.Tensor]):
    """Makes its samples up, of its row if there is a generator for it."""

    def __init__(self, rng: bool = True, of_row: bool = False) -> None:
        self.of_row = of_row
        self.rng = random.Random(1) if rng else None

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> torch.Tensor:
        own = torch.Generator().manual_seed(row) if self.of_row else None
        return torch.randn(4, generator=own)


def test_a_loader_that_shuffles_all_of_its_data(recorder: Recorder, tmp_path: Path) -> None:
    """Random samples are others on each rank, unless the dataset has what they are made of."""
    net = model()
    every = [Drawn(False), Drawn(False, True), Drawn(True, True), samples(12), samples(24)]
    for data in (*every[:2], every[2], *every[2:], every[-1]):
        loader = DataLoader(data, shuffle=True)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    found = [(one.step, one.given, one.data) for one in laws(tmp_path).inputs]
    assert [step for step, _, _ in found] == [1, 2, 3, 6, 12, 24, 48]
    assert [(given, len(data)) for _, given, data in found] == [
        *[(3, 0)] * 3, (3, 16), (3, 16), (12, 16), (24, 16)
    ]  # fmt: skip
    assert len({data for _, given, data in found if given == 3 and data}) == 2
    assert all(one.order.startswith("[") for one in laws(tmp_path).inputs)


@pytest.mark.parametrize(
    ("way", "steps"),
    [
        ("trains", [1, 2, 3, 6]), ("first", [1, 2, 3, 6]), ("both divided", []),
        ("not shuffled", []), ("made up", []), ("evaluates", []), ("evaluates in part", []),
    ],
)  # fmt: skip
def test_a_loader_that_is_divided_beside_one_that_is_not(
    recorder: Recorder, tmp_path: Path, way: str, steps: list[int]
) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data, more = samples(32), Drawn(False) if way == "made up" else samples(32)
    divided = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    other = DataLoader(more, shuffle=way != "not shuffled")
    if way == "both divided":
        other = DataLoader(more, sampler=DistributedSampler(more, num_replicas=2, rank=1))
    one, two = iter(divided), iter(other)
    for _ in range(6):
        if way.startswith("evaluates"):
            evaluate(net, other, 2 if way.endswith("part") else 99)
            batches = [next(one)]
        elif way == "made up":
            two = iter(other) if two._num_yielded == 3 else two
            batches = [next(one), [next(two)]]
        else:
            batches = [next(two), next(one)] if way == "first" else [next(one), next(two)]
        net(torch.cat([batch for (batch,) in batches])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = laws(tmp_path).others.get("beside", ())
    assert [one["step"] for one in found] == steps
    assert {(one["given"], one["sampler"]) for one in found} <= {(32, "RandomSampler")}
    assert all("test_a_loader_that_is" in f"{one['made']}{one['divided']}" for one in found)


def evaluate(net: nn.Module, loader: object, most: int) -> None:
    with torch.no_grad():
        for at, (batch,) in enumerate(loader):  # type: ignore[arg-type,var-annotated]
            net(batch)
            if at == most:
                break


@pytest.mark.parametrize(("sets_epoch", "expected"), [(False, 1), (True, 0)])
def test_the_same_order_in_two_passes(
    recorder: Recorder, tmp_path: Path, sets_epoch: bool, expected: int
) -> None:
    net, data = model(), samples(6)
    sampler = DistributedSampler(data, num_replicas=2, rank=1)
    loader = DataLoader(data, sampler=sampler)
    next(iter(loader))  # a look at the data
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(3):
        if sets_epoch:
            sampler.set_epoch(epoch)
        train(net, optimizer, loader)
    found = laws(tmp_path).others.get("same_order", ())
    assert len(found) == expected
    assert all(one["line"].endswith(" train") for one in found)


def test_passes_of_evaluation_may_have_the_same_order(recorder: Recorder, tmp_path: Path) -> None:
    net, data = model(), samples(4)
    other = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        train(net, optimizer, DataLoader(data))
        for (batch,) in other:
            net(batch)
    assert "same_order" not in laws(tmp_path).others


@pytest.mark.parametrize("at_once", [True, False])
def test_the_norm_of_clipping(recorder: Recorder, tmp_path: Path, at_once: bool) -> None:
    from torch.nn import utils

    net = model()
    net(torch.ones(1, 4)).sum().backward()
    if at_once:
        returned = utils.clip_grad_norm_(net.parameters(), 0.5)
    else:
        returned = utils.get_total_norm([p.grad for p in net.parameters()])  # type: ignore[misc]
        utils.clip_grads_with_norm_(net.parameters(), 0.5, returned)
    (norm,) = laws(tmp_path).norms
    assert norm.norm == pytest.approx(float(returned))
    assert norm.factor == pytest.approx(0.5 / float(returned), rel=1e-3)
    assert norm.names == ("0.weight", "0.bias", "1.weight", "1.bias")


def test_deepspeed_clips_by_a_function_of_its_own(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "deepspeed" / "runtime"
    package.mkdir(parents=True)
    (package / "engine.py").write_text(
        "def clip_grad_norm_(parameters, max_norm, norm_type=2):\n"
        "    [p.grad.mul_(0.1) for p in parameters if p.grad is not None]\n"
        "    return 5.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = importlib.import_module("deepspeed.runtime.engine")
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.engine"):
        del sys.modules[name]
    net = model()
    net[1].bias.requires_grad = False
    net(torch.ones(1, 4)).sum().backward()
    squares = [float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None]
    assert engine.clip_grad_norm_(parameters=net.parameters(), max_norm=0.5) == 5.0
    (norm,) = laws(tmp_path).norms
    assert (norm.norm, norm.max_norm, norm.names) == (5.0, 0.5, ("0.weight", "0.bias", "1.weight"))
    assert norm.squares == pytest.approx(squares)
    assert float(net[0].weight.grad.square().sum()) == pytest.approx(squares[0] / 100)


def test_a_hooked_model_can_be_copied_and_saved(recorder: Recorder, tmp_path: Path) -> None:
    net = model()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(samples(2)))
    copied = copy.deepcopy(net)
    copied(torch.ones(1, 4))
    torch.save(net, io.BytesIO())
    assert [one.step for one in laws(tmp_path).inputs] == [1, 2]


def test_without_the_variable_nothing_is_recorded(tmp_path: Path) -> None:
    made = install(str(tmp_path), 0, 1, of_job=True)
    net = model()
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(samples(1)))
    made.uninstall()
    assert read_laws(tmp_path, 0) == (None, ())


@pytest.mark.usefixtures("recorder")
def test_updates_without_a_learning_rate_are_counted(tmp_path: Path) -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: float(step not in (1, 4, 5))
    )
    for _ in range(6):
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert [(one.step, one.zero_rates) for one in laws(tmp_path).checks] == [
        (1, 0), (2, 1), (3, 0), (6, 2),
    ]  # fmt: skip
