"""The tp-router program on one process: its block, its data, and the replacement of a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moediag.lab.scenario import content
from moediag.lab.step.collector import Collector
from moediag.protocol import ModelSpec, ProgramTask, StepSpec, Trial
from moediag.recorder.not_applicable import NotApplicable
from scenarios.programs import tp_router as program
from scenarios.programs.router_block import look_alike, plans, titan_cpu
from scenarios.programs.router_block.plans import Cell


def trial(**options: object) -> Trial:
    return Trial(
        name="own",
        scenario="own",
        variant="own",
        world_size=1,
        layout={"tp": 1},
        model=ModelSpec(hidden=8, intermediate=6, experts=4, top_k=2),
        step=StepSpec(steps=2, batch=2, seq_len=6, clip=None),
        task=ProgramTask("tp-router", content.program("tp-router").filled(options)),
    )


@pytest.fixture
def alone(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_fix_in_the_schema_has_a_plan() -> None:
    assert program.OPTIONS["fix"] == tuple(plans.FIXES)
    assert plans.FIXES["none"] == plans.Plan()
    assert len(set(plans.FIXES.values())) == len(plans.FIXES)


@pytest.mark.parametrize("before", [False, True])
def test_the_block_sums_chosen_and_shared_experts(before: bool) -> None:
    own = trial()
    block = look_alike.Block(own, Cell(tensor_parallel=True, scores_before=before))
    program._made(program.Model(block), own)
    x = torch.randn(2, 6, 8)
    w = {name: p.detach() for name, p in block.named_parameters()}

    def feed_forward(v, w1, w2, w3):
        return w2 @ (F.silu(w1 @ v) * (w3 @ v))

    expected = torch.empty_like(x)
    for b in range(2):
        for s in range(6):
            token = x[b, s]
            top, chosen = torch.softmax(w["router.gate.weight"] @ token, 0).topk(2)
            out = feed_forward(token, *(w[f"shared_experts.w{i}.weight"] for i in (1, 2, 3)))
            for score, e in zip(top, chosen, strict=True):
                expert = [w[f"experts.w{i}"][e] for i in (1, 2, 3)]
                routed = feed_forward(token * score if before else token, *expert)
                out = out + (routed if before else routed * score)
            expected[b, s] = out
    torch.testing.assert_close(block(x).detach(), expected)


def test_one_process_matches_its_reference(alone: None) -> None:
    collector = Collector(trial(tensor_parallel=False), 0, torch.device("cpu"))
    program.run(collector)
    found = collector.outcome()
    assert found.steps_done == 2
    errors = [e for step in found.gradients.values() for e in step.values()]
    errors += [e for step in found.inputs.values() for e in step.values()]
    assert len(errors) == 2 * (7 + 1)
    assert not any(e.wrong for e in errors)
    assert all(e.scale > 0 for e in errors)
    assert found.losses == found.reference_losses
    assert any("look-alike" in note for note in found.notes)


def test_indivisible_sizes_are_not_applicable(alone: None) -> None:
    odd = dataclasses.replace(trial(), world_size=5)
    with pytest.raises(NotApplicable, match=r"step\.seq_len is 6, which 5 ranks cannot share"):
        program.run(Collector(odd, 0, torch.device("cpu")))


def test_a_gradient_of_another_shape_is_dropped_and_reported(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    model = nn.Linear(4, 6, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]))
    whole = DTensor.from_local(torch.ones(6, 4), mesh, [Partial()], run_check=False)
    model.weight.grad = whole
    assert program._drop_broken(model) == []
    assert model.weight.grad is not None
    shape, stride = torch.Size((6, 4)), (4, 1)
    model.weight.grad = DTensor.from_local(
        torch.ones(3, 4), mesh, [Partial()], run_check=False, shape=shape, stride=stride
    )
    assert program._drop_broken(model) == ["weight has a gradient of 3x4 where 6x4 belongs"]
    assert model.weight.grad is None


def test_the_torchtitan_block_is_not_applicable_without_torchtitan() -> None:
    if importlib.util.find_spec("torchtitan") is not None:
        pytest.skip("torchtitan is installed here")
    titan_cpu.load.cache_clear()
    with pytest.raises(NotApplicable, match="torchtitan is not installed"):
        titan_cpu.load()


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("common", r"torchtitan 0\.3\.0 has neither models\.moe nor"), ("moe", "cannot be imported")],
)
def test_a_release_with_another_moe_is_not_applicable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, reason: str
) -> None:
    package = tmp_path / "torchtitan"
    (package / "models" / folder).mkdir(parents=True)
    (package / "__init__.py").touch()
    information = tmp_path / "torchtitan-0.3.0.dist-info" / "METADATA"
    information.parent.mkdir()
    information.write_text("Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.3.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    titan_cpu.load.cache_clear()
    try:
        with pytest.raises(NotApplicable, match=reason):
            titan_cpu.load()
    finally:
        titan_cpu.load.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchtitan"]:
            del sys.modules[name]


@pytest.mark.parametrize("installed", [False, True])
def test_only_one_module_imports_the_fake_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    kernels = tmp_path / "models" / "moe" / "kernels.py"
    kernels.parent.mkdir(parents=True)
    kernels.write_text(
        "import triton\nimport triton.language as tl\n"
        "@triton.jit\ndef kernel(x, block: tl.constexpr): return x\n"
    )
    monkeypatch.delitem(sys.modules, titan_cpu._KERNELS, raising=False)
    for name in ("triton", "triton.language"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        if installed:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    before = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "triton"}
    titan_cpu._load_kernels(tmp_path)
    module = sys.modules.pop(titan_cpu._KERNELS)
    assert module.kernel(3, 1) == 3
    after = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "triton"}
    assert after == before


def test_integers_are_counted_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "histc", torch.histc)  # restored afterwards
    titan_cpu._count_integers()
    chosen = torch.tensor([0, 2, 2, 3])
    counts = torch.histc(chosen, bins=4, min=0, max=4)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [1, 0, 2, 1]
    assert torch.histc(chosen.float(), bins=4, min=0, max=4).dtype == torch.float32
