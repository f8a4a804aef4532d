"""Rows of result.json: turns a trial and its diagnosis into a result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moediag.result import Diagnosis, TrialResult

if TYPE_CHECKING:
    from moediag.protocol import Trial


def row(
    trial: Trial, diagnosis: Diagnosis, stack: Mapping[str, str | None], evidence: str = ""
) -> TrialResult:
    """Returns the result of a trial without expectations. ``evidence``: where its files are, as a
    reader of the result finds them."""
    return TrialResult(
        variant=trial.variant,
        role=trial.role,
        stack=dict(stack),
        launcher=trial.launcher,
        backend=trial.backend,
        world_size=trial.world_size,
        diagnosis=diagnosis,
        expected="",
        met=True,
        evidence=evidence,
        shared_gpu=trial.shared_gpu,
    )
