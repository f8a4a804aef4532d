"""What does not change the answer of a scenario on real releases: the launcher, a loaded machine;
and what does: the model's family. `test_catalogue.py` has the answers.

Two gloo ranks on the CPU. The environments come from the cache, or from the index once.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.e2e.pipeline import Command, Ran, need
from tests.e2e.result_shape import problems

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

MISMATCH, WRONG, CLEAN, HANG, CRASH = (
    "collective-mismatch", "wrong-gradients", "clean", "hang", "crash",
)  # fmt: skip
NOTHING = {"culprits": [], "victims": [], "first_divergence": None, "wrong_parameters": []}


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


@pytest.mark.wide  # test_launch.py has torchrun's launcher
@pytest.mark.parametrize(
    "name", ["expert-starvation-silent", "expert-starvation", "expert-starvation-hang"]
)
def test_torchrun_gives_the_same_verdicts_as_the_fork_launcher(command: Command, name: str) -> None:
    need({"transformers": "4.53.2"})
    real = command.run(name, "--variant", "unfixed", "--launcher", "torchrun")
    forked = command.run(name, "--variant", "unfixed")
    assert problems(real.result) == problems(forked.result) == []
    assert real.code == forked.code == 0
    mine, other = real.trial("unfixed"), forked.trial("unfixed")
    assert (mine["launcher"], other["launcher"]) == ("torchrun", "fork")
    for key in ("verdict", "signature", "confidence", "culprits", "victims", "cause",
                "first_divergence", "wrong_parameters", "gradient_error"):  # fmt: skip
        assert mine[key] == other[key], key


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
