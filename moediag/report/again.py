"""The command that shows a trial again."""

from __future__ import annotations

import shlex

from moediag.result import RunResult, TrialResult, devices


def command(result: RunResult, trial: TrialResult) -> str:
    """Of a user's job, what was typed after ``moediag``, as far as that is known."""
    if not trial.expected:
        watched = next((t for t in result.overrides if t.startswith("watch -- ")), "")
        return f"moediag {watched}" if watched else "moediag diagnose DIR"
    words = ["moediag", "run", result.scenario, "--variant", trial.variant]
    words += devices.options(device(trial), trial.world_size)
    for text in result.overrides:
        words += text.split(" ", 1) if text != "--share-gpu" else []
    return shlex.join(words)


def device(trial: TrialResult) -> str:
    """What the trial's ranks ran on, a key of :data:`moediag.result.devices.DEVICES`."""
    if trial.shared_gpu:
        return devices.SHARED_NCCL if trial.backend == "nccl" else devices.SHARED
    return "gpu" if trial.backend == "nccl" else "cpu"
