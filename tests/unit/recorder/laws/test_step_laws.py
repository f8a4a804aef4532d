"""What one rank records of the numbers of a step: weights of tokens, gradients between backward and
update, recomputation, rounding, layers, embeddings, ties, undone updates, loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402

from moediag.recorder.laws import (  # noqa: E402
    checkpointed_inputs,
    hand_reduction,
    loading,
    loss_weights,
    wrapping,
)
from tests.unit.fake_ranks import fake_rank  # noqa: E402
from tests.unit.recorder.written import laws  # noqa: E402

pytestmark = pytest.mark.usefixtures("recorder")


def written(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "rank-0.laws.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["e"] == kind]


def train(net: nn.Module, backward: Callable[[int], None], steps: int = 3, lr: float = 0.1) -> None:
    """Makes steps; ``backward`` is called with each one's number."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    for step in range(1, steps + 1):
        backward(step)
        optimizer.step()
        optimizer.zero_grad()


def returned_by_wrapper(loss: Any) -> Any:
    """What DistributedDataParallel returns that looks for unused parameters."""
    from torch.nn.parallel.distributed import _DDPSink

    wrapper = mock.Mock(static_graph=False)
    return _DDPSink.apply(lambda: wrapper, torch.ones(1), loss, loss.exp())[1]


class TestLossWeights:
    def recorded(self, folder: Path, loss: Callable[[Any, Any], Any]) -> list[dict[str, Any]]:
        net = nn.Linear(4, 5)
        labels = torch.tensor([1, 2, -100, 4])
        train(net, lambda _: loss(net(torch.randn(4, 4)), labels).backward())
        return [event["backwards"] for event in written(folder, "losses")]

    @pytest.mark.parametrize(
        ("loss", "total", "least"),
        [
            (lambda x, y: functional.cross_entropy(x, y) * 2, 2.0, 2 / 3),
            (lambda x, y: functional.cross_entropy(x, y, reduction="sum") / 6, 0.5, 1 / 6),
            (lambda x, y: functional.cross_entropy(x, y, reduction="none").mean(), 0.75, 0.25),
            (nn.CrossEntropyLoss(), 1.0, 1 / 3),
            (lambda x, y: returned_by_wrapper(functional.cross_entropy(x, y)), 1.0, 1 / 3),
            (lambda x, y: functional.nll_loss(x.log_softmax(1), y), 1.0, 1 / 3),
        ],
    )
    def test_the_weights_of_tokens(
        self, tmp_path: Path, loss: Callable[[Any, Any], Any], total: float, least: float
    ) -> None:
        rows = self.recorded(tmp_path, loss)
        assert len(rows) == 3
        assert rows[0][0]["direct"]
        assert rows[0][0]["of"][0] == pytest.approx([3, 4, 5, total, least, least])

    @pytest.mark.parametrize(
        "loss",
        [
            lambda x, y: functional.cross_entropy(x, y) + x.square().mean(),
            lambda x, y: functional.cross_entropy(x, y) * x.mean(),
            lambda x, y: functional.cross_entropy(x, y).exp(),
        ],
    )
    def test_other_parts_of_a_loss(self, tmp_path: Path, loss: Callable[[Any, Any], Any]) -> None:
        assert not self.recorded(tmp_path, loss)[0][0]["direct"]

    @pytest.mark.parametrize(
        ("loss", "rest"),
        [
            (lambda x, y: functional.cross_entropy(x, y).mul_(3), 0.0),
            (lambda x, y: functional.cross_entropy(x, y) + functional.mse_loss(x, x * 2), 0.0),
            (lambda x, y: functional.cross_entropy(x, y) + functional.l1_loss(x, -x) + 0.5, 0.5),
            (lambda x, y: functional.cross_entropy(x, y) + functional.l1_loss(x, -x).exp(), None),
            (lambda x, y: functional.cross_entropy(x, y) / 2 + x.detach().sum() * 0 + 0.25, 0.25),
            (lambda x, y: functional.cross_entropy(x, y) + x.square().mean(), None),
            (lambda x, y: functional.cross_entropy(x.bfloat16(), y), None),
        ],
    )
    def test_a_part_without_a_gradient(
        self, tmp_path: Path, loss: Callable[[Any, Any], Any], rest: float | None
    ) -> None:
        rows = self.recorded(tmp_path, loss)
        assert len(rows) == 3
        for row in rows:
            assert row[0]["rest"][1:] == ([] if rest is None else [pytest.approx(rest, abs=1e-6)])

    def test_weighted_classes_and_other_losses_are_left_out(self, tmp_path: Path) -> None:
        weighted = nn.CrossEntropyLoss(torch.ones(5))
        assert self.recorded(tmp_path, weighted) == []
        settings = [what for event in written(tmp_path, "settings") for what in event["of"]]
        assert len([what for what in settings if what.startswith("class weights of")]) == 3
        assert self.recorded(tmp_path, lambda x, _: x.square().mean()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_loss_is_not_seen(tmp_path: Path) -> None:
    """torch.jit.script compiles losses as it does without a recorder."""
    net, loss = nn.Linear(4, 5), torch.jit.script(nn.CrossEntropyLoss())
    train(net, lambda _: loss(net(torch.randn(2, 4)), torch.tensor([0, 1])).backward())
    assert written(tmp_path, "losses") == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", [nn.BCEWithLogitsLoss, nn.MSELoss])
def test_what_is_traced_is_not_seen(tmp_path: Path, kind: Any) -> None:
    """torch.jit.trace writes down what is computed, as a part of the program."""

    def computed(traced: Any) -> set[str]:
        return {node.kind() for node in traced.graph.nodes()}

    net, batch, pair = nn.Linear(4, 1), torch.rand(2, 4), (torch.rand(2, 1), torch.rand(2, 1))
    before = torch.jit.trace(net, batch), torch.jit.trace(kind().forward, pair)

    def step(_: int) -> None:
        now = torch.jit.trace(net, batch), torch.jit.trace(kind().forward, pair)
        assert [*map(computed, now)] == [*map(computed, before)]
        now[1](net(batch), torch.ones(2, 1)).backward()

    train(net, step)
    assert written(tmp_path, "loss_inputs") == []


def test_a_mode_of_the_program_sees_the_program_only(tmp_path: Path) -> None:
    """As make_fx, which makes a graph of what it sees."""
    from torch.fx.experimental.proxy_tensor import make_fx

    net, target = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), torch.tensor([1, 2])

    def loss(batch: Any) -> Any:
        return functional.cross_entropy(net(batch), target)

    def computed() -> list[str]:
        return [str(node.target) for node in make_fx(loss)(torch.tensor([0, 1])).graph.nodes]

    before = computed()

    def step(_: int) -> None:
        assert computed() == before
        loss(torch.tensor([0, 1])).backward()

    train(net, step)


