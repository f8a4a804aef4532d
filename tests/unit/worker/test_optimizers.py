"""Mixed parameter groups are reported before the step; the norm counts each shard once."""

from __future__ import annotations

import pytest
import torch

from moediag.lab.step.shard import clipping, optimizers
from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.protocol import StepSpec
from moediag.recorder.not_applicable import NotApplicable
from tests.unit.fake_ranks import fake_rank


@pytest.fixture
def parameters():
    """Three plain, two DTensors on ep, one on dp_shard; rank 0 of 2."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with fake_rank(0, 2):
        made = {f"plain{i}": nn.Parameter(torch.ones(4)) for i in range(3)}
        for name, axis in (("e0", "ep"), ("e1", "ep"), ("d0", "dp_shard")):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
            tensor = distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None)
            made[name] = nn.Parameter(tensor)
        yield made


def found(parameters, **step):
    return optimizers.findings(optimizers.build(parameters, StepSpec(**step)))


class TestGroups:
    @pytest.mark.parametrize("how", ["foreach", "fused"])
    def test_plain_tensors_mixed_with_dtensors_are_found_and_raise(self, parameters, how):
        some = [p for name, p in parameters.items() if name != "d0"]
        (finding,) = found(some, **{how: True})
        assert finding.raises
        assert finding.kinds == {"plain": 3, "ep [0, 1]": 2}
        assert finding.text == (
            "parameter group 0 holds 3 plain tensors and 2 DTensors on mesh ep [0, 1]; "
            f"AdamW {how}=True handles them in one call"
        )
        optimizer = optimizers.build(some, StepSpec(**{how: True}))
        for parameter in some:
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            optimizer.step()

    def test_several_meshes_are_reported_but_not_as_the_error(self, parameters):
        some = [parameters["e0"], parameters["d0"]]
        (finding,) = found(some, foreach=True)
        assert not finding.raises

    @pytest.mark.parametrize("step", [
        {"foreach": False},
        {},  # torch itself takes foreach on an accelerator only
        {"foreach": True, "parameter_groups": "per-mesh"},
        {"fused": True, "parameter_groups": "per-mesh"},
        {"foreach": False, "optimizer": "sgd"},
    ])  # fmt: skip
    def test_calls_with_one_kind_of_tensor_have_no_finding(self, parameters, step):
        assert found(parameters.values(), **step) == []

    def test_a_group_with_one_kind_of_tensor_has_no_finding(self, parameters):
        assert found([parameters["plain0"], parameters["plain1"]], foreach=True) == []
        assert found([parameters["e0"], parameters["e1"]], fused=True) == []

    def test_groups_per_mesh_contain_every_parameter_once_in_order(self, parameters):
        groups = optimizers.per_mesh(parameters.values())
        assert [len(group) for group in groups] == [3, 2, 1]
        assert [id(p) for group in groups for p in group] == [id(p) for p in parameters.values()]

    def test_other_optimizers_are_not_checked(self):
        assert optimizers.findings(object()) == []

    def test_an_unknown_optimizer_is_not_applicable(self, parameters):
        with pytest.raises(NotApplicable, match="unknown optimizer 'lion'"):
            optimizers.build(parameters.values(), StepSpec(optimizer="lion"))


class TestClip:
    """Alone in the world; tests/e2e/test_clip.py has 2 and 4 ranks."""

    @pytest.fixture
    def plain(self):
        made = {n: torch.nn.Parameter(torch.zeros(3)) for n in ("a", "b", "unused")}
        made["a"].grad, made["b"].grad = torch.full((3,), 2.0), torch.full((3,), -1.0)
        return made

    @pytest.mark.parametrize("how", ["torch", "local", "per-mesh"])
    def test_plain_gradients_are_scaled_to_the_limit(self, plain, how):
        norm = clipping.clip(plain, 1.0, how, PlainShards())
        assert norm == pytest.approx(15**0.5)
        after = torch.cat([plain["a"].grad, plain["b"].grad])
        assert float(after.norm()) == pytest.approx(1.0, rel=1e-5)
        assert plain["unused"].grad is None

    @pytest.mark.parametrize("how", ["torch", "local", "per-mesh"])
    def test_small_gradients_are_not_scaled(self, plain, how):
        clipping.clip(plain, 100.0, how, PlainShards())
        assert torch.equal(plain["a"].grad, torch.full((3,), 2.0))

    def test_an_unknown_clipping_method_is_not_applicable(self, plain):
        with pytest.raises(NotApplicable, match="unknown clipping 'maybe'"):
            clipping.clip(plain, 1.0, "maybe", PlainShards())
