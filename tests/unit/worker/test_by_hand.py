"""Experts whose matrices are cut over ranks, and which layouts the wrapper by-hand has."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from moediag.lab.step.models.tiny import Anatomy, MoeBlock  # noqa: E402
from moediag.lab.step.shard import by_hand, dispatch, fsdp2_internals  # noqa: E402
from moediag.lab.step.shard.context_parallel import ContextParallel  # noqa: E402
from moediag.lab.step.shard.kinds import kind_of  # noqa: E402
from moediag.lab.step.shard.pipeline_parallel import Pipelined  # noqa: E402
from moediag.protocol import ModelSpec, Trial, WrapperSpec  # noqa: E402
from moediag.recorder.not_applicable import NotApplicable  # noqa: E402
from tests.forked_ranks import on_ranks  # noqa: E402

EXPERTS, WIDTH, HIDDEN, TOKENS = 2, 4, 3, 5
SHAPES = {"gate_up_proj": (EXPERTS, 2 * WIDTH, HIDDEN), "down_proj": (EXPERTS, HIDDEN, WIDTH)}


class Experts(nn.Module):
    """As transformers has them from 5.0 on."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, hidden: Any, index: Any, weights: Any) -> Any:
        result = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, place = torch.where(index == expert)
            gate, up = F.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, -1)
            out = F.linear(F.silu(gate) * up, self.down_proj[expert])
            result = result.index_add(0, token, out * weights[token, place, None])
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()


def step(experts: nn.Module) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, requires_grad=True)
    weights = torch.rand(TOKENS, 1, generator=generator, requires_grad=True)
    out = experts(hidden, torch.arange(TOKENS).unsqueeze(1) % EXPERTS, weights)
    out.square().sum().backward()
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad}


def of_rank(rank: int) -> dict[str, Any]:
    alone = [dist.new_group([one]) for one in (0, 1)][rank]
    results = {}
    for name, around in {
        "summed": functools.partial(by_hand.summed, dist.group.WORLD),
        "kept": dispatch.unchanged,
    }.items():
        block = Block()
        anatomy = Anatomy((), (MoeBlock("mlp", block, 0, ()),), EXPERTS)
        dispatch.divide(anatomy, alone, "from-dispatched", around, share=0.5)
        held = {n: p.detach() for n, p in block.experts.named_parameters()}
        for fqn, (part, _) in by_hand.columns(held, dist.group.WORLD).items():
            setattr(block.experts, fqn, nn.Parameter(part))
        results[name] = step(block.experts)
        results[name].update({n: p.grad for n, p in block.experts.named_parameters()})
    return results


def part(whole: Any, name: str, rank: int) -> Any:
    """The rank's columns, written out."""
    own = list(range(2 * rank, 2 * rank + 2))
    return whole[:, own + [WIDTH + i for i in own]] if name == "gate_up_proj" else whole[..., own]


def test_two_ranks_with_half_of_each_expert_give_the_results_of_one(tmp_path: Path) -> None:
    results = on_ranks(2, tmp_path, of_rank)
    whole = Experts()
    expected = step(whole)
    for rank, of_kind in enumerate(results):
        found, kept = of_kind["summed"], of_kind["kept"]
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-5), name
            assert not torch.allclose(kept[name], value, atol=1e-2), name
        for name in SHAPES:
            half = part(getattr(whole, name).grad, name, rank) / 2  # share
            assert torch.allclose(found[name], half, atol=1e-5), name


class TestPieces:
    @pytest.fixture(autouse=True)
    def world(self) -> Any:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
        yield
        dist.destroy_process_group()

    def test_placements_say_which_columns_a_rank_has(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        from moediag.recorder.step import pieces

        mesh = init_device_mesh("cpu", (2,))
        whole = dict(Experts().named_parameters())
        for name, (piece, along) in by_hand.columns(whole, dist.group.WORLD).items():
            made = DTensor.from_local(piece, mesh, [along], run_check=False)
            assert made.shape == SHAPES[name]
            where = pieces.index(made)
            assert where is not None
            assert torch.equal(where, part(torch.arange(made.numel()).view(made.shape), name, 1))
            assert torch.equal(piece, part(whole[name], name, 1))

    @pytest.mark.parametrize(
        ("shapes", "why"),
        [
            ({"gate_up_proj": (2, 3, 8), "down_proj": (2, 4, 3)}, "cannot be cut by hand"),
            ({"gate_up_proj": (2, 6, 3), "down_proj": (2, 3, 3)}, "a width of 3 cannot be divided"),
            ({"w1": (2, 6, 3)}, "experts with w1 cannot be cut by hand"),
        ],
    )
    def test_other_experts_are_not_applicable(self, shapes: Any, why: str) -> None:
        with pytest.raises(NotApplicable, match=why):
            by_hand.columns({n: torch.zeros(s) for n, s in shapes.items()}, dist.group.WORLD)


def trial(layout: dict[str, int], source: str = "config") -> Trial:
    world = 1
    for size in layout.values():
        world *= size
    model, wrapper = ModelSpec(source=source), WrapperSpec(kind=by_hand.KIND)
    return Trial("t", "s", "v", world_size=world, layout=layout, model=model, wrapper=wrapper)


def test_the_class_follows_from_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of(trial({"ep": 2, "etp": 2, "tp": 2})) is by_hand.ByHand
    beside = {"pp": Pipelined, "cp": ContextParallel}
    for axis, class_ in beside.items():
        assert {by_hand.ByHand, class_} < set(kind_of(trial({axis: 2, "ep": 2})).mro())
    with pytest.raises(NotApplicable, match="has no mesh axis pp beside cp"):
        kind_of(trial({"pp": 2, "cp": 2, "ep": 2}))
    with pytest.raises(NotApplicable, match="a model that every rank built whole"):
        kind_of(trial({"ep": 2}, "checkpoint"))
    monkeypatch.setattr(fsdp2_internals, "sums_for_means", lambda backend: True)
    with pytest.raises(NotApplicable, match=r"needs torch >= 2\.9"):
        kind_of(trial({"ep": 2}))