def test_gradients_after_the_backward_and_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def backward(_: int) -> None:
        net(torch.randn(2, 4)).square().sum().backward()
        net[0].weight.grad.mul_(0.5)  # type: ignore[union-attr]

    train(net, backward)
    assert written(tmp_path, "own_gradients") == []  # of one rank
    monkeypatch.setattr(hand_reduction, "several_ranks", lambda: True)
    train(net, backward, 4)
    event = written(tmp_path, "own_gradients")[-1]
    assert event["names"] == ["0.weight", "1.weight"]
    assert event["used"][0] == pytest.approx([one / 2 for one in event["made"][0]])
    assert event["used"][1] == event["made"][1]


def test_shards_of_fsdp2_that_the_program_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.fsdp import fully_shard

    monkeypatch.setattr(hand_reduction, "several_ranks", lambda: True)
    with fake_rank(0, 1):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(net[1])
        fully_shard(net)
        net[1].set_gradient_divide_factor(4.0)

        def backward(_: int) -> None:
            net(torch.randn(2, 4)).square().sum().backward()
            for parameter in net.parameters():
                parameter.grad.to_local().mul_(0.5)

        train(net, backward)
    (divisors,) = written(tmp_path, "divisors")
    assert sorted(divisors["units"]) == [["0.weight", 1, False], ["1.weight", 4.0, True]]
    event = written(tmp_path, "rescaled")[-1]
    assert len(event["made"]) == 4
    assert event["used"] == pytest.approx([norm / 2 for norm in event["made"]])


