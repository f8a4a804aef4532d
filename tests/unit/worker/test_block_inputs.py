"""Gradients of the MoE blocks' inputs: kept once per backward, with any checkpointing, and wrong
where the block hands a wrong one down."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from moediag.lab.step import data, preparation, training
from moediag.lab.step.measure import gradients, reference
from moediag.lab.step.measure.block_inputs import InputGradients
from moediag.lab.step.models import tiny
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import ModelSpec, StepSpec, Trial

MODEL = ModelSpec(experts=4, vocab=64)
BLOCKS = {"model.layers.0.mlp", "model.layers.1.mlp"}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trial(tmp_path: Any, **step: Any) -> Trial:
    spec = StepSpec(**{"steps": 1, "seq_len": 16, **step})
    path = str(tmp_path / "reference.pt")
    return Trial("t", "s", "v", world_size=2, layout={"dp_shard": 2}, model=MODEL, step=spec,
                 reference_path=path)  # fmt: skip


def kept_on(subject: Trial, rank: int, spoil: Any = None) -> tuple[Wrapped, dict[str, Any]]:
    """The inputs that one rank keeps of one step; ``spoil(block)`` is called first."""
    model = tiny.build(MODEL, subject.step.seed)
    anatomy = tiny.anatomy(model, MODEL)
    preparation.checkpoint_activations(model, subject.step.checkpointing)
    wrapped = Wrapped(model, anatomy, subject)
    if spoil is not None:
        spoil(anatomy.blocks[1].module)
    with InputGradients(anatomy) as kept:
        training.forward_backward(wrapped, rank, 1, torch.device("cpu"))
        found = kept.take()
        assert kept.take() == {}, "taken once"
    return wrapped, found


STEPS = [
    {},
    {"accumulate": 3},
    {"checkpointing": "reentrant"},
    {"checkpointing": "non-reentrant"},
    {"checkpointing": "reentrant", "accumulate": 2},
    {"checkpointing": "non-reentrant", "accumulate": 2},
]


@pytest.mark.parametrize(
    "step", STEPS, ids=lambda step: "-".join(map(str, step.values())) or "plain"
)
def test_each_rank_is_compared_with_its_own_reference(tmp_path: Any, step: dict[str, Any]) -> None:
    subject = trial(tmp_path, **step)
    reference.run(subject)
    by_rank = reference.load(str(subject.reference_path))["inputs"][0]
    assert len(by_rank) == 2
    for rank in (0, 1):
        wrapped, found = kept_on(subject, rank)
        assert set(found) == BLOCKS
        shape = (subject.step.accumulate, 1, 16, MODEL.hidden)
        assert {tuple(g.shape) for g in found.values()} == {shape}
        errors = gradients.inputs(wrapped, found, by_rank[rank])
        assert set(errors) == BLOCKS
        assert not any(e.wrong for e in errors.values())
        assert all(e.scale > 0 for e in errors.values())
        other = gradients.inputs(wrapped, found, by_rank[1 - rank])
        assert all(e.wrong for e in other.values()), "another rank's tokens"


def detached_router(block: Any) -> None:
    """The router's weights get gradients, but none reaches the block's input through it."""
    gate = block.gate
    plain = gate.forward
    gate.forward = lambda hidden: plain(hidden.detach())


def test_a_block_that_passes_a_wrong_gradient_is_found(tmp_path: Any) -> None:
    subject = trial(tmp_path)
    reference.run(subject)
    stored = reference.load(str(subject.reference_path))
    wrapped, found = kept_on(subject, 0, spoil=detached_router)
    errors = gradients.inputs(wrapped, found, stored["inputs"][0][0])
    assert errors["model.layers.1.mlp"].wrong
    # The router's own gradient is still that of its rank's batch.
    gate = wrapped.model.get_parameter("model.layers.1.mlp.gate.weight").grad
    assert gate is not None and gate.abs().max() > 0


def test_what_else_reads_the_input_adds_nothing() -> None:
    """As the inputs of each layer of Gemma 4, which are made from the embeddings too."""
    block = torch.nn.Linear(2, 2, bias=False)
    anatomy = tiny.Anatomy((), (tiny.MoeBlock("block", block, 0, ()),), 4)
    x = torch.ones(1, 2, requires_grad=True)
    with InputGradients(anatomy) as kept:
        (block(input=x).sum() + 100 * x.sum()).backward()
        found = kept.take()
    assert torch.equal(found["block"][0], block.weight.detach().sum(0, keepdim=True))


def test_tensors_without_a_gradient_are_left_out(tmp_path: Any) -> None:
    model = tiny.build(MODEL, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "lm_head" in name)
    wrapped = Wrapped(model, tiny.anatomy(model, MODEL), trial(tmp_path))
    with InputGradients(wrapped.anatomy) as kept:
        wrapped.loss(data.batch(wrapped.trial, 0, 1, 0)).backward()
        assert set(kept.take()) == {"model.layers.1.mlp"}
        with torch.no_grad():
            wrapped.loss(data.batch(wrapped.trial, 0, 1, 0))
        assert kept.take() == {}
    wrapped.loss(data.batch(wrapped.trial, 0, 1, 0)).backward()
    assert kept.take() == {}, "its hooks are gone"


def test_bfloat16_gradients_are_kept_in_fp32(tmp_path: Any) -> None:
    spec = dataclasses.replace(MODEL, dtype="bfloat16")
    model = tiny.build(spec, 0)
    wrapped = Wrapped(model, tiny.anatomy(model, spec), trial(tmp_path))
    with InputGradients(wrapped.anatomy) as kept:
        wrapped.loss(data.batch(wrapped.trial, 0, 1, 0)).backward()
        assert {g.dtype for g in kept.take().values()} == {torch.float32}
