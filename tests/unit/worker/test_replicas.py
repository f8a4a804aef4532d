"""Descriptions of the shards of a rank: declared slice, sketch and number of holders."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from moediag.lab.step.measure import replicas
from moediag.lab.step.models import tiny
from moediag.lab.step.shard import declared_slices
from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import ModelSpec, Outcome, StepReplicas, Trial
from tests.unit.fake_ranks import fake_rank


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def estimated(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance as the control side computes it."""
    x, y = replicas.sketch(a).projections, replicas.sketch(b).projections
    return math.sqrt(sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) / len(x))


class TestSketch:
    def test_sketches_do_not_depend_on_shape_or_dtype(self):
        tensor = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
        assert replicas.sketch(tensor) == replicas.sketch(tensor.reshape(-1).double())

    @pytest.mark.parametrize("numel", [1, 50, 70_000, 200_000])
    def test_distance_of_sketches_estimates_the_tensor_distance(self, numel):
        generator = torch.Generator().manual_seed(numel)
        a = torch.randn(numel, generator=generator)
        b = a + 1e-3 * torch.randn(numel, generator=generator)
        true = float((a - b).norm())
        assert 0.3 * true < estimated(a, b) < 2.5 * true
        assert replicas.sketch(a).norm == pytest.approx(float(a.double().norm()), rel=1e-8)

    def test_one_changed_element_changes_the_sketch(self):
        a = torch.ones(70_000)
        b = a.clone()
        b[-1] += 1.0
        assert estimated(a, b) == pytest.approx(1.0, rel=1e-4)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_nonfinite_norm_is_text_without_projections(self, bad):
        sketch = replicas.sketch(torch.tensor([1.0, bad]))
        assert (sketch.norm, sketch.projections) == (str(bad), [])

    def test_an_empty_tensor_has_norm_zero(self):
        assert replicas.sketch(torch.zeros(0, 4)).norm == 0.0


class TestSlices:
    """Rank 1 of a 2 x 2 mesh, at (0, 1)."""

    @pytest.fixture(autouse=True)
    def mesh(self):
        from torch.distributed.device_mesh import init_device_mesh

        with fake_rank(1, 4):
            self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
            yield

    def placed(self, *placements, shape=(8, 6, 4)):
        from torch.distributed.tensor import distribute_tensor

        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        return distribute_tensor(whole, self.mesh, placements, src_data_rank=None)

    def test_each_sharded_dim_is_a_range_and_the_others_are_whole(self):
        from torch.distributed.tensor import Replicate, Shard

        assert (
            declared_slices.describe("w", self.placed(Replicate(), Replicate()), PlainShards())
            == ":"
        )
        assert (
            declared_slices.describe("w", self.placed(Replicate(), Shard(0)), PlainShards())
            == "4:8,:,:"
        )
        assert (
            declared_slices.describe("w", self.placed(Shard(1), Shard(0)), PlainShards())
            == "4:8,0:3,:"
        )
        assert (
            declared_slices.describe("w", self.placed(Shard(0), Shard(0)), PlainShards())
            == "2:4,:,:"
        )

    def test_declared_rows_are_offset_by_their_start(self):
        """Four of eight experts lie on this rank's mesh: all of its rows, or half of them."""
        from torch.distributed.tensor import Replicate, Shard

        rows = PlainShards({"w": (4, 8)})
        whole = self.placed(Replicate(), Replicate(), shape=(4, 6))
        assert declared_slices.describe("w", whole, rows) == "4:8,:"
        assert declared_slices.describe(
            "w", self.placed(Replicate(), Shard(0), shape=(4, 6)), rows
        ) == ("6:8,:")
        assert declared_slices.describe("other", whole, rows) == ":"

    def test_an_uneven_or_empty_piece_is_described_exactly(self):
        from torch.distributed.tensor import Replicate, Shard

        assert declared_slices.describe("w", self.placed(Replicate(), Shard(0), shape=(5, 2)),
                               PlainShards()) == "3:5,:"  # fmt: skip
        assert declared_slices.describe("w", self.placed(Replicate(), Shard(0), shape=(1, 2)),
                               PlainShards()).startswith("0:0,")  # fmt: skip

    def test_strided_shards_are_described_in_reverse_order(self):
        """The table in torch's own docstring of _StridedShard: (0, 1) holds rows 4-5."""
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        tensor = self.placed(_StridedShard(0, split_factor=2), Shard(0), shape=(8, 8))
        assert declared_slices.describe("w", tensor, PlainShards()) == "4:6,:"
        assert declared_slices.holders(tensor, 4) == 1

    def test_plain_tensors_are_whole_except_declared_rows(self):
        plain = PlainShards({"experts": (4, 8)})
        weight = torch.zeros(4, 6, 4)
        assert declared_slices.describe("experts", weight, plain) == "4:8,:,:"
        assert declared_slices.describe("norm", weight, plain) == ":"

    def test_holders_of_a_slice_are_counted(self):
        from torch.distributed.tensor import Replicate, Shard

        assert declared_slices.holders(torch.zeros(3), 4) == 4
        assert declared_slices.holders(self.placed(Replicate(), Shard(0)), 4) == 2
        assert declared_slices.holders(self.placed(Shard(0), Shard(1)), 4) == 1


