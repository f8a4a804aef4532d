"""Experts matched with the checkpoint's bytes, on a minimal model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from moediag.lab.step.measure import ownership, row_map
from moediag.lab.step.models.tiny import Anatomy, MoeBlock
from moediag.lab.step.shard.wrapped import expert_parameters
from moediag.protocol import ModelSpec, Trial, WrapperSpec
from tests.unit.sharded import fully_sharded, placed, rank_of

EXPERTS = 4
UP, DOWN = "layers.0.mlp.experts.up", "layers.0.mlp.experts.down"


class Fused(nn.Module):
    """All experts in 3-D parameters, and a bias of each: (experts, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 3, 2))
        self.down = nn.Parameter(torch.randn(EXPERTS, 2, 3))
        self.bias = nn.Parameter(torch.zeros(EXPERTS, 3))

    def forward(self, x: Any) -> Any:
        return x + self.up.sum()


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(2, EXPERTS, bias=False)
        self.experts = experts

    def forward(self, x: Any) -> Any:
        listed = isinstance(self.experts, nn.ModuleList)
        return sum(e(x) for e in self.experts) if listed else self.experts(x)


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.mlp = Block(experts)


class Model(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(experts)])
        self.head = nn.Linear(2, 2, bias=False)


def made(listed: bool = False) -> tuple[Model, Anatomy, dict[str, Any]]:
    """The model, its anatomy, and what its checkpoint holds."""
    torch.manual_seed(1)
    experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(EXPERTS)) if listed else Fused()
    model = Model(experts)
    each = tuple((f"layers.0.mlp.experts.{i}", e) for i, e in enumerate(experts)) if listed else ()
    layer = model.layers[0]
    block = MoeBlock("layers.0.mlp", layer.mlp, 0, each)
    truth = {name: p.detach().clone() for name, p in model.named_parameters()}
    return model, Anatomy((("layers.0", layer),), (block,), EXPERTS), truth


def rows_of(found: ownership.Rows, fqn: str) -> Any:
    return next(rows for rows in found[0] if rows.fqn == fqn)


def test_an_unchanged_model_matches_the_checkpoint() -> None:
    model, anatomy, truth = made()
    rows, unequal, compared = ownership.examine(model, anatomy, truth, None)
    assert {r.fqn for r in rows} == {UP, DOWN, "layers.0.mlp.experts.bias"}
    assert all(r.held == r.declared == [0, 1, 2, 3] for r in rows)
    assert {(r.rows, r.placement) for r in rows} == {(EXPERTS, "plain")}
    assert (unequal, compared) == ({}, 2)
    up = rows_of((rows, unequal, compared), UP)
    assert up.first == up.should == pytest.approx(float(truth[UP].reshape(-1)[0]))


def test_a_buffer_that_was_not_loaded_is_found() -> None:
    model, anatomy, truth = made()
    model.register_buffer("scale", torch.ones(3))
    truth["scale"] = torch.full((3,), 2.0)
    _, unequal, compared = ownership.examine(model, anatomy, truth, None)
    assert unequal == {"scale": "holds no element of the checkpoint's tensor"}
    assert compared == 3


WHOLE = torch.arange(24.0).view(6, 4)


@pytest.mark.parametrize(
    ("own", "where", "says"),
    [
        (WHOLE[:3], torch.arange(12, 24).view(3, 4),
         "holds rows 0-2 of the checkpoint where 3-5 belong"),
        (WHOLE[[1, 0, 2, 3, 5, 4]], None,
         "holds rows 1, 0, 2-3, 5, 4 of the checkpoint where 0-5 belong"),
        (WHOLE[:, [1, 0, 2, 3]], None, "holds its elements in another order"),
        (torch.full((6, 4), -1.0), None,
         "holds no element of the checkpoint's tensor"),
        (WHOLE[:3], None, "has shape (3, 4) instead of (6, 4)"),
        (torch.cat([WHOLE[:5], -WHOLE[5:]]), None,
         "holds 20 of its 24 elements in their place, 20 in any place"),
        # Columns 2 and 3 of each row, of other rows.
        (WHOLE[[5, 0, 1, 2, 3, 4], 2:], torch.arange(24).view(6, 4)[:, 2:],
         "holds rows 5, 0-4 of the checkpoint where 0-5 belong"),
        (WHOLE[:2], torch.arange(12).view(3, 4), ""),
    ],
)  # fmt: skip
def test_what_a_tensor_holds_instead_is_described(own: Any, where: Any, says: str) -> None:
    assert row_map.describe(own, where, WHOLE) == says