def test_a_gradient_that_a_hook_changes_is_read_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook may have divided or reduced it when the backward ends."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].weight.register_hook(lambda gradient: gradient / 2)
    net[1].weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad / 2))
    monkeypatch.setattr(hand_reduction, "several_ranks", lambda: True)
    train(net, lambda _: net(torch.randn(2, 4)).square().sum().backward())
    event = written(tmp_path, "own_gradients")[-1]
    factors = [used[0] / made[0] for used, made in zip(event["used"], event["made"], strict=True)]
    assert dict(zip(event["names"], factors, strict=True)) == pytest.approx(
        {"0.weight": 0.5, "1.weight": 0.5, "2.weight": 1.0}
    )
    assert len(net[0].weight._backward_hooks) == 1


def test_the_gradients_of_means_in_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_weights, "several_ranks", lambda: True)
    net = nn.Linear(4, 4)

    def backward(_: int) -> None:
        out = net(torch.randn(2, 4))
        loss = functional.mse_loss(out, torch.ones(2, 4)) + 0.5 * out.abs().mean()
        (loss + out.square().sum()).backward()

    train(net, backward)
    (only,) = written(tmp_path, "losses")[0]["backwards"]
    assert sorted(only["means"]) == [0.5, 1.0] and not only["direct"]


class Recomputes(nn.Module):
    def __init__(self, reentrant: bool, factor: float) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.reentrant, self.factor, self.calls = reentrant, factor, 0

    def forward(self, x: Any) -> Any:
        def run(x: Any) -> Any:
            self.calls += 1
            return self.inner(x * (self.factor if self.calls % 2 == 0 else 1.0)).tanh()

        return checkpoint(run, self.first(x), use_reentrant=self.reentrant)


