"""Crashes explained by a mixed parameter group, and other crashes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moediag import protocol
from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence, Finding, RankError
from moediag.evidence.trial_folder import read_trial
from tests.unit.evidence_builder import died, fsdp2_job, write

TEXT = (
    "parameter group 0 holds 41 plain tensors and 4 DTensors on mesh ep [0, 1]; "
    "AdamW foreach=True handles them in one call"
)
MIXED = "aten.{} got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
MESHES = "All operands in aten.stack.default must have the same mesh, but got DeviceMesh((ep=2)"


def crashed(message: str, finding: Finding | None) -> Evidence:
    """Both ranks raise in step 1."""
    evidence = fsdp2_job(set(), set()).run()
    for rank in range(2):
        error = RankError("RuntimeError", message, "train.py:7 step", 5.0)
        evidence = died(evidence, rank, error)
        seen = replace(evidence.ranks[rank], findings=(finding,) if finding else ())
        evidence = replace(evidence, ranks={**evidence.ranks, rank: seen})
    return evidence


def finding(raises: bool = True) -> Finding:
    return Finding("optimizer-group", TEXT, 0, {"raises": raises})


@pytest.mark.parametrize("op", ["_foreach_mul_.Scalar", "_fused_adamw_.default"])
def test_a_mixed_parameter_group_explains_the_crash(op: str) -> None:
    found = diagnose(crashed(MIXED.format(op), finding()))
    assert found.verdict == "crash"
    assert (
        "Parameter group 0 holds 41 plain tensors and 4 DTensors on mesh ep [0, 1]" in found.cause
    )
    assert "One parameter group per mesh" in found.cause


def test_a_mixed_group_does_not_explain_other_crashes() -> None:
    assert "arameter group" not in diagnose(crashed("CUDA out of memory", finding())).cause


def test_cause_does_not_mention_groups_without_a_finding() -> None:
    for none in (None, finding(raises=False)):
        text = diagnose(crashed(MIXED.format("_foreach_mul_.Scalar"), none)).cause
        assert "arameter group" not in text


@pytest.mark.parametrize(("message", "what"), [
    (MESHES, "DTensors of several meshes"),
    (MIXED.format("_foreach_norm.Scalar"), "plain tensors and DTensors"),
])  # fmt: skip
def test_mixed_clipping_is_distinguished_from_the_optimizer(message: str, what: str) -> None:
    text = diagnose(crashed(message, finding())).cause
    assert f"The gradient norm is taken over {what} in one call" in text
    assert "arameter group" not in text


def test_findings_survive_the_crash_in_the_log(tmp_path: Path) -> None:
    evidence = crashed(MIXED.format("_foreach_mul_.Scalar"), finding())
    folder = write(evidence, tmp_path / "trial")
    read = read_trial(folder)
    assert read.ranks[1].findings == (finding(),)
    assert diagnose(read).cause == diagnose(evidence).cause


def test_a_finding_in_both_log_segments_is_read_once(tmp_path: Path) -> None:
    folder = write(crashed("x", finding()), tmp_path / "trial")
    log = folder / protocol.events_file(0)
    (folder / protocol.older_events_file(0)).write_text(log.read_text())
    assert len(read_trial(folder).ranks[0].findings) == 1
