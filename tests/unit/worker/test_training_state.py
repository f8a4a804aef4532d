"""States of a model with its optimizer: stored content and differences."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from moediag.lab.step import data
from moediag.lab.step.measure import training_state
from moediag.lab.step.models import tiny
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.lab.step.tasks import save_and_load
from moediag.protocol import ResumeTask, Trial, WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

TRIAL = Trial("t", "s", "v", world_size=1, layout={"dp_shard": 1})


@pytest.fixture
def trained() -> Wrapped:
    """One process, after one step."""
    torch.set_num_threads(1)
    model = tiny.build(TRIAL.model, 0)
    wrapped = Wrapped(model, tiny.anatomy(model, TRIAL.model), TRIAL)
    wrapped.make_optimizer()
    wrapped.loss(data.batch(TRIAL, 0, 1, 0)).backward()
    wrapped.step()
    return wrapped


def test_a_state_is_a_copy_and_equals_itself(trained: Wrapped) -> None:
    before = training_state.of(trained)
    found = training_state.difference(before, training_state.of(trained))
    parameters = len(list(trained.model.parameters()))
    assert (found.weights, found.optimizer, found.settings) == ({}, {}, [])
    assert found.compared == 4 * parameters  # each with step, exp_avg and exp_avg_sq
    with torch.no_grad():
        next(trained.model.parameters()).add_(0.5)
    assert list(training_state.difference(before, training_state.of(trained)).weights.values()) == [
        pytest.approx(0.5)
    ]


def test_the_optimizer_and_its_settings_are_part_of_it(trained: Wrapped) -> None:
    before = training_state.of(trained)
    weight = dict(trained.model.named_parameters())["lm_head.weight"]
    trained.optimizer.state[weight]["exp_avg"].add_(0.25)
    del trained.optimizer.state[weight]["exp_avg_sq"]
    trained.optimizer.param_groups[0]["lr"] = 0.5
    found = training_state.difference(before, training_state.of(trained))
    assert found.weights == {}
    assert found.optimizer == {
        "lm_head.weight exp_avg": pytest.approx(0.25),
        "lm_head.weight exp_avg_sq": None,
    }
    assert found.settings == ["lr 0.001, then 0.5"]


def test_only_a_new_nan_is_a_difference() -> None:
    nan, one = (torch.tensor([value, 2.0]) for value in (float("nan"), 1.0))
    empty = training_state.State({}, {}, [])
    with_nan, without = (dataclasses.replace(empty, weights={"w": t}) for t in (nan, one))
    assert training_state.difference(with_nan, with_nan).weights == {}
    (size,) = training_state.difference(without, with_nan).weights.values()
    assert size is not None
    assert size != size


def test_another_shape_is_a_difference_without_a_size() -> None:
    one, other = (training_state.State({"w": torch.zeros(n)}, {}, []) for n in (2, 3))
    assert training_state.difference(one, other).weights == {"w": None}


class TestWays:
    def test_save_state_needs_an_accelerator(self, trained: Wrapped) -> None:
        with pytest.raises(NotApplicable, match="of kind fsdp2"):
            save_and_load.way_of(ResumeTask(through="accelerate")).check(trained)
        save_and_load.way_of(ResumeTask(through="dcp")).check(trained)

    def test_an_unknown_save_method_is_refused(self) -> None:
        with pytest.raises(NotApplicable, match="'floppy'"):
            save_and_load.way_of(ResumeTask(through="floppy"))

    def test_a_saved_model_is_loaded_from_the_save_folder(self, tmp_path) -> None:
        trial = dataclasses.replace(TRIAL, wrapper=WrapperSpec(), reference_path="/elsewhere.pt")
        source = save_and_load.way_of(ResumeTask(through="save-pretrained")).source(trial, tmp_path)
        assert source.model.source == "checkpoint"
        assert source.checkpoint_path.parent == tmp_path
        assert save_and_load.way_of(ResumeTask()).source(trial, tmp_path) == trial
