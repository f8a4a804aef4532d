"""Skips tests marked ``gpu``, with a reason, if torch can use no GPU."""

from __future__ import annotations

import pytest
import torch

from moediag.errors import MachineError
from moediag.lab import machine_checks


def why_not() -> str:
    """Returns the reason to skip GPU tests, or ""."""
    try:
        machine_checks.require_gpus(1, shared=True)
    except MachineError as error:
        return error.message
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    if reason:
        for item in items:
            if "gpu" in item.keywords and "tests/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))
