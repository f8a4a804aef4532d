"""The arguments of a Trainer, and observations inside it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from moediag.lab.step import data
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import reference
from moediag.lab.step.models import tiny
from moediag.lab.step.models.pretrain import pretrain
from moediag.lab.step.shard import accelerate_on_cpu
from moediag.lab.step.tasks import trainer_arguments
from moediag.lab.step.tasks.trainer import Watched
from moediag.protocol import ModelSpec, SkewSpec, StepSpec, Trial, WrapperSpec
from moediag.recorder.not_applicable import NotApplicable

TRAINER = WrapperSpec(kind="trainer")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def trial(**changes) -> Trial:
    base = Trial("t", "s", "v", world_size=2, layout={"dp_shard": 2}, wrapper=TRAINER)
    return dataclasses.replace(base, **changes)


class TestRows:
    def test_a_sequential_sampler_gives_every_rank_its_batches_in_order(self):
        asked = trial(step=StepSpec(steps=2, batch=2, accumulate=2, seq_len=8))
        rows = trainer_arguments.rows(asked, shared=1)
        assert len(rows) == 2 * 2 * 2 * 2
        batches = [rows[i : i + 2] for i in range(0, len(rows), 2)]
        for position, batch in enumerate(batches):  # accelerate gives batch i to rank i % 2
            number, micro = position // 4 + 1, position // 2 % 2
            expected = data.batch(asked, position % 2, number, micro)
            assert [row["input_ids"] for row in batch] == expected.tolist()

    def test_the_first_token_is_not_predicted(self):
        row = trainer_arguments.rows(trial(), shared=1)[0]
        assert row["labels"][0] == -100
        assert row["labels"][1:] == row["input_ids"][1:]
        assert set(row["attention_mask"]) == {1}

    def test_ranks_that_share_a_batch_have_one_row(self):
        shared = trial(layout={"ep": 2}, skew=SkewSpec(batches="per-replica"))
        assert len(trainer_arguments.rows(shared, shared=2)) == shared.step.steps
        assert len(trainer_arguments.rows(shared, shared=1)) == 2 * shared.step.steps

    def test_ranks_that_share_a_batch_cannot_have_different_batches(self):
        with pytest.raises(NotApplicable, match="gives each 2 ranks one batch"):
            trainer_arguments.rows(trial(layout={"ep": 2}), shared=2)


class TestArguments:
    def test_no_clipping_sets_max_grad_norm_to_zero(self):
        assert (
            trainer_arguments.training(trial(step=StepSpec(clip=None)), "L", "f")["max_grad_norm"]
            == 0
        )
        assert trainer_arguments.training(trial(), "L", "f")["max_grad_norm"] == 1.0

    def test_fsdp_is_requested_only_if_accelerate_shards(self):
        ram = dataclasses.replace(TRAINER, cpu_ram_efficient_loading=True)
        config = trainer_arguments.training(trial(wrapper=ram), "Layer", "f")["fsdp_config"]
        assert config["cpu_ram_efficient_loading"] is True
        assert config["transformer_layer_cls_to_wrap"] == "Layer"
        native = trial(wrapper=dataclasses.replace(TRAINER, native_fsdp=True))
        ddp = dataclasses.replace(TRAINER, fsdp_plugin=False)
        alone = trial(wrapper=ddp, layout={"dp_replicate": 2})
        assert "fsdp" not in trainer_arguments.training(native, "L", "f")
        assert "fsdp" not in trainer_arguments.training(alone, "L", "f")

    @pytest.mark.parametrize(
        ("layout", "plugin"),
        [({"dp_replicate": 2, "dp_shard": 2}, True), ({"dp_shard": 2, "ep": 2}, True),
         ({"dp_shard": 4}, False), ({"dp_replicate": 4}, True)],
    )  # fmt: skip
    def test_a_layout_that_would_not_run_as_declared_is_refused(self, layout, plugin):
        wrapper = dataclasses.replace(TRAINER, fsdp_plugin=plugin)
        with pytest.raises(NotApplicable, match="no other layout"):
            trainer_arguments.sharding(trial(world_size=4, layout=layout, wrapper=wrapper), "L")

    def test_ignored_modules_cannot_be_given(self):
        wrapper = dataclasses.replace(TRAINER, ignore_experts=True)
        with pytest.raises(NotApplicable, match="no ignored modules"):
            trainer_arguments.sharding(trial(wrapper=wrapper), "L")


class TestWatched:
    @pytest.fixture
    def watched(self) -> Watched:
        made = Watched(
            Collector(trial(step=StepSpec(accumulate=2, steps=2)), 1, torch.device("cpu"))
        )
        made.load()
        return made

    def test_losses_of_micro_batches_are_summed_per_step(self, watched: Watched):
        for number, micro in ((1, 0), (1, 1), (2, 0), (2, 1)):
            tokens = data.batch(watched.trial, 1, number, micro)
            watched.before(watched.model, tokens)
            watched.after(float(number))
        assert watched.collector.measured.losses == [2.0, 4.0]
        assert len(watched.collector.measured.step_seconds) == 2

    def test_a_batch_that_differs_from_the_reference_is_refused(self, watched: Watched):
        with pytest.raises(NotApplicable, match="in step 1 the Trainer gave rank 1 another batch"):
            watched.before(watched.model, data.batch(watched.trial, 0, 1, 0))


class TestPretrain:
    ASKED = Trial("t", "s", "v", world_size=1, layout={"dp_shard": 1},
                  model=ModelSpec(source="checkpoint", pretrain=20))  # fmt: skip

    def test_the_model_is_pretrained_on_the_trials_batches(self):
        model = tiny.build(self.ASKED.model, 0)
        tokens = data.batch(self.ASKED, 0, 1, 0)

        def loss() -> float:
            logits = model(input_ids=tokens).logits.detach()[:, :-1].flatten(0, 1)
            return float(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))

        fresh = loss()
        pretrain(model, self.ASKED)
        assert loss() < 0.5 * fresh
        assert all(p.grad is None for p in model.parameters())

    def test_checkpoint_and_reference_are_the_pretrained_model(self, tmp_path):
        asked = dataclasses.replace(self.ASKED, reference_path=str(tmp_path / "reference.pt"))
        reference.run(asked)
        found = reference.load(str(tmp_path / "reference.pt"))
        saved = type(tiny.build(asked.model, 0)).from_pretrained(asked.checkpoint_path)
        fresh = dict(tiny.build(asked.model, 0).named_parameters())
        assert found["losses"][0] < 3.0
        for name, parameter in saved.named_parameters():
            assert torch.equal(parameter, found["weights"][name]), name
        assert not torch.equal(found["weights"]["lm_head.weight"], fresh["lm_head.weight"])


class TestOnCpu:
    def test_patches_are_undone_and_noted_only_if_used(self):
        state = pytest.importorskip("accelerate.state")
        made, told = state.AcceleratorState.__init__, []
        with accelerate_on_cpu.as_on_gpus(told.append):
            assert state.AcceleratorState.__init__ is not made
        assert state.AcceleratorState.__init__ is made
        assert told == []