def test_swapped_rows_are_identified() -> None:
    model, anatomy, truth = made()
    up = model.layers[0].mlp.experts.up
    up.data = up.data[[0, 3, 2, 1]].clone()
    found = ownership.examine(model, anatomy, truth, None)
    assert rows_of(found, UP).held == [0, 3, 2, 1]
    assert rows_of(found, UP).declared == [0, 1, 2, 3]
    assert rows_of(found, DOWN).held == [0, 1, 2, 3]


@pytest.mark.parametrize("sharded_rows", [False, True])
def test_an_expert_with_its_own_rows_in_another_order_is_described(sharded_rows: bool) -> None:
    """As Inkling 2 of transformers 5.23.0 loads with ``tp_size``: halves of two packed matrices."""
    model, anatomy, truth = made()
    order = [0, 2, 1]
    if sharded_rows:
        with rank_of(0, 2) as mesh:
            mixed = placed(truth[UP][:, order].clone(), mesh, Shard(1))
            model.layers[0].mlp.experts.up = nn.Parameter(mixed)
            found = ownership.examine(model, anatomy, truth, None)
        says = "holds rows 0, 2 of expert 0 where 0-1 belong"
    else:
        model.layers[0].mlp.experts.up.data = truth[UP][:, order].clone()
        found = ownership.examine(model, anatomy, truth, None)
        says = "holds rows 0, 2, 1 of expert 0 where 0-2 belong"
    assert rows_of(found, UP).held == [0, 1, 2, 3]
    assert found[1] == {UP: says}


@pytest.mark.parametrize("value", [7.0, float("nan")])
def test_an_invalid_row_matches_no_expert(value: float) -> None:
    model, anatomy, truth = made()
    model.layers[0].mlp.experts.up.data[2, 1, 1] = value
    found = ownership.examine(model, anatomy, truth, None)
    assert rows_of(found, UP).held == [0, 1, -1, 3]
    assert rows_of(found, UP).declared == [0, 1, 2, 3]


def test_equal_experts_match_the_declared_one() -> None:
    model, anatomy, truth = made()
    found = ownership.examine(model, anatomy, truth, None)
    assert rows_of(found, "layers.0.mlp.experts.bias").held == [0, 1, 2, 3], "all of them zero"
    model.layers[0].mlp.experts.bias = nn.Parameter(torch.zeros(2, 3))
    assert rows_of(
        ownership.examine(model, anatomy, truth, 1), "layers.0.mlp.experts.bias"
    ).held == [2, 3]


def test_a_plain_slice_is_declared_by_its_ep_position() -> None:
    model, anatomy, truth = made()
    experts = model.layers[0].mlp.experts
    experts.up = nn.Parameter(truth[UP][2:].clone())
    for ep_rank, declared in ((1, [2, 3]), (0, [0, 1]), (None, [0, 1])):
        rows = rows_of(ownership.examine(model, anatomy, truth, ep_rank), UP)
        assert (rows.held, rows.declared, rows.rows) == ([2, 3], declared, 2)
    # A position beyond the experts matches none.
    experts.up = nn.Parameter(truth[UP][1:].clone())
    rows = rows_of(ownership.examine(model, anatomy, truth, 1), UP)
    assert (rows.held, rows.declared) == ([1, 2, 3], [3, -1, -1])
    rows = rows_of(ownership.examine(model, anatomy, truth, 3), UP)
    assert (rows.declared, rows.should) == ([-1, -1, -1], None)


