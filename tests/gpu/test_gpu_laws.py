"""The laws on a GPU: what they say of the programs of the CPU. Skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from moediag import hardware
from moediag.result import devices
from tests.e2e.test_watch_laws import as_known

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]

DRAWS_ON_CPU = ("clips_each_client",)  # noise of a generator of its own


def test_the_programs_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(hardware.gpus()) < 2 and devices.shared(hardware.nccl()) == devices.SHARED:
        pytest.skip(f"one GPU, and NCCL {hardware.nccl()} does not let two ranks share it")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    as_known(tmp_path, "nccl", without=DRAWS_ON_CPU)
