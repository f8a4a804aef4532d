"""`moediag check` against real releases, planted faults and real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moediag.errors import ExitCode
from moediag.evidence.trial_folder import read_trial
from moediag.lab.families import FAMILIES
from moediag.lab.launch.launcher import launcher
from moediag.lab.pipeline import check as checker
from moediag.lab.pipeline import check_cost
from moediag.protocol import Checked, ModelSpec
from tests.e2e.overlay import overlay
from tests.e2e.pipeline import Command, need
from tests.e2e.test_hunt import CONFIGURATION, STACK

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

OLD = {"transformers": "4.53.2"}
PLAN = '"layers.*.mlp.experts": "ep_dispatch_experts",'
# Text of the configuration class, its replacement, the layout, and what the page must name.
FAULTS = {
    "a rule of the ep plan names nothing": (
        '"layers.*.mlp.experts.down_proj": "grouped_gemm"',
        '"layers.*.mlp.expertz.down_proj": "grouped_gemm"', "dp_shard=2,ep=2", "expertz",
    ),
    "the tp plan leaves out the layers": (
        '"layers.*.', '"stages.*.', "tp=2", "no parameter of a layer is divided over tp=2",
    ),
    "an unknown style": (
        '"layers.*.mlp.experts.down_proj": "grouped_gemm"',
        '"layers.*.mlp.experts.down_proj": "grouped"', "dp_shard=2,ep=2", "Unsupported",
    ),
}  # fmt: skip


def written(folder: Path, **changes: Any) -> str:
    """Writes the config.json of the catalogue's tiny model."""
    fields = FAMILIES["qwen3_moe"].build(ModelSpec())
    folder.mkdir()
    config = {"model_type": "qwen3_moe", **fields, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_starvation_is_predicted_with_call_and_parameters(command: Command, tmp_path: Path) -> None:
    need(OLD)
    words = ["check", written(tmp_path / "model"), "--layout", "dp_shard=512", "--json"]
    words += ["--card", "80", "--length", "64"]
    words += ["--stack", "transformers=4.53.2", "--out", str(tmp_path / "out")]
    code, stdout, _ = command.call(*words)
    found = json.loads(stdout)
    assert code == ExitCode.FAILURE_FOUND, found["not_seen"]
    assert found["fits"] == "FITS" and found["fit"]["measured"], found["not_seen"]
    cases = {case["name"]: case for case in found["cases"]}
    assert not cases["control"]["parts"]
    idle = cases["idle-experts"]["first_divergence"]
    assert idle["axis"] == "dp_shard" and idle["module"] == "model.layers.1"
    skewed = idle["ranks"]["1"]
    assert skewed["op"] == "reduce_scatter"
    assert all(".experts.1." in n or ".experts.3." in n for n in skewed["parameters_missing"])
    assert "expert-starvation" in [one["name"] for one in found["known"] if one["measured"]]


@pytest.mark.wide
def test_the_cost_is_that_of_real_ranks(command: Command, tmp_path: Path) -> None:
    need(OLD)
    ran = command.run("expert-starvation", "--variant", "identical-batches")
    evidence = read_trial(ran.folder / ran.trial("identical-batches")["evidence"])
    words = ["check", written(tmp_path / "model"), "--layout", "dp_shard=2", "--plan-only"]
    words += ["--stack", "transformers=4.53.2", "--out", str(tmp_path / "out"), "--json"]
    assert command.call(*words)[0] == ExitCode.OK
    units = Checked.read(tmp_path / "out" / checker.WORKED).units
    assert check_cost.as_recorded(units, evidence) == ""
    assert check_cost.by_axis(units)[0].all_gathers == 6


@pytest.mark.wide
@pytest.mark.parametrize("layout", ["dp_shard=8", "dp_shard=2,ep=4", "dp_replicate=2,dp_shard=2"])
def test_a_release_without_the_failure_is_clean(
    layout: str, command: Command, tmp_path: Path
) -> None:
    need(STACK)
    words = ["check", written(tmp_path / "model"), "--layout", layout, "--json"]
    words += ["--stack", "transformers=5.23.0", "--out", str(tmp_path / "out")]
    code, stdout, _ = command.call(*words)
    assert code == ExitCode.OK, stdout
    found = json.loads(stdout)
    assert found["costs"] and not any("cost" in text for text in found["not_seen"])


@pytest.mark.wide
@pytest.mark.parametrize("heads", [1, 2])
def test_a_part_of_a_head_is_named(heads: int, command: Command, tmp_path: Path) -> None:
    """One key-value head for two ranks: ``from_pretrained`` succeeds, the forward raises."""
    need(STACK)
    folder = written(tmp_path / "model", num_key_value_heads=heads, num_attention_heads=2)
    words = ["check", folder, "--layout", "tp=2", "--plan-only", "--json"]
    words += ["--stack", "transformers=5.23.0", "--out", str(tmp_path / "out")]
    code, stdout, _ = command.call(*words)
    found = [one["text"] for one in json.loads(stdout)["findings"] if one["level"] == "fails"]
    assert code == (ExitCode.FAILURE_FOUND if heads == 1 else ExitCode.OK), stdout
    assert len(found) == (2 if heads == 1 else 0)
    assert all("0.5 heads; the first forward raises" in text for text in found)


@pytest.mark.wide
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_the_plan_is_named(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(STACK)
    old, new, layout, named = FAULTS[fault]
    axes = {name: int(size) for name, size in (part.split("=") for part in layout.split(","))}
    installed = checker.environment.ensure(STACK)
    place = tmp_path / "overlay"
    with overlay(installed, place, "transformers", CONFIGURATION, (old, new)) as stack:
        monkeypatch.setattr(checker.environment, "ensure", lambda *_: stack)
        monkeypatch.setattr(checker, "launcher", launcher)  # a host of the edited release
        options = checker.CheckOptions(
            written(tmp_path / "model"), axes, out=tmp_path / "out", simulate=False
        )
        found = checker.check(options, lambda *_: None)
    assert any(named in one.text for one in found.checked.findings), found.checked