def test_bfloat16_weights_are_compared_as_saved() -> None:
    model, anatomy, _ = made()
    model.to(torch.bfloat16)
    truth = {name: p.detach().float() for name, p in model.named_parameters()}
    rows, unequal, _ = ownership.examine(model, anatomy, truth, None)
    assert all(r.held == [0, 1, 2, 3] for r in rows)
    assert unequal == {}
    model.layers[0].mlp.experts.down.data[0] *= 1.01
    model.head.weight.data[0, 0] += 1
    rows, unequal, _ = ownership.examine(model, anatomy, truth, None)
    assert [r.held for r in rows if r.fqn == DOWN] == [[-1, 1, 2, 3]]
    assert list(unequal) == ["head.weight"]


def test_experts_that_are_modules_count_as_other_weights() -> None:
    """As in transformers 4.x: whole or absent, never sharded."""
    model, anatomy, truth = made(listed=True)
    assert expert_parameters(model, anatomy) == {}
    assert ownership.examine(model, anatomy, truth, None) == ([], {}, 10)
    model.layers[0].mlp.experts[3].weight.data.zero_()
    _, unequal, _ = ownership.examine(model, anatomy, truth, None)
    assert list(unequal) == ["layers.0.mlp.experts.3.weight"]


def test_weights_missing_in_the_checkpoint_are_not_compared() -> None:
    model, anatomy, truth = made()
    del truth["head.weight"], truth[UP]
    rows, unequal, compared = ownership.examine(model, anatomy, truth, None)
    assert UP not in {r.fqn for r in rows}
    assert (unequal, compared) == ({}, 1)


def test_weights_of_another_size_differ() -> None:
    model, anatomy, truth = made()
    model.head.weight = nn.Parameter(torch.zeros(1, 2))
    model.layers[0].mlp.experts.up = nn.Parameter(torch.zeros(EXPERTS, 5))
    found = ownership.examine(model, anatomy, truth, None)
    assert list(found[1]) == ["head.weight"]
    assert rows_of(found, UP).held == [-1] * 4


def test_a_plain_slice_of_other_weights_is_compared_with_its_own_part() -> None:
    """As llama4's plan divides attention weights, by rows or by columns, up to 5.15."""
    model, anatomy, truth = made()
    for piece, equal in ((truth["head.weight"][:, 1:], 1), (truth["head.weight"][:1], 0)):
        model.head.weight = nn.Parameter(piece.clone())
        for at in (0, 1):
            _, unequal, _ = ownership.examine(model, anatomy, truth, at)
            assert list(unequal) == ([] if at == equal else ["head.weight"])
    _, unequal, _ = ownership.examine(model, anatomy, truth, None)
    assert list(unequal) == ["head.weight"], "without an ep axis nothing is a piece"


# ------------------------------------------------------------------------ sharded


def sharded(rank: int, lay: Any) -> ownership.Rows:
    """One rank of four with expert parameters and head placed by ``lay(tensor, mesh)``."""
    model, anatomy, truth = made()
    with rank_of(rank, 2, 2) as mesh:
        experts = model.layers[0].mlp.experts
        for module, name in ((experts, "up"), (experts, "down"), (model.head, "weight")):
            setattr(module, name, nn.Parameter(lay(getattr(module, name).detach(), mesh)))
        return ownership.examine(model, anatomy, truth, None)