class TestRecomputed:
    @pytest.fixture(autouse=True)
    def nothing_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Other tests of this process may have compiled something."""
        monkeypatch.setattr(checkpointed_inputs, "_compiled", lambda: False)

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("factor", [1.0, 2.0])
    def test_inputs_of_both_calls(self, tmp_path: Path, reentrant: bool, factor: float) -> None:
        net = Recomputes(reentrant, factor)
        train(net, lambda _: net(torch.randn(2, 4)).sum().backward())
        events = written(tmp_path, "recomputed")
        assert len(events) == 3
        assert events[0]["compared"] >= 2
        assert "forward" in events[0]["line"]
        assert [row[0] for row in events[0]["apart"]][:1] == ["inner"] * (factor != 1)
        assert not torch.nn.modules.module._global_forward_pre_hooks

    def test_an_error_inside_leaves_no_hook(self, tmp_path: Path) -> None:
        net = Recomputes(False, 1.0)
        net.inner = nn.Linear(3, 3)  # type: ignore[assignment]
        before = [*torch.nn.modules.module._global_forward_pre_hooks]
        with pytest.raises(RuntimeError):
            net(torch.randn(2, 4))
        assert [*torch.nn.modules.module._global_forward_pre_hooks] == before


@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize("width", [4, 200])  # 200: not all elements are read
def test_gradients_with_the_digits_of_bfloat16(tmp_path: Path, rounds: bool, width: int) -> None:
    net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width))

    def backward(_: int) -> None:
        for _ in range(4):
            net(torch.randn(2, 4)).square().sum().backward()
        for parameter in net.parameters() if rounds else ():
            parameter.grad = parameter.grad.bfloat16().float()  # type: ignore[union-attr]

    train(net, backward)
    assert [event["rounded"] for event in written(tmp_path, "rounded")] == [2 * rounds] * 3
    assert [one.times for one in laws(tmp_path).cleared] == [4, 4]


@pytest.mark.parametrize("rate", [1e-6, 0.5])
def test_updates_of_16_bits_that_are_lost(tmp_path: Path, rate: float) -> None:
    net = nn.Linear(4, 4).bfloat16()
    with torch.no_grad():
        net.weight.fill_(0.5), net.bias.fill_(0.5)
    train(net, lambda _: net(torch.ones(2, 4).bfloat16()).sum().backward(), lr=rate)
    event, *_ = written(tmp_path, "halves")
    assert event["names"] == ["weight", "bias"] and event["elements"] == [16, 4]
    assert event["kept"] == ([16, 4] if rate < 1e-3 else [0, 0])


class Signs(torch.optim.Optimizer):
    """Keeps a moment, and adds a sign of it to parameters of 16 bits."""

    def __init__(self, parameters: Any, how: str) -> None:
        super().__init__(parameters, {"lr": 1e-6})
        self.how = how

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            name = "shift" if self.how == "added up" else "exp_avg"
            dtype = torch.float32 if self.how == "float32" else parameter.dtype
            state[name] = parameter.grad.to(dtype, copy=True)
            if self.how == "at random":
                torch.rand(1)
            if self.how == "nothing":
                del state[name]
            parameter.data.add_(parameter.grad.sign(), alpha=-1e-6)


@pytest.mark.parametrize("how", ["lost", "added up", "float32", "at random", "nothing"])
def test_updates_of_16_bits_that_an_optimizer_of_the_program_loses(
    tmp_path: Path, how: str
) -> None:
    net = nn.Linear(4, 4).bfloat16()
    optimizer = Signs(net.parameters(), how)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 4).bfloat16()).sum().backward()
        optimizer.step()
    assert [event["kept"][0] > 8 for event in written(tmp_path, "halves")] == [True] * 3 * (
        how == "lost"
    )


@pytest.mark.parametrize(("back", "since"), [(4, 5), (0, None), (None, None)])
def test_weights_that_return(tmp_path: Path, recorder: Any, back: Any, since: Any) -> None:
    """Update 9 has again the values of update 5; those of the first one may be a new fold. Values
    that are the same before and after, as those around an evaluation with averaged weights, are
    not seen."""
    net, kept = nn.Linear(4, 4), {}

    def backward(step: int) -> None:
        kept[step - 1] = {name: value.clone() for name, value in net.state_dict().items()}
        net.load_state_dict({name: value * 2 for name, value in kept[step - 1].items()})
        net.load_state_dict(kept[back if step == 9 and back is not None else step - 1])
        net(torch.randn(2, 4)).square().sum().backward()

    train(net, backward, 12)
    recorder.finish()
    found = [
        (event["name"], event["step"], event["since"]) for event in written(tmp_path, "returned")
    ]
    assert found == ([("weight", 9, since)] if since else [])


@pytest.mark.parametrize("how", ["bfloat16", "clamped"])
def test_weights_that_may_return_by_themselves(tmp_path: Path, recorder: Any, how: str) -> None:
    """Of 16 bits few move at all; and clamped ones have few values."""
    net, kept = nn.Linear(4, 4, bias=False), {}
    net = net.bfloat16() if how == "bfloat16" else net

    def backward(step: int) -> None:
        with torch.no_grad():
            if how == "clamped":
                net.weight.copy_(net.weight.sign() * 0.01)
                net.weight[0, step % 4] *= -1
            net.weight.copy_(kept.get(step - 4, net.weight) if step == 9 else net.weight)
            kept[step] = net.weight.clone()
        net(torch.randn(2, 4, dtype=net.weight.dtype)).square().sum().backward()

    train(net, backward, 12)
    recorder.finish()
    assert written(tmp_path, "returned") == []


class Masked(nn.Module):
    """An embedding that gives zeros for the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, tokens: Any) -> Any:
        return functional.embedding(tokens, self.weight) * (tokens < 5)[..., None]


def test_layers_and_embeddings(tmp_path: Path) -> None:
    net = nn.Sequential(Masked(), nn.Identity(), nn.Linear(4, 2))
    train(net, lambda _: net(torch.tensor([[1, 5, 2, 5]])).sum().backward())
    (event,) = written(tmp_path, "layers")
    rows = [[0, "Masked", True], [1, "Identity", False], [2, "Linear", True]]
    assert event["lists"] == {"": rows}
    first, *_ = written(tmp_path, "embedding")
    assert (first["module"], first["tokens"], first["zeros"]) == ("0", 3, [5])


def test_ties_and_parameters_that_are_made_anew(tmp_path: Path) -> None:
    """A new parameter in each step is known in each step."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight

    def backward(step: int) -> None:
        if step > 1:
            net[1].weight = nn.Parameter(torch.ones(4, 4))
        net(torch.randn(2, 4)).square().sum().backward()

    train(net, backward)
    states = laws(tmp_path).models
    assert [state.tied for state in states] == [(("0.weight", "1.weight"),), (), ()]
    assert ["1.weight" in state.left_out for state in states] == [False, True, True]


def test_updates_that_something_undoes(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    old = net[0].weight.detach().clone()

    def backward(_: int) -> None:
        net[0].weight.data.copy_(old)
        net(torch.randn(2, 4)).square().sum().backward()

    train(net, backward)
    assert [event["names"] for event in written(tmp_path, "updated")] == [["0.weight"]] * 2


class Shares(torch.autograd.Function):
    """Adds over ranks in the forward, and, if it is told to, in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, adds: bool) -> Any:
        ctx.adds = adds
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
        if ctx.adds:
            dist.all_reduce(grad)
        return grad, None


