"""Honest verdicts on real ranks: what a run may and may not conclude."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.pipeline import Command, Ran, need
from tests.e2e.result_shape import problems

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

HEAD = """\
schema_version: 1
name: {name}
title: A scenario of a test
description: One rank routes no token to one expert.
stack: {{transformers: "{release}"}}
layout: {{dp_shard: world}}
skew:
  starve: {starve}
variants:
"""
STARVED = "[{rank: 1, layer: 1, expert: 3}]"
UNFIXED = "  unfixed:\n    role: unfixed\n    expect: {verdict: VERDICT}\n"
FLAG = """\
  unused-params-flag:
    role: fix
    fix: set-reduce-scatter-unused-params
    expect: {verdict: clean}
"""
HEALTHY = """\
  natural-routing:
    role: control
    skew: {starve: []}
    expect: {verdict: clean}
"""


@pytest.fixture(autouse=True)
def needed() -> None:
    need({"transformers": "4.53.2"})


def scenario(folder: Path, *variants: str, starve: str = STARVED, release: str = "4.53.2") -> str:
    path = folder / "of-a-test.yaml"
    head = HEAD.format(name="of-a-test", release=release, starve=starve)
    path.write_text(head + "".join(variants))
    return str(path)


def unfixed(verdict: str, culprits: str = "") -> str:
    more = f", culprits: {culprits}" if culprits else ""
    return UNFIXED.replace("VERDICT", verdict + more)


def shown(command: Command, ran: Ran) -> str:
    """Returns the page on one line."""
    code, out, _ = command.call("report", str(ran.folder))
    assert code == 0
    return " ".join(out.split())


def test_a_failure_with_healthy_controls_is_reproduced(command: Command, tmp_path: Path) -> None:
    path = scenario(tmp_path, unfixed("collective-mismatch", "[1]"), FLAG, HEALTHY)
    ran = command.run(path)
    assert problems(ran.result) == []
    assert (ran.code, ran.reproduced) == (0, True)
    assert ran.fixes == {"unused-params-flag": True}
    assert ran.result["conclusion"]["cheapest_correct_fix"] is None
    assert "correct fix, not timed: unused-params-flag" in shown(command, ran)
    assert "reproduced" in shown(command, ran)
    assert "not reproduced" not in shown(command, ran)


def test_a_control_that_fails_makes_the_comparison_inconclusive(
    command: Command, tmp_path: Path
) -> None:
    starving = HEALTHY.replace("natural-routing", "starving").replace(
        "{starve: []}", "{starve: [{rank: 0, layer: 0, expert: 2}]}"
    )
    path = scenario(tmp_path, unfixed("collective-mismatch", "[1]"), FLAG, HEALTHY, starving)
    ran = command.run(path)
    assert problems(ran.result) == []
    # Everything else is as expected, but proves nothing.
    assert ran.trial("unfixed")["met"] and ran.trial("unused-params-flag")["met"]
    assert ran.trial("starving")["verdict"] == "collective-mismatch"
    assert ran.trial("starving")["culprits"] == [0]
    assert ran.trial("starving")["met"] is False
    assert ran.code == 3
    assert ran.result["conclusion"] == {
        "reproduced": None, "fixes": [], "cheapest_correct_fix": None, "claims": [],
    }  # fmt: skip
    assert "inconclusive" in shown(command, ran)


@pytest.mark.parametrize(
    ("starve", "release"),
    [
        pytest.param("[]", "4.53.2", id="no cause"),
        pytest.param(STARVED, "5.0.0", id="repaired", marks=pytest.mark.wide),
    ],
)
def test_a_false_claim_is_reported_as_not_reproduced(
    command: Command, tmp_path: Path, starve: str, release: str
) -> None:
    need({"transformers": release})
    path = scenario(
        tmp_path, unfixed("collective-mismatch", "[1]"), HEALTHY, starve=starve, release=release
    )
    ran = command.run(path)
    assert problems(ran.result) == []
    trial = ran.trial("unfixed")
    assert (trial["verdict"], trial["expected"], trial["met"]) == (
        "clean", "collective-mismatch", False,
    )  # fmt: skip
    assert (ran.code, ran.reproduced) == (1, False)
    page = shown(command, ran)
    assert "not reproduced" in page
    # With the numbers.
    assert f"{trial['parameters_compared']} gradients match the reference" in page


@pytest.mark.wide
@pytest.mark.parametrize("looked_for", ["hang", "wrong-gradients"])
def test_another_failure_never_counts_as_the_expected_one(
    command: Command, tmp_path: Path, looked_for: str
) -> None:
    ran = command.run(scenario(tmp_path, unfixed(looked_for), HEALTHY))
    trial = ran.trial("unfixed")
    assert (trial["verdict"], trial["met"]) == ("collective-mismatch", False)
    assert (ran.code, ran.reproduced) == (1, False)
    assert "not reproduced" in shown(command, ran)


@pytest.mark.wide
def test_the_expected_failure_with_other_culprits_is_not_met(
    command: Command, tmp_path: Path
) -> None:
    ran = command.run(scenario(tmp_path, unfixed("collective-mismatch", "[0]"), HEALTHY))
    assert ran.trial("unfixed")["culprits"] == [1]
    assert (ran.code, ran.reproduced) == (1, False)


@pytest.mark.wide
def test_clean_controls_alone_do_not_decide_the_claim(command: Command) -> None:
    controls = ("identical-batches", "starved-everywhere", "loops-over-all", "fused-family")
    ran = command.run("expert-starvation", variants=controls)
    assert problems(ran.result) == []
    assert ran.verdicts == dict.fromkeys(controls, "clean")
    assert all(trial["gradient_error"] < 1e-6 for trial in ran.result["trials"])
    assert ran.code == 0
    assert ran.result["conclusion"] == {
        "reproduced": None, "fixes": [], "cheapest_correct_fix": None, "claims": [],
    }  # fmt: skip
    assert "not reproduced" not in shown(command, ran)


def test_a_missing_release_is_an_error(command: Command) -> None:
    code, out, err = command.call(
        "run", "expert-starvation", "--stack", "transformers=4.53.99", "--variant", "unfixed",
        "--out", str(command.folder / "no-such-release"),
    )  # fmt: skip
    assert (code, out) == (2, "") or code == 4  # 4: no index could be asked
    assert "4.53.99" in err