class TestObserver:
    @pytest.fixture
    def wrapped(self):
        trial = Trial(
            "t", "s", "v", world_size=2, layout={"dp_shard": 2}, model=ModelSpec(layers=1)
        )
        model = tiny.build(trial.model, 0)
        made = Wrapped(model, tiny.anatomy(model, trial.model), trial)
        made.make_optimizer()
        return made

    def step(self, wrapped, observer, number):
        wrapped.loss(torch.arange(32).view(1, 32)).backward()
        observer.before_clip()
        wrapped.clip(1.0)
        wrapped.step()
        observer.after_optimizer(number)

    def test_weights_gradients_steps_and_rates_are_kept_by_step(self, wrapped):
        observer = replicas.Observer(wrapped, world_size=2)
        self.step(wrapped, observer, 1)
        before, after = observer.steps["0"], observer.steps["1"]
        fqn = "model.embed_tokens.weight"
        assert before.parameters[fqn].has_gradient is None
        assert after.parameters[fqn].has_gradient is True
        assert after.parameters[fqn].slice == ":"
        assert before.parameters[fqn].weight != after.parameters[fqn].weight
        assert (before.optimizer_steps, after.optimizer_steps) == ([], [1.0, 1.0])
        assert after.learning_rates == [1e-3]
        gradients = [r.gradient.norm**2 for r in after.parameters.values() if r.gradient]
        assert after.local_norm == pytest.approx(math.sqrt(sum(gradients)), rel=1e-6)

    def test_unshared_parameters_are_left_out(self, wrapped):
        assert replicas.Observer(wrapped, world_size=1).steps["0"].parameters == {}

    def test_flat_parameters_have_only_optimizer_steps_and_rates(self, wrapped):
        wrapped.tells_slices = False
        observer = replicas.Observer(wrapped, world_size=2)
        self.step(wrapped, observer, 1)
        assert observer.steps["1"] == StepReplicas(
            optimizer_steps=[1.0, 1.0], learning_rates=[1e-3]
        )

    def test_replicas_round_trip_through_the_outcome_file(self, wrapped, tmp_path):
        observer = replicas.Observer(wrapped, world_size=2)
        self.step(wrapped, observer, 1)
        outcome = Outcome(rank=0, replicas=observer.steps, reference_norms=[1.5])
        assert Outcome.read(outcome.write(tmp_path)) == outcome


class Experts(torch.nn.Module):
    """One MoE block whose experts are one 3-D parameter, as in transformers >= 5.0."""

    def __init__(self, rows):
        super().__init__()
        self.router = torch.nn.Linear(2, 8)
        self.experts = torch.nn.Module()
        self.experts.down_proj = torch.nn.Parameter(torch.zeros(rows, 2, 3))


class TestPlainExperts:
    def rows(self, held, ep_rank, layout):
        model = torch.nn.ModuleDict({"mlp": Experts(held)})
        block = tiny.MoeBlock("mlp", model["mlp"], 0, ())
        trial = Trial("t", "s", "v", world_size=4, layout=layout, model=ModelSpec(experts=8))
        wrapped = SimpleNamespace(
            model=model, anatomy=tiny.Anatomy((), (block,), 8), trial=trial, ep_rank=ep_rank
        )
        with fake_rank(3, 4):
            return replicas.plain_experts(wrapped)

    @pytest.mark.parametrize(("layout", "ep_rank", "held", "span"), [
        ({"ep": 4}, 3, 2, (6, 8)),
        ({"dp_shard": 2, "ep": 2}, 1, 4, (4, 8)),
    ])  # fmt: skip
    def test_ep_position_determines_the_rows(self, layout, ep_rank, held, span):
        plain = self.rows(held, ep_rank, layout)
        assert plain.rows == {"mlp.experts.down_proj": span}
        assert plain.group is not None

    def test_all_experts_or_no_ep_axis_gives_the_whole_tensor(self):
        assert self.rows(8, 1, {"ep": 4}) == PlainShards()
        assert self.rows(2, None, {"dp_shard": 4}) == PlainShards()