@pytest.mark.parametrize("adds", [True, False])
def test_functions_that_share_values(tmp_path: Path, adds: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        train(net, lambda _: Shares.apply(net(torch.randn(2, 4)), adds).sum().backward())
        with torch.no_grad():
            Shares.apply(torch.randn(2, 4), adds)
    finally:
        dist.destroy_process_group()
    events = written(tmp_path, "shared")
    assert len(events) == 3
    (row,) = events[0]["rows"]
    assert (row["function"], row["op"], row["ranks"]) == ("SharesBackward", "all_reduce", [0])
    assert (row["bias"], row["matrix"], row["calls"]) == ("1.bias", "1.weight", int(adds))
    assert row["gradient"][1] == pytest.approx(8**0.5)


@pytest.mark.parametrize("how", ["cut", "put back", "for a log", "in evaluation", "no grad"])
def test_what_is_gathered_without_a_function(tmp_path: Path, how: str) -> None:
    def gathered(x: Any) -> Any:
        parts = [torch.empty_like(x)]
        dist.all_gather(parts, x)
        return x if how == "put back" else parts[0]

    def backward(_: int) -> None:
        out = net.train(how != "in evaluation")(torch.randn(2, 4))
        with torch.set_grad_enabled(how != "no grad"):
            other = gathered(out.exp()) if how != "for a log" else 0
        (out + other).sum().backward()
        if how == "for a log":
            gathered(out.exp())

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(4, 4))
        train(net, backward)
    finally:
        dist.destroy_process_group()
    rows = [row["reached"] for event in written(tmp_path, "gathered") for row in event["rows"]]
    assert rows == {"cut": [False] * 3, "put back": [True] * 3}.get(how, [])


STATE = {"state": {0: {"step": 4}}, "param_groups": [{"lr": 0.1}]}


@pytest.mark.parametrize(
    ("content", "holds"),
    [
        (STATE, True),
        ({"model": {}, "trainer": {"a": {"optimizer": STATE}}}, True),
        ({"a": {"b": {"c": {"d": STATE}}}}, False),  # deeper than any trainer writes it
        ({"optimizer": {**STATE, "state": {}}}, False),  # it has not stepped
        ({"state": {0: {"step": 4}}}, False),
        ([STATE], False),
    ],
)
def test_whether_a_checkpoint_has_the_state_of_an_optimizer(content: Any, holds: bool) -> None:
    assert loading._has_optimizer(content, loading._MOST_DEPTH) == holds


FROZEN = nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "processes", "model", "told"),
    [
        ("MULTI_GPU", 2, nn.Linear(2, 2), True),
        ("MULTI_GPU", 1, nn.Linear(2, 2), False),
        ("FSDP", 2, nn.Linear(2, 2), False),
        ("MULTI_GPU", 2, FROZEN, False),
        ("MULTI_GPU", 2, nn.DataParallel(nn.Linear(2, 2)), False),  # of a wrapper
    ],
)
def test_a_model_that_accelerate_returned_without_a_wrapper(
    kind: str, processes: int, model: nn.Module, told: bool
) -> None:
    told_of: list[dict[str, Any]] = []
    log = SimpleNamespace(event=lambda name, **fields: told_of.append({"e": name, **fields}))
    context: Any = SimpleNamespace(line=lambda frame: "train.py:7 main", log=log)
    accelerator = SimpleNamespace(distributed_type=kind, num_processes=processes)
    wrapping.Wrapping._prepared(SimpleNamespace(_context=context), None, model, accelerator)  # type: ignore[arg-type]
    wanted = {"e": "unwrapped", "keep": True, "model": "Linear", "line": "train.py:7 main"}
    assert told_of == [wanted] * told


