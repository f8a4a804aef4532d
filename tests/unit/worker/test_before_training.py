"""What a script does with a Trainer before it trains, as the hunt tries it."""

from __future__ import annotations

from unittest.mock import MagicMock

import pydantic
import pytest

from moediag.lab.campaign.hunt.layouts import BEFORE_TRAINING
from moediag.lab.scenario import sections
from moediag.lab.step.tasks import before_training
from moediag.protocol.specs import FIRST_CALLS


def test_every_call_is_made_in_its_order() -> None:
    assert set(before_training.CALLS) == {*FIRST_CALLS, "evaluate-unmarked"}
    for way in BEFORE_TRAINING.ways:
        trainer = MagicMock()
        before_training.call(trainer, way.wrapper.before_train)
        assert trainer.mock_calls, way.name
    trainer = MagicMock()
    before_training.call(trainer, "save then predict")
    assert [name for name, _, _ in trainer.mock_calls] == ["save_model", "predict"]
    before_training.call(trainer, before_training.NOTHING)
    assert len(trainer.mock_calls) == 2


def test_the_ways_are_what_a_scenario_may_ask_for() -> None:
    names = [way.name for way in BEFORE_TRAINING.ways]
    assert len({*names}) == len(names) == len(FIRST_CALLS) + 12
    for way in BEFORE_TRAINING.ways:
        assert way.batches == "distinct", "equal batches hide that nothing reduces gradients"
        sections.WrapperSection(kind="trainer", before_train=way.wrapper.before_train)
    with pytest.raises(pydantic.ValidationError):
        sections.WrapperSection(kind="trainer", before_train="evaluate then nothing")
