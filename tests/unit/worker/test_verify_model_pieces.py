"""Which part of which tensor a rank holds, and whole tensors put together from the parts."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard

from moediag.protocol import MeasuredStep
from moediag.protocol.measured import split_alike
from moediag.ranks.verify import samples, tensor_files
from moediag.ranks.verify.model_pieces import owners, pieces, shard_again
from moediag.ranks.verify.tensor_files import Stored
from moediag.recorder.step.pieces import BOX, ELEMENTS, FLAT, WHOLE, Where
from tests.unit.fake_ranks import fake_rank
from tests.unit.sharded import fully_sharded, numbered, placed, rank_of


def test_a_plain_model_is_named_as_without_wrappers() -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    found = {piece.name: piece for piece in pieces(DistributedDataParallel(model), "model2.")}
    assert set(found) == {"model2." + name for name in model.state_dict()}
    everything = owners(DistributedDataParallel(model), "model2.")
    assert set(everything) == {"model2." + name for name, _ in model.named_parameters()}
    assert found["model2.0.weight"].trainable
    assert not found["model2.0.bias"].trainable
    assert found["model2.1.running_mean"].owner is None
    assert found["model2.0.weight"].where == Where(WHOLE, (3, 2))


def test_wrappers_inside_a_model_are_not_in_names() -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    compiled = nn.Module()
    compiled._orig_mod = DistributedDataParallel(nn.Linear(2, 2))
    model = nn.ModuleDict({"encoder": DistributedDataParallel(nn.Linear(2, 2)), "rest": compiled})
    model["module"] = nn.Linear(2, 2)
    names = {piece.name for piece in pieces(DistributedDataParallel(model))}
    layers = ("encoder", "rest", "module")
    assert names == {f"{layer}.{what}" for layer in layers for what in ("weight", "bias")}


@pytest.mark.parametrize("shape", [(8, 4), (5, 6), (3, 4)])
def test_shards_of_all_ranks_are_the_whole_tensor(shape: tuple[int, ...]) -> None:
    parts = []
    for rank in range(4):
        with rank_of(rank, 4) as mesh:
            module = nn.Module()
            module.weight = fully_sharded(numbered(*shape), mesh)
            (piece,) = pieces(module)
            assert piece.where.kind == BOX
            parts.append(Stored(piece.where, piece.read().clone()))
    found, reason = tensor_files.whole(parts)
    assert reason == ""
    assert found is not None
    assert torch.equal(found, numbered(*shape))


def test_parameters_that_are_whole_after_a_validation_are_read_as_shards() -> None:
    """FSDP2 keeps those of the outermost unit, in the dtype of the computation."""
    with fake_rank(0, 2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for unit in (model[0], model):
            fully_shard(unit, mp_policy=policy)
        optimized = dict(model.named_parameters())
        with torch.no_grad():
            model(torch.ones(1, 4).bfloat16())
        assert dict(model.named_parameters())["1.weight"] is not optimized["1.weight"]
        shard_again(model)
        for piece in pieces(model):
            assert piece.owner is optimized[piece.name] and piece.where.kind == BOX


def test_strided_shards_of_all_ranks_are_the_whole_tensor() -> None:
    parts = []
    for rank in range(4):
        with rank_of(rank, 2, 2) as mesh:
            outer, inner = (mesh[name] for name in mesh.mesh_dim_names or ())
            module = nn.Module()
            module.weight = fully_sharded(placed(numbered(7, 3), inner, Shard(0)), outer)
            (piece,) = pieces(module)
            parts.append(Stored(piece.where, piece.read().clone()))
    found, _ = tensor_files.whole(parts)
    assert found is not None
    assert torch.equal(found, numbered(7, 3))


def test_replicas_that_agree_are_whole_and_others_are_not() -> None:
    parts = [Stored(Where(WHOLE, (2, 2)), torch.zeros(2, 2)) for _ in range(2)]
    assert tensor_files.whole(parts)[0] is not None
    parts[1] = Stored(Where(WHOLE, (2, 2)), torch.ones(2, 2))
    assert tensor_files.whole(parts) == (None, "ranks hold different values of it")
    with rank_of(0, 2) as mesh:
        module = nn.Module()
        module.weight = nn.Parameter(placed(numbered(4, 2), mesh, Replicate()))
        (piece,) = pieces(module)
        assert piece.where == Where(BOX, (4, 2), (0, 0))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "no rank has it"),
        ([Stored(Where(FLAT, (4,), 0), torch.zeros(2))], "a part of it is on no rank"),
        (
            [Stored(Where(WHOLE, (n,)), torch.zeros(n)) for n in (2, 4)],
            "ranks hold it in several shapes ([2], [4])",
        ),
    ],
)
def test_what_cannot_be_put_together_says_why(parts: list[Stored], reason: str) -> None:
    assert tensor_files.whole(parts) == (None, reason)


def test_scattered_elements_are_put_together() -> None:
    whole = numbered(4, 2)
    parts = []
    for rank in range(2):
        numbers = torch.arange(8).view(4, 2)[rank::2]
        parts.append(Stored(Where(ELEMENTS, (4, 2), numbers), whole[rank::2].clone()))
    found, _ = tensor_files.whole(parts)
    assert found is not None
    assert torch.equal(found, whole)
    assert torch.equal(parts[1].where.cut(whole, (2, 2)), whole[1::2])


def test_parts_of_a_flat_parameter_are_put_together() -> None:
    whole = numbered(3, 3)
    flat = whole.reshape(-1)
    parts = [Stored(Where(FLAT, (3, 3), at), flat[at : at + 5].clone()) for at in (0, 5)]
    found, _ = tensor_files.whole(parts)
    assert found is not None
    assert torch.equal(found, whole)


# ------------------------------------------------------------------------ samples


def test_rows_have_the_same_hash_in_any_batch() -> None:
    rows = torch.arange(12).view(4, 3)
    both = samples.hashes((rows,), {})
    assert both == samples.hashes((rows[:2],), {}) + samples.hashes((rows[2:],), {})
    assert len(set(both)) == 4
    assert both != samples.hashes((rows.float(),), {})


def test_padding_is_not_a_part_of_a_sample() -> None:
    long = {
        "input_ids": torch.tensor([[5, 6, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 0, 0]]),
    }
    short = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.tensor([[1, 1]])}
    other = {"input_ids": torch.tensor([[5, 7]]), "attention_mask": torch.tensor([[1, 1]])}
    assert samples.hashes((), long) == samples.hashes((), short)
    assert samples.hashes((), short) != samples.hashes((), other)


def test_activations_are_no_samples() -> None:
    assert samples.hashes((torch.ones(2, 2, requires_grad=True),), {}) == []


@pytest.mark.parametrize(
    ("ranks", "alone", "steps"),
    [
        ([["a", "b"], ["c", "d"]], ["d", "c", "b", "a"], 1),
        ([["a", "b"], ["a", "b"]], ["a", "b"], 1),  # they share a model
        ([["a", "b"], ["a", "c"]], ["a", "b", "c"], 0),  # one sample counts twice
        ([["a", "b"], ["c", "e"]], ["a", "b", "c", "d"], 0),
        ([["a"], []], [], 0),
    ],
)
def test_samples_of_all_ranks_together(
    ranks: list[list[str]], alone: list[str], steps: int
) -> None:
    given = {rank: [MeasuredStep(samples=rows)] for rank, rows in enumerate(ranks)}
    assert samples.steps_alike(given, [MeasuredStep(samples=alone)]) == steps


@pytest.mark.parametrize(
    ("ranks", "alone", "alike"),
    [
        (["1", "2"], "3", True),  # parts of the samples
        (["3", "3"], "3", True),  # they share a model
        (["1", "1"], "3", False),
        (["1", ""], "3", False),
        (["1", "2"], "", False),
    ],
)
def test_parts_of_samples_add_up(ranks: list[str], alone: str, alike: bool) -> None:
    assert split_alike(ranks, alone) is alike


@pytest.mark.parametrize("original", [False, True])
def test_shards_of_fsdp1_are_the_whole_tensors(original: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    parts: dict[str, list[Stored]] = {}
    gradients: dict[str, list[Stored]] = {}
    for rank in range(2):
        with rank_of(rank, 2):
            copied = copy.deepcopy(whole)
            copied[0] = FullyShardedDataParallel(
                copied[0], use_orig_params=original, device_id=torch.device("cpu")
            )
            model = FullyShardedDataParallel(
                copied, use_orig_params=original, device_id=torch.device("cpu")
            )
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(rank))
            for piece in pieces(model):
                local = piece.read()
                parts.setdefault(piece.name, []).append(Stored(piece.where, local.clone()))
                gradient = piece.gradient()
                assert gradient is not None
                assert gradient.shape == local.shape
                gradients.setdefault(piece.name, []).append(Stored(piece.where, gradient.clone()))
                assert piece.trainable
    for name, parameter in whole.named_parameters():
        found, reason = tensor_files.whole(parts[name])
        assert reason == ""
        assert found is not None
        assert torch.equal(found, parameter.detach())
        assert tensor_files.whole(gradients[name])[0] is not None


class DeepSpeedEngine(nn.Module):
    """A stand-in: a model and the optimizer of ZeRO."""

    def __init__(self, module: nn.Module, optimizer: object) -> None:
        super().__init__()
        self.module, self.optimizer = module, optimizer


def test_parts_by_zero_2() -> None:
    """The rank has the last element of the weight, and the bias."""
    model = nn.Linear(2, 2)
    model.weight._hp_mapping = SimpleNamespace(  # type: ignore[assignment]
        param_group_index=0,
        hp_fragment_address=SimpleNamespace(start=0, numel=1),
        lp_fragment_address=SimpleNamespace(start=3, numel=1),
    )
    model.bias._hp_mapping = None  # type: ignore[assignment]
    flat = nn.Parameter(torch.tensor([7.0, 8.0, 9.0]))
    zero = SimpleNamespace(single_partition_of_fp32_groups=[flat])
    (found,) = pieces(DeepSpeedEngine(model, zero))
    assert (found.name, found.where, found.owner) == ("weight", Where(FLAT, (2, 2), 3), flat)
    assert found.gradient() is None
    flat.grad = torch.tensor([1.0, 2.0, 3.0])
    assert (found.gradient(), found.read()) == (torch.tensor([1.0]), torch.tensor([7.0]))
    for one in found.copies():
        one.fill_(4.0)
    assert model.weight[1, 1].item() == 4.0


def test_parts_by_zero_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 elements the second of two ranks has 2, and one of padding."""
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    model = nn.Linear(5, 1)
    for parameter in model.parameters():
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()  # type: ignore[attr-defined]
        parameter.ds_tensor = torch.zeros(3)  # type: ignore[attr-defined]
        parameter.ds_tensor.ds_numel, parameter.ds_process_group = 3, None  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    flat = nn.Parameter(torch.arange(6.0))
    zero = SimpleNamespace(
        fp32_partitioned_groups_flat=[flat], grad_position={id(model.weight): [0, 2, 3]},
        get_param_id=id,
    )  # fmt: skip
    found = {one.name: one for one in pieces(DeepSpeedEngine(model, zero))}
    assert list(found) == ["weight"]  # all of the bias is on the other rank
    weight = found["weight"]
    assert weight.where == Where(FLAT, (1, 5), 3)
    assert (weight.read().tolist(), weight.trainable) == ([2.0, 3.0], True)
    assert [one.tolist() for one in weight.copies()] == [[0.0, 0.0]]


def test_an_engine_without_zero_has_plain_parameters() -> None:
    found = pieces(DeepSpeedEngine(nn.Linear(2, 1), SimpleNamespace()))
    assert {one.where.kind for one in found} == {WHOLE}
