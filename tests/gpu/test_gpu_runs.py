"""Real ranks on real GPUs. Skipped without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moediag import hardware
from moediag.cli import app
from moediag.lab.step import gpu
from moediag.result import devices
from tests.e2e.pipeline import need

pytestmark = [pytest.mark.gpu, pytest.mark.e2e]


def ran(name: str, folder: Path, *more: str) -> dict[str, Any]:
    app.main(["run", name, "--out", str(folder / "out"), *more])
    found: dict[str, Any] = json.loads((folder / "out" / "result.json").read_text())
    return found


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {t["variant"]: t["verdict"] for t in result["trials"]}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_a_gpu_and_the_result_notes_it(tmp_path: Path, ranks: int) -> None:
    need({"transformers": "5.17.0", "accelerate": "1.15.0"})
    result = ran("ep-router-gradient", tmp_path, "--gpus", str(ranks), "--share-gpu",
                 "--variant", "no-expert-parallelism")  # fmt: skip
    (trial,) = result["trials"]
    assert trial["verdict"] == "clean"
    assert trial["shared_gpu"] is True
    assert any(f"{ranks} ranks share" in note for note in trial["notes"])
    assert "--share-gpu" in result["overrides"]


def test_batched_mm_of_5_17_is_wrong_on_cuda(tmp_path: Path) -> None:
    need({"transformers": "5.17.0", "accelerate": "1.15.0"})
    result = ran("ep-router-gradient", tmp_path, "--gpus", "2", "--share-gpu",
                 "--variant", "unfixed", "--variant", "grouped-mm")  # fmt: skip
    found = verdicts(result)
    assert found["unfixed"] in ("wrong-gradients", "replica-divergence")
    assert found["grouped-mm"] == "clean"


def test_a_starved_expert_hangs_on_nccl(tmp_path: Path) -> None:
    shared = torch.cuda.device_count() < 2
    if shared and devices.shared(hardware.nccl()) == devices.SHARED:
        pytest.skip(f"one GPU, and NCCL {hardware.nccl()} does not let two ranks share it")
    need({"transformers": "4.53.2"})
    result = ran("expert-starvation", tmp_path, "--gpus", "2", *["--share-gpu"] * shared,
                 "--variant", "unfixed", "--variant", "unused-params-flag")  # fmt: skip
    assert verdicts(result) == {"unfixed": "hang", "unused-params-flag": "clean"}
    (hung,) = (t for t in result["trials"] if t["variant"] == "unfixed")
    assert "TORCH_FR_BUFFER_SIZE=" in " ".join(hung["notes"])
    assert "stuck in reduce_scatter" in hung["cause"]
    assert any(t["title"].startswith("Where Python and the device are") for t in hung["tables"])
    assert "nvidia-smi" in hung["attached"] and hung["stack"]["nccl"]


def test_every_local_rank_uses_an_existing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from moediag.protocol import Trial

    trial = Trial("t", "s", "v", shared_gpu=True)
    for rank in range(2 * torch.cuda.device_count() + 1):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert torch.zeros(1, device=gpu.device(trial)).is_cuda