class TestSeveralBackwards:
    """Two in each step, of which the first one's gradients are cleared."""

    def rows(
        self, folder: Path, between: Callable[[Any, Any], None], perturbed: bool = False
    ) -> Any:
        net = nn.Linear(4, 5)

        def backward(_: int) -> None:
            for _ in range(2):
                given = torch.randn(4, 4, requires_grad=perturbed)
                loss = functional.cross_entropy(net(given), torch.arange(4))
                loss.backward()
                between(net, given)

        train(net, backward)
        last = [event["backwards"][1] for event in written(folder, "losses")]
        inputs = laws(folder).inputs
        assert len(inputs) == 2 * len(last) and len({one.digest for one in inputs}) == len(inputs)
        assert all(row["left"] for row in last)
        return {(row["added"], row["moved"]) for row in last}, {one.graded for one in inputs}

    def test_a_hook_that_takes_gradients_away(self, tmp_path: Path) -> None:
        net = nn.Linear(4, 5)
        for one in net.parameters():
            one.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        train(
            net,
            lambda _: functional.cross_entropy(net(torch.ones(4, 4)), torch.arange(4)).backward(),
        )
        assert not any(
            row["left"] for event in written(tmp_path, "losses") for row in event["backwards"]
        )

    def test_gradients_that_are_cleared(self, tmp_path: Path) -> None:
        found = self.rows(tmp_path, lambda net, _: net.zero_grad())
        assert found == ({(False, False)}, {False})

    def test_gradients_that_are_kept(self, tmp_path: Path) -> None:
        assert self.rows(tmp_path, lambda *_: None) == ({(True, False)}, {False})

    def test_an_inner_update(self, tmp_path: Path) -> None:
        def step(net: Any, _: Any) -> None:
            net.weight.data -= net.weight.grad
            net.zero_grad()

        assert self.rows(tmp_path, step)[0] == {(False, True)}

    def test_inputs_that_are_attacked(self, tmp_path: Path) -> None:
        assert self.rows(tmp_path, lambda net, _: net.zero_grad(), True)[1] == {True}


class Stream(IterableDataset[Any]):
    def __init__(self, of: Callable[[int, int], float]) -> None:
        self.of = of

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        yield from (torch.tensor([self.of(info.id, at)]) for at in range(4))


@pytest.mark.parametrize(
    ("of", "found"),
    [(lambda _, at: at, [2]), (lambda own, at: 10.0 * own + at, []), (lambda *_: 1.0, []),
     (lambda own, at: float(at > 0 and own + 2), [])],
    ids=["repeated", "divided", "made up", "one common batch"],
)  # fmt: skip
def test_workers_that_give_the_same_batches(
    tmp_path: Path, of: Callable[[int, int], float], found: list[int]
) -> None:
    list(DataLoader(Stream(of), num_workers=2))
    net = nn.Linear(1, 5)
    train(net, lambda _: net(torch.ones(1)).sum().backward())
    rows = laws(tmp_path).rows("repeated", workers=int, made=str)
    assert [workers for workers, _ in rows] == found
    assert all("test_step_laws.py" in made for _, made in rows)


# ------------------------------------------------------------------------ what losses get


class Words(nn.Module):
    """Predicts tokens from tokens; padding is 0 if ``padded``."""

    def __init__(self, padded: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=0 if padded else None)
        self.out = nn.Linear(4, 9)

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return self.out(self.embed(input_ids))


