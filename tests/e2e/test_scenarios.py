"""Every scenario of the catalogue through the whole pipeline, on real releases: failures are named,
healthy variants are clean, and each fix is judged by its gradients.

Two gloo ranks on the CPU. The environments come from the cache, or from the index once.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.e2e.pipeline import FEW_IN_CI, Command, Ran, need
from tests.e2e.result_shape import problems

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

MISMATCH, WRONG, CLEAN, HANG, CRASH = (
    "collective-mismatch", "wrong-gradients", "clean", "hang", "crash",
)  # fmt: skip
NOTHING = {"culprits": [], "victims": [], "first_divergence": None, "wrong_parameters": []}


def expert(layer: int, number: int) -> list[str]:
    prefix = f"model.layers.{layer}.mlp.experts.{number}"
    return [f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")]


def holds(ran: Ran) -> None:
    """Checks what holds for every run whose expectations are all met."""
    assert problems(ran.result) == []
    assert all(trial["met"] for trial in ran.result["trials"]), ran.verdicts
    assert ran.code == 0
    for trial in ran.result["trials"]:
        if trial["verdict"] == CLEAN:
            assert {name: trial[name] for name in NOTHING} == NOTHING, trial["variant"]
            assert trial["parameters_compared"] > 0
            assert trial["gradient_error"] is not None


class TestExpertStarvation:
    """CI runs the whole scenario too, by `make run`."""

    @pytest.fixture(params=FEW_IN_CI)
    def ran(self, command: Command, request: pytest.FixtureRequest) -> Ran:
        need({"transformers": "4.53.2"})
        few = ("unfixed", "touch", "identical-sampler", "identical-batches")
        if request.param == "few":
            return command.run("expert-starvation", "--set", "cost=null", variants=few)
        need({"transformers": "5.0.0"})
        return command.run("expert-starvation", "--set", "cost=null")

    def test_the_expectations_are_met_and_the_file_is_as_specified(self, ran: Ran) -> None:
        holds(ran)
        assert ran.reproduced is True
        assert ran.result["scenario"] == "expert-starvation"
        assert ran.result["overrides"] == ["--set cost=null"]

    def test_the_unfixed_code_is_diagnosed(self, ran: Ran) -> None:
        trial = ran.trial("unfixed")
        assert trial["verdict"] == MISMATCH
        assert (trial["culprits"], trial["victims"]) == ([1], [0])
        assert trial["confidence"] == "high"
        assert trial["stack"]["transformers"] == "4.53.2"
        divergence = trial["first_divergence"]
        place = [divergence[name] for name in ("index", "axis", "phase", "module")]
        assert place == [6, "dp_shard", "backward", "model.layers.1"]
        assert ran.sides("unfixed") == {
            "0": ("reduce_scatter", 15_696, []),
            "1": ("reduce_scatter", 14_160, expert(1, 3)),
        }
        assert "on rank 1 expert 3 of layer 1 received 0 tokens" in trial["cause"].lower()
        assert "3 of 33 parameters, 1,536 elements fewer" in trial["cause"]
        assert (trial["launcher"], trial["backend"]) == ("fork", "gloo")

    def test_every_fix_is_judged_and_the_wrong_batch_is_noted(self, ran: Ran) -> None:
        assert set(ran.fixes.values()) == {True} and len(ran.fixes) in (2, 7)
        sampler = ran.trial("identical-sampler")
        assert sampler["other_batch"] is True
        assert "wrong batch" in sampler["notes"][0]
        assert not any(ran.trial(name)["other_batch"] for name in ("unfixed", "touch"))
        assert ran.trial("touch")["parameters_compared"] == 69
        if "upgrade" in ran.verdicts:
            upgraded = ran.trial("upgrade")
            assert upgraded["stack"]["transformers"] == "5.0.0" and not upgraded["other_batch"]
            # One 3-D parameter instead of 24 matrices in each of two layers.
            assert upgraded["parameters_compared"] < 69

    def test_the_controls_are_clean(self, ran: Ran) -> None:
        controls = {
            t["variant"]: t["verdict"] for t in ran.result["trials"] if t["role"] == "control"
        }
        assert set(controls.values()) == {CLEAN} and len(controls) in (1, 4)

    def test_without_step_times_no_fix_is_called_cheapest(self, ran: Ran) -> None:
        assert ran.result["conclusion"]["cheapest_correct_fix"] is None
        assert {t["step_time_ratio"] for t in ran.result["trials"]} == {None}

    def test_stored_evidence_gives_the_same_diagnosis(self, ran: Ran, command: Command) -> None:
        again = ran.folder / "unfixed"
        code, out, _ = command.call("diagnose", str(again), "--json")
        assert code == 1, "diagnose: a failure found"
        (trial,) = json.loads(out)["trials"]
        for name in ("verdict", "culprits", "signature", "cause", "first_divergence"):
            assert trial[name] == ran.trial("unfixed")[name], name
        code, *_ = command.call("diagnose", str(ran.folder / "touch"), "--json")
        assert code == 0


def test_costs_are_ratios_with_spreads_and_a_step_equals_itself(command: Command) -> None:
    need({"transformers": "4.53.2"})
    tiny = "{hidden: 32, intermediate: 16, layers: 1, experts: 8, heads: 2, kv_heads: 2}"
    ran = command.run(
        "expert-starvation", "--set", "cost.rounds=5", "--set", "cost.seq_len=64",
        "--set", f"cost.model={tiny}",
        variants=("unfixed", "dense-experts", "identical-batches"),
    )  # fmt: skip
    holds(ran)
    timed = {
        t["variant"]: (t["step_time_ratio"], t["step_time_spread"]) for t in ran.result["trials"]
    }
    assert timed.pop("identical-batches") == (None, None), "a control has no cost"
    assert set(timed) == {"unfixed", "dense-experts"}
    for variant, (ratio, (low, high)) in timed.items():
        assert low <= ratio <= high or variant == "unfixed"
        assert 0 < low <= high
    # The unfixed step against a second timing of itself: no difference, only its noise.
    assert timed["unfixed"][0] == 1.0
    assert {f["variant"]: f["step_time_ratio"] for f in ran.result["conclusion"]["fixes"]} == {
        "dense-experts": timed["dense-experts"][0]
    }
    assert ran.result["conclusion"]["cheapest_correct_fix"] in ran.fixes
    assert all(t["variant"] != "cost" for t in ran.result["trials"])


class TestSilent:
    @pytest.fixture
    def ran(self, command: Command) -> Ran:
        need({"transformers": "4.53.2"})
        return command.run("expert-starvation-silent")

    def test_no_rank_reports_an_error_yet_the_gradients_are_wrong(self, ran: Ran) -> None:
        holds(ran)
        trial = ran.trial("unfixed")
        assert trial["verdict"] == WRONG
        # Both ranks finished normally.
        launch = json.loads((ran.folder / "unfixed" / "launch.json").read_text())
        assert [status["code"] for _, status in sorted(launch["exits"].items())] == [0, 0]
        assert list((ran.folder / "unfixed").glob("*.error.json")) == []

    def test_the_parameters_and_both_ranks_are_reported(self, ran: Ran) -> None:
        trial = ran.trial("unfixed")
        assert ran.sides("unfixed") == {
            "0": ("reduce_scatter", 14_160, expert(1, 3)),
            "1": ("reduce_scatter", 14_160, expert(1, 5)),
        }
        assert (trial["culprits"], trial["victims"]) == ([0, 1], [])
        assert sorted(trial["wrong_parameters"]) == sorted(
            expert(1, 3) + expert(1, 4) + expert(1, 5)
        )
        assert trial["worst_parameter"] in trial["wrong_parameters"]
        assert trial["gradient_error"] > 1e-4
        for text in ("on rank 0 expert 3 of layer 1", "on rank 1 expert 5 of layer 1",
                     "9 of 69 parameters"):  # fmt: skip
            assert text in trial["cause"].replace("On rank", "on rank")

    def test_the_fixes_are_correct_within_rounding(self, ran: Ran) -> None:
        assert ran.fixes == {"unused-params-flag": True, "iterate-all": True}
        for variant in (*ran.fixes, "natural-routing"):
            assert ran.trial(variant)["gradient_error"] < 1e-6


@pytest.mark.parametrize("variants", FEW_IN_CI)
def test_data_alone_starves_experts_without_a_patch(command: Command, variants: str) -> None:
    need({"transformers": "4.53.2"})
    few = ("unfixed", "unused-params-flag", "distinct-batches")
    if variants == "all":
        need({"transformers": "5.0.0"})
    ran = command.run("expert-starvation-data", variants=few if variants == "few" else ())
    holds(ran)
    trial = ran.trial("unfixed")
    assert trial["verdict"] == WRONG
    assert trial["culprits"] == [0, 1]
    (op, numel, first), (_, same, second) = ran.sides("unfixed").values()
    assert (op, numel) == ("reduce_scatter", same)
    assert first and second and not set(first) & set(second)
    # Each rank fills its two hit experts' slots with the other rank's two.
    assert set(first) | set(second) <= set(trial["wrong_parameters"])
    assert set(ran.fixes.values()) == {True} and len(ran.fixes) in (1, 3)
    assert ran.verdicts["distinct-batches"] == CLEAN


class TestHang:
    @pytest.fixture(params=FEW_IN_CI)
    def ran(self, command: Command, request: pytest.FixtureRequest) -> Ran:
        need({"transformers": "4.53.2"})
        few = ("unfixed", "unused-params-flag", "natural-routing")
        variants = few if request.param == "few" else ()
        return command.run("expert-starvation-hang", variants=variants)

    def test_the_stacks_show_where_the_ranks_wait(self, ran: Ran) -> None:
        holds(ran)
        trial = ran.trial("unfixed")
        assert (trial["verdict"], trial["culprits"], trial["victims"]) == (HANG, [1], [0])
        assert trial["seconds"]["stall_to_verdict"] > 0
        assert set(trial["stacks"]) == {"0", "1"}
        waits = {rank: "\n".join(frames) for rank, frames in trial["stacks"].items()}
        assert "all_gather" in waits["0"] and "pre_forward" in waits["0"]
        assert "reduce_scatter" in waits["1"] and "post_backward" in waits["1"]

    def test_the_cause_is_the_divergence_and_not_the_final_call(self, ran: Ran) -> None:
        trial = ran.trial("unfixed")
        divergence = trial["first_divergence"]
        assert (divergence["phase"], divergence["axis"]) == ("forward", "dp_shard")
        assert divergence["module"] == "model.layers.0.mlp.experts.3"
        assert ran.sides("unfixed") == {
            "0": ("all_gather", 1_536, []),
            "1": ("all_gather", 1_536, expert(0, 3)),
        }
        assert "stopped where rank 0 is in all_gather" in trial["cause"]

    def test_the_flag_is_wrong_and_another_fix_is_correct(self, ran: Ran) -> None:
        right = {"unused-params-flag": False, "zero-fill": False, "iterate-all": True}
        assert ran.fixes == {name: right[name] for name in ran.fixes} and ran.fixes
        assert ran.verdicts["unused-params-flag"] == HANG
        assert ran.result["conclusion"]["cheapest_correct_fix"] is None  # it was not timed
        assert ran.verdicts["natural-routing"] == CLEAN


@pytest.mark.wide  # test_nightly.py runs it on two releases
def test_two_healthy_steps_do_not_hide_the_failure(command: Command) -> None:
    need({"transformers": "4.53.2"})
    ran = command.run("expert-starvation-late")
    holds(ran)
    assert ran.verdicts == {
        "unfixed": MISMATCH, "unused-params-flag": CLEAN, "first-two-steps": CLEAN,
    }  # fmt: skip
    trial = ran.trial("unfixed")
    assert trial["cause"].startswith("In step 3: on rank 1 expert 3 of layer 1")
    assert [side[1] for side in ran.sides("unfixed").values()] == [15_696, 14_160]
    # Two complete steps of ten operations each precede it.
    assert trial["first_divergence"]["index"] > 20


@pytest.mark.wide
def test_a_fix_that_breaks_a_working_run_is_a_regression(command: Command) -> None:
    need({"transformers": "4.53.2"})
    ran = command.run("expert-starvation-accumulate")
    holds(ran)
    assert ran.trial("unfixed")["culprits"] == [1]
    assert [side[1] for side in ran.sides("unfixed").values()] == [15_696, 14_160]
    broken = ran.trial("unused-params-flag-starved-everywhere")
    assert broken["verdict"] == CRASH
    assert "uniform gradient dtype" in broken["cause"]
    assert broken["notes"] == [
        "regresses: the same run without this fix is clean (starved-everywhere)"
    ]
    # The same crash where the unfixed run fails too is a wrong fix, but breaks nothing.
    assert ran.verdicts["unused-params-flag"] == CRASH
    assert ran.trial("unused-params-flag")["notes"] == []
    assert ran.fixes == {
        "unused-params-flag": False, "unused-params-flag-starved-everywhere": False,
        "zero-fill": True, "iterate-all": True,
    }  # fmt: skip
    assert ran.verdicts["starved-everywhere"] == CLEAN


@pytest.mark.parametrize("variants", FEW_IN_CI)
def test_failing_and_working_wrappers(command: Command, variants: str) -> None:
    need({"transformers": "4.53.2"})
    ends = {"fsdp2": MISMATCH, "ddp": CLEAN, "ddp-without-find-unused": CRASH}
    if variants == "all":
        ends |= {"fsdp1": CLEAN, "natural-routing": CLEAN}
    ran = command.run("expert-starvation-wrappers", variants=tuple(ends))
    holds(ran)
    assert ran.verdicts == ends
    assert "find_unused_parameters=True" in ran.trial("ddp-without-find-unused")["cause"]
    fixes = {"fsdp1": True, "ddp": True, "ddp-without-find-unused": False}
    assert ran.fixes == {name: ok for name, ok in fixes.items() if name in ends}


@pytest.mark.wide
def test_zero_2_fails_like_fsdp2_and_zero_3_works(command: Command) -> None:
    need({"transformers": "4.53.2", "deepspeed": "0.19.8"})
    line = ("expert-starvation-wrappers", "--variant", "zero2", "--variant", "zero3")
    ran = command.run(*line)
    trial = ran.trial("zero2")
    if trial["verdict"] == "not-applicable":
        pytest.skip(f"DeepSpeed cannot be installed here: {trial['cause']}")
    assert problems(ran.result) == []
    assert trial["verdict"] == MISMATCH
    assert {side[0] for side in ran.sides("zero2").values()} == {"all_reduce"}
    sizes = [side[1] for side in ran.sides("zero2").values()]
    assert sizes[0] - sizes[1] == 1_536, "one expert is missing from what rank 1 reduces"
    assert ran.verdicts["zero3"] == CLEAN
    assert ran.trial("zero3")["stack"]["deepspeed"] == "0.19.8"
    assert ran.fixes == {"zero2": False, "zero3": True}


class TestTheSameVerdicts:
    """Under torchrun, and with four ranks."""

    @pytest.mark.wide  # test_launch.py has torchrun's launcher
    @pytest.mark.parametrize(
        "name", ["expert-starvation-silent", "expert-starvation", "expert-starvation-hang"]
    )
    def test_torchrun_gives_the_same_verdicts_as_the_fork_launcher(
        self, command: Command, name: str
    ) -> None:
        need({"transformers": "4.53.2"})
        real = command.run(name, "--variant", "unfixed", "--launcher", "torchrun")
        forked = command.run(name)  # the tests above have run it
        assert problems(real.result) == problems(forked.result) == []
        assert real.code == forked.code == 0
        mine, other = real.trial("unfixed"), forked.trial("unfixed")
        assert (mine["launcher"], other["launcher"]) == ("torchrun", "fork")
        for key in ("verdict", "signature", "confidence", "culprits", "victims", "cause",
                    "first_divergence", "wrong_parameters", "gradient_error"):  # fmt: skip
            assert mine[key] == other[key], key

    @pytest.mark.wide  # test_howto.py has four ranks
    def test_one_starving_rank_of_four_is_the_culprit(self, command: Command) -> None:
        need({"transformers": "4.53.2"})
        ran = command.run(
            "expert-starvation", "--cpu", "4", "--set", "cost=null", "--variant", "unfixed",
            "--variant", "unused-params-flag", "--variant", "identical-batches",
        )  # fmt: skip
        holds(ran)
        assert ran.verdicts == {
            "unfixed": MISMATCH, "unused-params-flag": CLEAN, "identical-batches": CLEAN,
        }  # fmt: skip
        trial = ran.trial("unfixed")
        assert (trial["world_size"], trial["culprits"]) == (4, [1])
        assert trial["victims"] == [0, 2, 3]
        assert [side[2] for side in ran.sides("unfixed").values()] == [[], expert(1, 3), [], []]

    @pytest.mark.wide
    def test_four_ranks_are_silently_wrong(self, command: Command) -> None:
        need({"transformers": "4.53.2"})
        ran = command.run("expert-starvation-silent", "--cpu", "4")
        holds(ran)
        assert ran.verdicts["unfixed"] == WRONG
        assert [side[2] for side in ran.sides("unfixed").values()] == [
            expert(1, 3), expert(1, 5), expert(1, 3), expert(1, 5),
        ]  # fmt: skip
        assert ran.verdicts["natural-routing"] == CLEAN


@pytest.mark.wide
def test_a_machine_under_full_load_gives_the_same_verdicts(command: Command) -> None:
    need({"transformers": "4.53.2"})
    calm = [command.run("expert-starvation-hang"), command.run("expert-starvation-silent")]
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        chosen = ("--variant", "unfixed", "--variant", "natural-routing", "--timeout", "110")
        busy = [command.run("expert-starvation-hang", *chosen),
                command.run("expert-starvation-silent", *chosen)]  # fmt: skip
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    for before, loaded in zip(calm, busy, strict=True):
        holds(loaded)
        for variant in ("unfixed", "natural-routing"):
            for key in ("verdict", "signature", "culprits", "victims", "first_divergence"):
                assert loaded.trial(variant)[key] == before.trial(variant)[key], (variant, key)


FAMILIES = [
    ("4.53.2", "mixtral", MISMATCH),
    ("4.53.2", "internvl", MISMATCH),
    ("4.53.2", "olmoe", CLEAN),
    ("4.53.2", "glm4_moe", "not-applicable"),
    # From here on `make wide` runs them.
    ("4.53.2", "qwen2_moe", MISMATCH),
    ("4.53.2", "deepseek_v3", MISMATCH),
    ("4.53.2", "llama4", CLEAN),
    ("4.57.6", "glm4_moe", MISMATCH),
    ("4.57.6", "glm4v_moe", MISMATCH),
    ("4.57.6", "qwen3_omni_moe", MISMATCH),
    ("4.57.6", "gpt_oss", CLEAN),
    ("4.57.6", "qwen3_vl_moe", CLEAN),
]


@pytest.mark.parametrize(
    ("release", "family", "verdict"),
    [*FAMILIES[:4], *(pytest.param(*row, marks=pytest.mark.wide) for row in FAMILIES[4:])],
)
def test_a_family_can_be_chosen_on_the_command_line(
    command: Command, release: str, family: str, verdict: str
) -> None:
    """A family is affected if its block skips experts that are modules."""
    need({"transformers": release})
    ran = command.run(
        "expert-starvation", "--variant", "unfixed", "--set", f"model.family={family}",
        "--stack", f"transformers={release}",
    )  # fmt: skip
    assert problems(ran.result) == []
    trial = ran.trial("unfixed")
    assert trial["verdict"] == verdict
    assert trial["stack"]["transformers"] == release
    assert ran.result["overrides"] == [
        f"--set model.family={family}", f"--stack transformers={release}",
    ]  # fmt: skip
    if verdict == MISMATCH:
        assert (ran.code, ran.reproduced, trial["culprits"]) == (0, True, [1])
        missing = ran.sides("unfixed")["1"][2]
        assert len(missing) == 3
        assert all(".1." in name and ".experts.3." in name for name in missing)
    elif verdict == CLEAN:
        # The claim does not hold here, and the page says so.
        assert (ran.code, ran.reproduced) == (1, False)
        assert trial["parameters_compared"] > 20
    else:
        assert (ran.code, ran.reproduced) == (3, None)
        assert f"transformers {release} has no {family}" in trial["cause"]