LAYOUTS = {
    "experts over both axes": (
        lambda whole, mesh: placed(whole, mesh, Shard(0), Shard(0)),
        [[0], [1], [2], [3]],
    ),
    "FSDP over expert parallelism, strided": (
        lambda whole, mesh: fully_sharded(
            placed(whole, mesh[mesh.mesh_dim_names[1]], Shard(0)), mesh[mesh.mesh_dim_names[0]]
        ),
        [[0], [2], [1], [3]],
    ),
    "columns over the other axis": (
        lambda whole, mesh: placed(whole, mesh, Shard(0), Shard(1)),
        [[0, 1], [0, 1], [2, 3], [2, 3]],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", range(4))
def test_a_correct_shard_matches_in_any_layout(layout: str, rank: int) -> None:
    lay, held = LAYOUTS[layout]
    found = sharded(rank, lay)
    for fqn in (UP, DOWN):
        rows = rows_of(found, fqn)
        assert rows.held == rows.declared == held[rank]
        assert rows.rows == EXPERTS
        assert "Shard(0)" in rows.placement
    assert found[1:] == ({}, 2)


@pytest.mark.parametrize("rank", range(4))
def test_a_wrong_shard_is_found_in_any_layout(rank: int) -> None:
    """Experts 2 and 3 swapped before they were sharded, the head doubled."""

    def lay(whole: Any, mesh: Any) -> Any:
        wrong = whole[[0, 1, 3, 2]] if whole.ndim == 3 else whole * 2
        return placed(wrong.clone(), mesh, Shard(0), Shard(1))

    found = sharded(rank, lay)
    declared = [0, 1] if rank < 2 else [2, 3]
    assert rows_of(found, UP).declared == declared
    assert rows_of(found, UP).held == ([0, 1] if rank < 2 else [3, 2])
    assert list(found[1]) == ["head.weight"]


def test_a_resharded_slice_has_too_few_rows() -> None:
    model, anatomy, truth = made()
    with rank_of(1, 2) as mesh:
        own = truth[UP][2:].clone()  # expert-parallel rank 1's slice
        model.layers[0].mlp.experts.up = nn.Parameter(placed(own, mesh, Shard(0)))
        rows = rows_of(ownership.examine(model, anatomy, truth, 1), UP)
    assert (rows.held, rows.declared, rows.rows) == ([3], [1], 2)
    assert rows.should == pytest.approx(float(truth[UP][2].reshape(-1)[0]))


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_without_elements_holds_nothing(rank: int) -> None:
    model, anatomy, truth = made()
    with rank_of(rank, 4) as mesh:
        # Three columns over four ranks: the last has rows of no element.
        model.layers[0].mlp.experts.up = nn.Parameter(placed(truth[UP], mesh, Shard(1)))
        rows = rows_of(ownership.examine(model, anatomy, truth, None), UP)
    assert rows.held == rows.declared == ([0, 1, 2, 3] if rank == 0 else [])


# ------------------------------------------------------------------------ computed experts


def watched(model: Model, anatomy: Anatomy) -> list[dict[str, int]]:
    told: list[dict[str, int]] = []
    ownership.watch_use(anatomy, told.append)
    for _ in range(2):
        model.layers[0].mlp(torch.zeros(1, 2))
    return told


def test_the_number_of_computed_experts_is_recorded_once_per_block() -> None:
    model, anatomy, truth = made()
    assert watched(model, anatomy) == [{UP: EXPERTS, DOWN: EXPERTS}]
    model, anatomy, _ = made()
    experts = model.layers[0].mlp.experts
    experts.up = nn.Parameter(truth[UP][:2].clone())
    experts.down = nn.Parameter(truth[DOWN][:2].clone())
    assert watched(model, anatomy) == [{UP: 2, DOWN: 2}]


def test_only_expert_modules_with_weights_are_counted() -> None:
    model, anatomy, _ = made(listed=True)
    assert watched(model, anatomy) == [{"layers.0.mlp.experts": EXPERTS}]
    model, anatomy, _ = made(listed=True)
    model.layers[0].mlp.experts[0] = nn.Identity()
    assert watched(model, anatomy) == [{"layers.0.mlp.experts": EXPERTS - 1}]


def test_an_event_has_the_requested_configuration() -> None:
    model, anatomy, truth = made()
    found = ownership.examine(model, anatomy, truth, None)
    trial = Trial(
        "t", "s", "v", layout={"dp_shard": 2, "ep": 2}, model=ModelSpec(experts=EXPERTS),
        wrapper=WrapperSpec(kind="accelerate", ignore_experts=True),
    )  # fmt: skip
    event = ownership.event("prepared", found, trial)
    assert (event["when"], event["asked"], event["whole"]) == ("prepared", 2, EXPERTS)
    assert (event["compared"], event["unequal"], event["left_out"]) == (2, {}, True)
    assert event["experts"][0]["held"] == [0, 1, 2, 3]
