"""The loop over a rank's steps, and its outcome."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moediag.lab.step.collector import Collector, Unrecorded
from moediag.lab.step.models.skew import RouterSkew
from moediag.lab.step.shard.declared_slices import PlainShards
from moediag.protocol import SkewSpec, Starve, StepSpec, Trial
from scenarios.programs.matrices import Held, Matrices

CPU = torch.device("cpu")
TRIAL = Trial("t", "s", "v", world_size=1, step=StepSpec(steps=3))


class Recorder(Unrecorded):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def step(self, number: int) -> None:
        self.seen.append(number)

    def event(self, kind: str, keep: bool = False, **fields: Any) -> None:
        self.seen.append((kind, keep, fields))


def test_each_step_is_recorded_before_the_caller_and_optimized_after_it() -> None:
    recorder = Recorder()
    collector = Collector(TRIAL, 0, CPU, recorder)
    skew = RouterSkew(SkewSpec(starve=[Starve(expert=3, from_step=2)]), experts=4)
    banned = []
    for number in collector.steps(optimize=lambda n: recorder.seen.append(f"o{n}"), skew=skew):
        recorder.seen.append(f"c{number}")
        skew._layers = [0]
        banned.append(sorted(skew._banned()))
    assert recorder.seen == [1, "c1", "o1", 2, "c2", "o2", 3, "c3", "o3"]
    assert banned == [[], [3], [3]]
    assert collector.outcome().steps_done == 3


def test_steps_can_be_limited_to_a_range() -> None:
    assert list(Collector(TRIAL, 0, CPU).steps(first=2)) == [2, 3]
    assert list(Collector(TRIAL, 0, CPU).steps(first=2, last=2)) == [2]


def test_a_step_without_an_update_is_the_last_and_not_counted() -> None:
    model = Matrices(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    two = dataclasses.replace(TRIAL, world_size=2)  # state on one rank only is not observed
    collector = Collector(two, 0, CPU)
    held = Held(model, optimizer, two, PlainShards())
    taken = []
    for number in collector.steps(held, lambda n: n < 2):
        taken.append(number)
        model(torch.ones(1, 12)).sum().backward()
    outcome = collector.outcome()
    assert (taken, outcome.steps_done) == ([1, 2], 1)
    # Observations of the step without an update are kept, with gradients.
    assert sorted(outcome.replicas) == ["0", "1", "2"]
    assert outcome.replicas["2"].parameters["first.weight"].gradient is not None
    assert outcome.replicas["0"].parameters["first.weight"].gradient is None


def test_replicas_are_observed_only_on_request() -> None:
    collector = Collector(TRIAL, 0, CPU)
    list(collector.steps())
    assert collector.outcome().replicas == {}


def test_a_note_is_recorded_immediately_and_kept_once() -> None:
    recorder = Recorder()
    collector = Collector(TRIAL, 0, CPU, recorder)
    collector.note("a", "b", "a")
    collector.note("b")
    assert collector.outcome().notes == ["a", "b"]
    assert recorder.seen == [("note", True, {"text": "a"}), ("note", True, {"text": "b"})]


def test_outcome_has_versions_and_a_refusal_has_only_versions() -> None:
    collector = Collector(TRIAL, 2, CPU)
    collector.measured.losses.append(1.5)
    collector.set(cost={"": [1.0]})
    collector.note("a")
    outcome = collector.outcome()
    assert (outcome.rank, outcome.losses, outcome.cost) == (2, [1.5], {"": [1.0]})
    assert outcome.versions["torch"] and outcome.applicable is None
    refused = collector.outcome(ValueError("no such release"))
    assert (refused.rank, refused.applicable) == (2, "no such release")
    assert refused.versions == outcome.versions
    assert (refused.losses, refused.notes, refused.cost) == ([], [], {})
