"""scenario x variant x stack x repeat -> trials."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moediag.errors import LayoutError, MoediagError, ScenarioError, UsageError
from moediag.lab.scenario.catalogue import find, names
from moediag.lab.scenario.load import load
from moediag.lab.scenario.plan import plan, reference_key
from moediag.lab.scenario.schema import Scenario
from moediag.protocol import CostTask, ResumeTask, Starve, StepTask, Trial
from moediag.result import devices


@pytest.fixture(scope="module")
def starvation() -> Scenario:
    return load(find("expert-starvation"))


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(("device", "ranks"), [("cpu", 2), ("cpu", 4), ("gpu", 8)])
def test_every_shipped_scenario_can_be_planned(name: str, device: str, ranks: int) -> None:
    scenario = load(find(name))
    # Some layouts have two axes, and some are wide enough with a few ranks.
    ranks = max(ranks, scenario.world.min)
    ranks = min(ranks, scenario.world.max or ranks)
    planned = plan(scenario, ranks, device, repeat=2)
    found = [p.trial for p in planned.trials]
    assert len({t.name for t in found}) == len(found)
    for trial in found:
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", trial.name)
        assert trial.world_size == ranks
        assert math.prod(trial.layout.values()) == ranks
        assert trial.backend == ("gloo" if device == "cpu" else "nccl")
        assert trial.launcher == ("fork" if device == "cpu" else "torchrun")
    assert {t.variant for t in found if t.task.kind != "cost"} == set(scenario.variants)


def test_a_planned_trial_round_trips_through_its_file(starvation: Scenario, tmp_path: Path) -> None:
    for planned in plan(starvation, 2, "cpu").trials:
        assert Trial.read(planned.trial.write(tmp_path)) == planned.trial


def test_the_variants_keep_their_order_and_role(starvation: Scenario) -> None:
    trials = plan(starvation, None, "cpu").trials
    steps = [p for p in trials if p.trial.task == StepTask()]
    assert [p.trial.variant for p in steps] == list(starvation.variants)
    assert steps[0].trial.role == "unfixed"
    assert steps[0].trial.world_size == starvation.world.default
    assert steps[0].trial.skew.starve == [Starve(expert=3, rank=1, layer=1)]
    assert steps[0].expected is not None
    assert steps[0].expected.verdicts("gloo") == ("collective-mismatch",)
    assert steps[0].stack == {"transformers": "4.53.2"}


def test_the_cost_trial_is_last_with_fixes_of_the_same_stack(starvation: Scenario) -> None:
    last = plan(starvation, 2, "cpu").trials[-1]
    assert (last.trial.task.kind, last.trial.variant, last.trial.role) == (
        "cost",
        "cost",
        "control",
    )
    assert isinstance(last.trial.task, CostTask)
    own = [v.fix for v in starvation.variants.values() if v.fix]
    assert last.trial.task.fixes == own
    assert last.trial.task.model.hidden > starvation.model.hidden
    assert last.trial.skew.starve == []
    assert last.reference_key is None
    assert last.expected is None


def test_no_cost_trial_without_a_selected_fix(starvation: Scenario) -> None:
    for chosen in (["unfixed"], ["upgrade"], ["identical-batches", "unfixed"]):
        trials = plan(starvation, 2, "cpu", variants=chosen).trials
        assert {p.trial.variant for p in trials} == set(chosen)
    some = plan(starvation, 2, "cpu", variants=["touch", "unfixed"]).trials
    assert [p.trial.variant for p in some] == ["unfixed", "touch", "cost"]
    assert isinstance(some[-1].trial.task, CostTask)
    assert some[-1].trial.task.fixes == ["touch"]


def test_trials_with_the_same_correct_gradients_share_a_reference(
    starvation: Scenario,
) -> None:
    key = {p.trial.variant: p.reference_key for p in plan(starvation, 2, "cpu").trials}
    assert key["unfixed"] == key["zero-fill"] == key["dense-experts"]
    # Other data, releases and models have other correct gradients.
    others = ["identical-sampler", "upgrade", "identical-batches", "starved-everywhere"]
    assert len({key[name] for name in ["unfixed", *others, "fused-family"]}) == 6
    wrappers = plan(load(find("expert-starvation-wrappers")), 2, "cpu").trials
    assert (
        len({p.reference_key for p in wrappers if p.trial.variant in ("fsdp2", "fsdp1", "ddp")})
        == 1
    )


@given(st.sampled_from(["seed", "steps", "batch", "seq_len", "accumulate", "lr", "clip"]))
def test_the_reference_depends_on_the_step(field: str) -> None:
    trial = Trial(name="t", scenario="s", variant="v")
    other = dataclasses.replace(trial, step=dataclasses.replace(trial.step, **{field: 7}))
    assert reference_key(trial, {}) != reference_key(other, {})


def test_the_reference_does_not_depend_on_fix_sharding_or_checkpointing() -> None:
    trial = Trial(name="t", scenario="s", variant="v")
    other = dataclasses.replace(
        trial,
        fix="touch",
        wrapper=dataclasses.replace(trial.wrapper, kind="ddp"),
        step=dataclasses.replace(trial.step, checkpointing="reentrant"),
    )
    assert reference_key(trial, {}) == reference_key(other, {})
    assert reference_key(trial, {}) != reference_key(trial, {"transformers": "5.0.0"})
    wider = dataclasses.replace(trial, world_size=4)
    assert reference_key(trial, {}) != reference_key(wider, {})


def test_bf16_and_fp32_never_share_a_reference() -> None:
    """The reference measures what rounding to bf16 does to each gradient, so a bf16 trial
    compared with the reference of an fp32 trial would have no tolerance for its rounding."""
    fp32 = Trial(name="t", scenario="s", variant="v")
    assert fp32.computes_in == "float32"
    mixed = dataclasses.replace(
        fp32, wrapper=dataclasses.replace(fp32.wrapper, param_dtype="bfloat16")
    )
    whole = dataclasses.replace(fp32, model=dataclasses.replace(fp32.model, dtype="bfloat16"))
    keys = {reference_key(trial, {}) for trial in (fp32, mixed, whole)}
    assert len(keys) == 3


def test_variants_with_different_compute_dtypes_have_separate_references() -> None:
    scenario = load(
        find("expert-starvation"),
        ["variants.zero-fill.wrapper={param_dtype: bfloat16}"],
    )
    key = {p.trial.variant: p.reference_key for p in plan(scenario, 2, "cpu").trials}
    assert key["zero-fill"] not in (None, key["unfixed"])
    assert key["unfixed"] == key["dense-experts"]


def test_batches_shared_within_a_replica_have_one_reference_per_layout() -> None:
    """Which ranks share a batch follows from the layout, so the same world has other data."""
    shared = dataclasses.replace(
        Trial(name="t", scenario="s", variant="v", world_size=4),
        skew=dataclasses.replace(
            Trial(name="t", scenario="s", variant="v").skew, batches="per-replica"
        ),
    )
    layouts = [{"dp_shard": 4}, {"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "tp": 2}, {"tp": 4}]
    keys = {reference_key(dataclasses.replace(shared, layout=of), {}) for of in layouts}
    assert len(keys) == len(layouts)


@pytest.mark.parametrize("batches", ["distinct", "identical", "one-token"])
def test_other_batches_have_the_same_reference_under_every_layout(batches: str) -> None:
    plain = Trial(name="t", scenario="s", variant="v", world_size=4)
    trial = dataclasses.replace(plain, skew=dataclasses.replace(plain.skew, batches=batches))
    keys = {
        reference_key(dataclasses.replace(trial, layout=of), {})
        for of in ({"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2})
    }
    assert len(keys) == 1


def test_a_rank_pattern_applies_to_every_rank() -> None:
    silent = load(find("expert-starvation-silent"))
    trial = plan(silent, 4, "cpu").trials[0].trial
    assert {(s.rank, s.expert) for s in trial.skew.starve} == {(0, 3), (2, 3), (1, 5), (3, 5)}


def test_a_variant_overrides_resume_field_by_field() -> None:
    planned = {p.trial.variant: p for p in plan(load(find("ep-resume")), 2, "cpu").trials}
    assert planned["unfixed"].trial.task == ResumeTask("dcp", 2)
    assert planned["accelerate-full"].trial.task == ResumeTask("accelerate", 2, "full")
    # Saving does not change the correct gradients.
    same = (planned["unfixed"], planned["accelerate-full"], planned["save-pretrained"])
    assert len({p.reference_key for p in same}) == 1


def test_the_layout_after_loading_is_resolved() -> None:
    planned = {p.trial.variant: p for p in plan(load(find("checkpoint-reshard")), 8, "cpu").trials}
    native = planned["native"].trial
    assert native.layout == {"dp_shard": 8}
    assert native.task == ResumeTask("dcp", 2, layout={"dp_shard": 4, "ep": 2})


def test_nothing_is_saved_without_a_resume_section(starvation: Scenario) -> None:
    assert {p.trial.task.kind for p in plan(starvation, 2, "cpu").trials} == {"step", "cost"}


def test_repeats_have_separate_names(starvation: Scenario) -> None:
    trials = plan(starvation, 2, "cpu", variants=["unfixed"], repeat=3).trials
    assert [p.trial.name for p in trials] == ["unfixed", "unfixed.2", "unfixed.3"]
    assert [p.repeat for p in trials] == [0, 1, 2]
    assert len({p.reference_key for p in trials}) == 1


def test_stack_overrides_leave_a_variants_own_version(starvation: Scenario) -> None:
    made = plan(
        starvation, 2, "cpu", stack_overrides={"transformers": "4.57.6", "accelerate": "1.14"}
    )
    stacks = {p.trial.variant: p.stack for p in made.trials}
    assert stacks["unfixed"] == {"transformers": "4.57.6", "accelerate": "1.14"}
    assert stacks["upgrade"] == {"transformers": "5.0.0", "accelerate": "1.14"}
    assert stacks["cost"] == stacks["unfixed"]
    assert made.scenario.stack["transformers"] == "4.57.6"


def test_the_plan_keeps_the_overrides_as_typed() -> None:
    scenario = load(find("expert-starvation"), ["model.experts=16"])
    made = plan(scenario, 2, "cpu", stack_overrides={"transformers": "4.57.6"})
    assert made.overrides == ("--set model.experts=16", "--stack transformers=4.57.6")


def test_launcher_timeout_and_requirements_are_planned() -> None:
    wrappers = load(find("expert-starvation-wrappers"))
    made = plan(wrappers, 2, "cpu", launcher="torchrun", timeout=7.5)
    assert {(p.trial.launcher, p.trial.timeout) for p in made.trials} == {("torchrun", 7.5)}
    assert next(p for p in made.trials if p.trial.variant == "zero2").requires == ("deepspeed",)
    note = next(
        p.note
        for p in plan(load(find("expert-starvation")), 2, "cpu").trials
        if p.trial.variant == "identical-sampler"
    )
    assert note is not None
    assert "wrong batch" in note


@pytest.mark.parametrize(
    ("ranks", "options", "error", "parts"),
    [
        (1, {}, LayoutError, ["runs on 2 or more ranks, not on 1"]),
        (0, {}, LayoutError, ["not on 0"]),
        (2, {"variants": ["unfixd"]}, UsageError, ["--variant unfixd", 'did you mean "unfixed"?']),
        (2, {"repeat": 0}, UsageError, ["--repeat 0"]),
    ],
)
def test_an_impossible_plan_is_refused(
    starvation: Scenario, ranks: int, options: dict[str, object], error: type[MoediagError],
    parts: list[str],
) -> None:  # fmt: skip
    with pytest.raises(error) as caught:
        plan(starvation, ranks, "cpu", **options)  # type: ignore[arg-type]
    for part in parts:
        assert part in caught.value.message


def test_a_missing_rank_is_refused() -> None:
    scenario = load(find("expert-starvation"), ["skew.starve[0].rank=2"])
    with pytest.raises(
        ScenarioError, match=r"skew\.starve\[0\]\.rank: there is no rank 2 among 2"
    ) as caught:
        plan(scenario, 2, "cpu")
    assert caught.value.help_text == (
        "Use more ranks with --cpu or --gpus, or another rank with --set."
    )


def test_an_unknown_device_is_refused_with_the_known_ones(starvation: Scenario) -> None:
    with pytest.raises(UsageError) as caught:
        plan(starvation, 2, "tpu")
    assert caught.value.message.startswith("device 'tpu': one of cpu, gpu, ")


def test_share_gpu_is_kept_as_an_override(starvation: Scenario) -> None:
    assert plan(starvation, 2, "shared-gpu").overrides == ("--share-gpu",)
    assert plan(starvation, 2, "gpu").overrides == ()


def test_ranks_on_gpus_get_their_environment(starvation: Scenario) -> None:
    (one,) = plan(starvation, 2, "gpu", variants=["unfixed"], timeout=77.0).trials
    expected = devices.environment(devices.DEVICES["gpu"], 77.0)
    assert one.trial.environment == expected and expected


def test_the_number_of_ranks_is_limited() -> None:
    scenario = load(
        find("expert-starvation"), ["world={default: 4, min: 2, max: 8, multiple_of: 2}"]
    )
    assert plan(scenario, None, "cpu").trials[0].trial.world_size == 4
    for ranks in (3, 10):
        with pytest.raises(LayoutError, match="2 to 8 ranks, in multiples of 2"):
            plan(scenario, ranks, "cpu")


def test_a_layout_that_does_not_fit_is_refused_with_every_factor() -> None:
    scenario = load(find("expert-starvation"), ["layout={dp_replicate: 2, dp_shard: world}"])
    assert plan(scenario, 4, "cpu").trials[0].trial.layout == {"dp_replicate": 2, "dp_shard": 2}
    with pytest.raises(LayoutError, match="dp_replicate=2 x dp_shard=world: 3 ranks"):
        plan(scenario, 3, "cpu")


def asked(config: dict[str, object] | None, ranks: int = 4) -> dict[str, object] | None:
    """The planned distributed_config with an ep axis of 2."""
    overwrite = load(find("ep-overwrite"))
    wrapper = overwrite.wrapper.model_copy(update={"distributed_config": config})
    layout = {"dp_shard": "world", "ep": 2}
    changed = overwrite.model_copy(update={"wrapper": wrapper, "layout": layout})
    return plan(changed, ranks, "cpu").trials[0].trial.wrapper.distributed_config


def test_axis_names_are_replaced_by_sizes_in_a_distributed_config() -> None:
    assert asked(None) is None
    assert asked({}) == {}
    assert asked({"fsdp_size": "dp_shard", "ep_size": "ep", "tp_size": "tp"}) == {
        "fsdp_size": 2, "ep_size": 2, "tp_size": 1,
    }  # fmt: skip
    assert asked({"fsdp_size": "world", "ep_size": "ep"}, 8) == {"fsdp_size": 8, "ep_size": 2}
    # Other values are unchanged.
    other = {"tp_plan": "auto", "ep_plan": {"a": "ep"}, "ep_size": 3, "flag": True, "none": None}
    assert asked(dict(other)) == other
