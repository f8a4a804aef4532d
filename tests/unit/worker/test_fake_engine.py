"""The stand-in for an inference engine: names, and the layout in which it stores experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from moediag.lab.scenario import content
from moediag.lab.step.models import tiny
from moediag.protocol import ModelSpec, Trial
from scenarios.programs import fake_engine

SPEC = ModelSpec(layers=1, experts=4, config={"initializer_range": 0.2})
TRIAL = Trial("t", "s", "v", world_size=1, layout={}, model=SPEC)


class Packed(torch.nn.Module):
    """A model whose experts are packed as in transformers 5, whatever is installed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Module()
        self.model.norm = torch.nn.Parameter(torch.randn(3, generator=generator))
        self.model.experts = torch.nn.Module()
        for name, shape in {"gate_up_proj": (2, 4, 3), "down_proj": (2, 3, 2)}.items():
            weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
            setattr(self.model.experts, name, weight)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(**options: Any) -> Any:
        monkeypatch.setattr(tiny, "build", lambda *_, **__: Packed(0))
        return fake_engine.Engine(TRIAL, content.program("weight-sync").filled(options))

    return made


def total(model: Any) -> float:
    """Depends on the place of every element."""
    parameters = [p.detach().flatten() for p in model.parameters()]
    return float((torch.cat(parameters) * torch.arange(1.0, 40.0)).sum())


def computed(engine: Any) -> float:
    with engine.computing() as model:
        return total(model)


def update(engine: Any, model: Any, names: str = "per-expert") -> float:
    for name, parameter in model.named_parameters():
        for known in fake_engine.named(name, parameter.detach(), names):
            engine.load(*known)
    engine.finish()
    return computed(engine)


def test_names_are_those_of_the_checkpoint() -> None:
    names = [
        name
        for packed, p in Packed(0).named_parameters()
        for name, _ in fake_engine.named(packed, p.detach(), "per-expert")
    ]
    assert names == [
        "model.norm",
        *(f"model.experts.{e}.{p}_proj.weight" for e in (0, 1) for p in ("gate", "up")),
        *(f"model.experts.{e}.down_proj.weight" for e in (0, 1)),
    ]


@pytest.mark.parametrize("converted", ["loaded", "all"])
def test_it_computes_with_what_it_was_sent(engine: Any, converted: str) -> None:
    one = engine(converted=converted, unknown="refused")
    assert computed(one) == total(Packed(0))
    for seed in (1, 2):
        assert update(one, Packed(seed)) == total(Packed(seed))


def test_halves_in_the_other_order_are_other_weights(engine: Any) -> None:
    assert update(engine(), Packed(1), "per-expert-up-first") != total(Packed(1))


def test_it_drops_or_refuses_packed_names(engine: Any) -> None:
    one, packed = engine(), "model.experts.down_proj"
    one.load(packed, torch.zeros(2, 3, 2))
    one.finish()
    assert computed(one) == total(Packed(0))
    with pytest.raises(KeyError, match=packed):
        engine(unknown="refused").load(packed, torch.zeros(2, 3, 2))


def test_experts_that_were_not_loaded_are_converted_again(engine: Any) -> None:
    one = engine(converted="all")
    before = computed(one)
    one.finish()
    assert computed(one) != before
    one.finish()
    assert computed(one) == before  # every second update hides it