class TestLossInputs:
    def rows(self, folder: Path, loss: Callable[[Any], Any], net: Any = None) -> list[Any]:
        net = net or nn.Linear(4, 5)
        train(net, lambda _: loss(net).backward())
        return written(folder, "loss_inputs")

    @pytest.mark.parametrize(
        ("loss", "unfit"),
        [
            (lambda x, y: functional.cross_entropy(x.softmax(1), y), True),
            (lambda x, y: nn.CrossEntropyLoss()(x.softmax(1)[:, :, None], y[:, None]), True),
            (lambda x, y: functional.cross_entropy(x, y), False),
            (lambda x, y: functional.cross_entropy(x.log_softmax(1), y), False),
            (lambda x, y: functional.cross_entropy(x.sigmoid(), y), False),
            (lambda x, y: functional.nll_loss(x - x.mean(1, keepdim=True), y), True),
            (lambda x, y: functional.nll_loss(x.softmax(1), y), True),
            (lambda x, y: functional.nll_loss(x.log_softmax(1), y), False),
            # Of a policy, and of a focal loss.
            (lambda x, y: functional.nll_loss(x.log_softmax(1) * -2, y), False),
            (lambda x, y: functional.nll_loss(x.softmax(1).mul(-1).add(1) * x.log_softmax(1), y),
             False),
            (lambda x, y: functional.kl_div(x.softmax(1), x.detach().softmax(1)), True),
            (lambda x, y: functional.kl_div(x.log_softmax(1), x.detach().softmax(1)), False),
            (lambda x, y: functional.binary_cross_entropy_with_logits(
                x[:, :1].sigmoid().squeeze(1), y / 4), True),
            (lambda x, y: functional.binary_cross_entropy_with_logits(
                3 * x[:, 0].sigmoid(), y / 4), False),
        ],
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:reduction")
    def test_values_that_a_loss_does_not_take(
        self, tmp_path: Path, loss: Callable[[Any, Any], Any], unfit: bool
    ) -> None:
        rows = self.rows(tmp_path, lambda net: loss(net(torch.randn(4, 4)), torch.arange(4)))
        assert [row["unfit"] for row in rows] == [unfit] * 3
        assert "test_step_laws.py" in rows[0]["line"]

    @pytest.mark.parametrize(
        ("one", "other", "options", "spread"),
        [
            ((4, 1), (4,), {}, True),
            ((4, 1), (4, 1), {}, False),
            ((4, 5), (5,), {}, False),  # one of them is repeated
            ((4, 2, 1), (4, 1, 2), {"reduction": "none"}, False),  # quantiles by pairs
        ],
    )
    @pytest.mark.filterwarnings("ignore:Using a target size")
    def test_shapes_that_differ(
        self, tmp_path: Path, one: Any, other: Any, options: Any, spread: bool
    ) -> None:
        net = nn.Linear(4, torch.Size(one[1:]).numel())

        def loss(net: nn.Module) -> Any:
            given, target = net(torch.randn(4, 4)).reshape(one), torch.randn(other)
            return functional.smooth_l1_loss(given, target, **options).mean()

        assert {row["spread"] for row in self.rows(tmp_path, loss, net)} == {spread}

    @pytest.mark.parametrize("ahead", [0, 1, 2])
    def test_how_far_targets_are_ahead(self, tmp_path: Path, ahead: int) -> None:
        def loss(net: nn.Module) -> Any:
            ids = torch.randint(9, (4, 8))
            out = net(ids)[:, : 8 - ahead]
            return functional.cross_entropy(out.flatten(0, 1), ids[:, ahead:].flatten())

        rows = self.rows(tmp_path, loss, Words())
        assert [(row["ahead"], row["counted"]) for row in rows] == [(ahead, 4 * (8 - ahead))] * 3

    @pytest.mark.parametrize(
        ("padded", "masked", "options", "padding"),
        [
            (True, False, {}, 12),
            (False, True, {}, 12),
            (False, False, {}, 0),
            (True, True, {"ignore_index": 0}, 0),
            (True, True, {"reduction": "none"}, 0),  # the program may use its mask
            (True, True, {"weight": torch.tensor([0.0, *[1.0] * 8])}, 0),
        ],
    )
    def test_targets_that_are_padding(
        self, tmp_path: Path, padded: bool, masked: bool, options: Any, padding: int
    ) -> None:
        """Three of eight tokens are padding in each row, of which the first may end the text."""

        def loss(net: nn.Module) -> Any:
            ids = torch.randint(1, 9, (6, 8))
            ids[:, 5:] = 0
            given = {"attention_mask": (ids > 0).int()} if masked else {}
            out = net(input_ids=ids, **given)[:, :-1]
            every = functional.cross_entropy(out.transpose(1, 2), ids[:, 1:], **options)
            return every.mean()

        rows = self.rows(tmp_path, loss, Words(padded))
        assert [(row["ahead"], row["padding"]) for row in rows] == [(1, padding)] * 3

    def test_other_targets_than_tokens(self, tmp_path: Path) -> None:
        """As those of a masked model, and classes of tokens."""

        def loss(net: nn.Module) -> Any:
            out = net(torch.randint(9, (4, 8)))
            return functional.cross_entropy(out.flatten(0, 1), torch.randint(9, (32,)))

        assert {row["ahead"] for row in self.rows(tmp_path, loss, Words())} == {-1}
