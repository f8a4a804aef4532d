"""Roots, layers and MoE blocks are found without help; tokens are counted where they are routed;
models with hooks still copy, save and compile."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from moediag.recorder import Recorder, install
from moediag.recorder.parameter_names import ParameterNames
from moediag.recorder.routing import expert_counts
from tests.unit.recorder.written import events


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x)
        scores.topk(2, dim=-1)  # an earlier choice of the same length does not count
        torch.topk(scores.view(-1, 2, 2), 1)
        chosen = torch.topk(scores, 1, dim=-1).indices
        if x.sum() == 12345:
            raise ValueError("a bad batch")
        return sum(e(x) * (chosen == i) for i, e in enumerate(self.experts))  # type: ignore[return-value]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": Moe()}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer["mlp"](x)
        return x


def test_expert_counts_distinguish_blocks_from_other_modules() -> None:
    assert expert_counts(Moe()) == (4,)
    assert expert_counts(nn.Linear(2, 2)) == ()
    local = Moe()
    local.num_experts = 8  # expert parallelism: the list holds the local ones  # type: ignore[assignment]
    assert expert_counts(local) == (4, 8)


def test_tokens_come_from_the_last_top_k_of_each_forward(
    recorder: Recorder, tmp_path: Path
) -> None:
    model, x = Model(), torch.randn(6, 4)
    model(x)
    seen = events(tmp_path, "tokens")
    assert [(e["layer"], sum(e["counts"]), len(e["counts"])) for e in seen] == [
        ("layers.0.mlp", 6, 4),
        ("layers.1.mlp", 6, 4),
    ]
    with torch.no_grad():
        expected = torch.bincount(model.layers[0]["mlp"].gate(x).argmax(-1), minlength=4)
    assert seen[0]["counts"] == expected.tolist()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.scale  # type: ignore[no-any-return]


class Trainer(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy, self.other = nn.DataParallel(policy), nn.Linear(4, 4)

    def train_step(self, x: torch.Tensor) -> torch.Tensor:
        return self.policy(x)  # type: ignore[no-any-return]


def test_a_model_whose_methods_are_called_has_its_names(recorder: Recorder) -> None:
    policy = Policy()
    for _ in range(2):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        policy.act(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert recorder.current_step == 2
    assert ParameterNames(recorder).of([*policy.parameters()]) == [
        "scale", "net.0.weight", "net.0.bias"
    ]  # fmt: skip


def test_a_trainer_with_a_wrapper_is_no_model(recorder: Recorder) -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    Trainer(net).train_step(torch.randn(2, 4))
    assert ParameterNames(recorder).of([*net.parameters()]) == ["0.weight", "0.bias"]


def test_a_forward_that_raises_leaves_nothing_open(recorder: Recorder) -> None:
    model = Model()
    model(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="bad batch"):
        model(torch.full((1, 4), 12345 / 4))
    assert recorder.thread.blocks == []
    assert recorder.current_phase() == "other"


def test_calls_of_the_model_in_a_wrapper_are_counted(recorder: Recorder) -> None:
    """An evaluation on one rank calls it, because the wrapper may communicate."""

    class DistributedDataParallel(nn.Module):  # recognised by its name
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)  # type: ignore[no-any-return]

    model = DistributedDataParallel()
    for called, turns in ((model, 1), (model, 2), (model.module, 3), (model.module, 4)):
        called(torch.randn(2, 4))
        assert recorder.heartbeat.turns == turns and not recorder.thread.blocks


def test_operations_in_a_pause_are_not_recorded(recorder: Recorder, tmp_path: Path) -> None:
    reference, model, x = Model(), Model(), torch.randn(5, 4)
    with recorder.paused():
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for _ in range(2):
            reference(x).sum().backward()
            optimizer.step()
    assert recorder.roots == []
    model(x)
    assert [e["step"] for e in events(tmp_path, "tokens")] == [1, 1]
    assert recorder.module_names.get(model.layers[0]["mlp"]) == "layers.0.mlp"


def test_top_k_outside_a_model_is_not_recorded(recorder: Recorder, tmp_path: Path) -> None:
    torch.topk(torch.randn(3, 4), 2)
    assert events(tmp_path, "tokens") == []


def test_optimizer_steps_and_missing_gradients_are_recorded(
    recorder: Recorder, tmp_path: Path
) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
        model.layers[1]["mlp"].experts[3].weight.grad = None
        optimizer.step()
    model(torch.randn(5, 4))
    assert [e["step"] for e in events(tmp_path, "tokens")] == [1, 1, 2, 2, 3, 3]
    names = {e["id"]: e["fqns"] for e in events(tmp_path, "names")}
    missing = events(tmp_path, "no_gradient")
    assert [e["step"] for e in missing] == [1, 2]
    for event in missing:
        # The router gets no gradient here, because the choice has none.
        assert "layers.1.mlp.experts.3.weight" in names[event["names"]]
        assert "layers.1.mlp.experts.2.weight" not in names[event["names"]]


def test_recorded_models_copy_and_load_without_the_recorder(
    recorder: Recorder, tmp_path: Path
) -> None:
    layer = nn.Sequential(nn.Linear(2, 2))
    layer(torch.zeros(1, 2))
    assert layer._forward_pre_hooks, "the root was observed"
    copy.deepcopy(layer)(torch.zeros(1, 2))
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    assert b"moediag" not in pickle.dumps(layer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(torch.ones(1, 2)), layer(torch.ones(1, 2)))


def test_compiled_models_give_the_same_numbers(tmp_path: Path) -> None:
    """The compiler first traces ``torch.topk`` before, during or after recording."""
    recorder = install(str(tmp_path), 0, 1)

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.topk(self.gate(x), 2).values

    model, x = Chooses(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model.gate(x).topk(2).values)
    assert any("compile" in e["text"] for e in events(tmp_path, "not_seen"))
    for _ in range(2):
        recorder.uninstall()
        torch.compiler.reset()
        assert torch.equal(compiled(x), model.gate(x).topk(2).values)
        recorder = install(str(tmp_path), 0, 1)
        torch.compiler.reset()
        assert torch.equal(compiled(x), model.gate(x).topk(2).values)
    recorder.uninstall()


def test_top_k_scripts_when_the_builtin_table_was_made_before(tmp_path: Path) -> None:
    program = """
import sys, torch
torch.jit.script(lambda: None) if False else torch.jit._builtins._get_builtin_table()
from moediag.recorder import install
recorder = install(sys.argv[1], 0, 1)
def choose(x: torch.Tensor):
    return torch.topk(x, 1)[0]
print(torch.jit.script(choose)(torch.tensor([1.0, 3.0])).item())
"""
    script = tmp_path / "script.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "3.0"


def test_uninstall_restores_all_hooks(tmp_path: Path) -> None:
    before = (torch.topk, vars(torch.Tensor).get("topk"))
    made = install(str(tmp_path), 0, 1)
    model = Model()
    model(torch.zeros(1, 4))
    assert torch.topk is not before[0]
    made.uninstall()
    made.uninstall()
    assert (torch.topk, vars(torch.Tensor).get("topk")) == before
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert not nn.modules.module._global_forward_pre_hooks


def test_the_global_hook_is_removed_after_the_first_step(recorder: Recorder) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).sum().backward()
    assert nn.modules.module._global_forward_pre_hooks
    optimizer.step()
    model(torch.randn(5, 4))
    assert not nn.modules.module._global_forward_pre_hooks
