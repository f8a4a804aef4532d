"""The one-process prediction: whether ranks would disagree."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
# The release that the development environment pins; from 5.0 on no family is affected.
if not transformers.__version__.startswith("4.53."):
    pytest.skip("needs transformers 4.53", allow_module_level=True)

from moediag.lab.campaign.matrix.cells import of_susceptibility  # noqa: E402
from moediag.lab.ranks import rank  # noqa: E402
from moediag.lab.step.tasks import susceptibility  # noqa: E402
from moediag.protocol import (  # noqa: E402
    ModelSpec,
    SkewSpec,
    Starve,
    StepSpec,
    Susceptibility,
    SusceptibilityTask,
    Trial,
)

DIVERGENT = SkewSpec([Starve(3, rank=1, layer=1)])
MISSING = [f"model.layers.1.mlp.experts.3.{n}_proj.weight" for n in ("gate", "up", "down")]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trial(skew: SkewSpec = DIVERGENT, family: str = "qwen3_moe", **step: Any) -> Trial:
    spec = StepSpec(**{"steps": 1, **step})
    return Trial("t", "s", "v", task=SusceptibilityTask(), step=spec, skew=skew,
                 model=ModelSpec(family=family))  # fmt: skip


def shows(found: Susceptibility) -> bool | None:
    return of_susceptibility("s f", "1.0", found, 0.1, "", "").shows


def test_a_starved_expert_is_predicted_with_its_parameters() -> None:
    found = susceptibility.run(trial())
    ((first, second),) = found.missing
    assert (sorted(set(second) - set(first)), set(first) - set(second)) == (sorted(MISSING), set())
    cell = of_susceptibility("s f", "4.53.2", found, 0.1, "", "")
    assert (cell.verdict, cell.shows, cell.mark) == ("susceptible", True, "(x)")
    assert "rank 1 model.layers.1.mlp.experts.3.{gate,up,down}_proj.weight" in cell.text


@pytest.mark.parametrize(
    ("skew", "expected"),
    [
        (SkewSpec([Starve(3, layer=1)]), False),  # on all ranks alike
        (SkewSpec([Starve(3, rank=0, layer=1), Starve(5, rank=1, layer=1)]), True),  # swapped
        (SkewSpec(batches="one-token"), True),
        (SkewSpec(batches="identical"), False),
    ],
    ids=["everywhere", "swapped", "one-token", "identical"],
)
def test_only_differences_between_ranks_count(skew: SkewSpec, expected: bool) -> None:
    assert shows(susceptibility.run(trial(skew))) is expected


@pytest.mark.parametrize("family", ["olmoe", "llama4"])
def test_a_family_that_runs_every_expert_is_not_susceptible(family: str) -> None:
    assert shows(susceptibility.run(trial(family=family))) is False


def test_a_later_skew_is_found_in_its_step() -> None:
    late = SkewSpec([dataclasses.replace(DIVERGENT.starve[0], from_step=2)])
    assert shows(susceptibility.run(trial(late))) is False
    found = susceptibility.run(trial(late, steps=2))
    assert shows(found) is True
    assert "step 2" in of_susceptibility("s f", "1.0", found, 0.1, "", "").text


def test_a_nonfinite_loss_is_another_failure() -> None:
    spoilt = Susceptibility([[[], []]], finite=False)
    cell = of_susceptibility("s f", "4.51.0", spoilt, 0.1, "", "")
    assert (cell.verdict, cell.shows) == ("nonfinite", None)


def test_a_family_missing_in_the_release_is_not_applicable(tmp_path: Path) -> None:
    trial(family="qwen3_omni_moe").write(tmp_path)
    rank.main(str(tmp_path / "trial.json"))
    found = Susceptibility.read(tmp_path)
    assert "has no qwen3_omni_moe" in str(found.applicable)
    assert of_susceptibility("s f", "4.53.2", found, 0.1, "", "").verdict == "not-applicable"
