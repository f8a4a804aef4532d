"""From ranks that spin on their devices to the page, without a GPU: two processes imitate NCCL's
ranks (tests/victims/spins.py), their dumps are made in NCCL's format. Watchdog, py-spy, capture,
readers, diagnosis and page are the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from moediag.lab.launch.launcher import follow
from moediag.lab.launch.torchrun import TorchrunTrial
from moediag.launch.processes import ENV_LAUNCH, Family
from moediag.launch.settings import LaunchOptions
from moediag.pipeline import examine
from moediag.protocol import Trial
from moediag.report import html
from tests.unit import cuda_stand_in
from tests.unit.device_dumps import dump, on_nccl
from tests.unit.evidence_builder import fsdp2_job, write
from tests.unit.launch.test_machine import SMI, put_smi

pytestmark = pytest.mark.e2e
VICTIM = Path(__file__).parents[1] / "victims" / "spins.py"


def test_a_hang_on_devices_is_reported_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = cuda_stand_in.build(tmp_path)
    job = on_nccl(fsdp2_job(set(), {(0, 3)}).whole())
    folder = write(job, tmp_path / "unfixed")
    for rank, seen in job.ranks.items():
        log = folder / f"rank-{rank}.events.jsonl"  # no rank finished
        log.write_text("".join(x for x in log.read_text().splitlines(True) if '"end"' not in x))
        (folder / f"answer-{rank}.json").write_text(json.dumps(dump(seen.collectives, done=4)))
    put_smi(tmp_path / "bin", SMI, monkeypatch)

    trial = Trial("unfixed", "starvation", "unfixed", world_size=2, backend="nccl", timeout=120)
    trial.write(folder)
    token = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(VICTIM), str(folder), str(library)],
        env={**os.environ, ENV_LAUNCH: token},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    running = TorchrunTrial(process, token)
    assert isinstance(running.family, Family)
    options = LaunchOptions(quiescence=0.5)
    record = follow(running, trial, folder, 2, options, "torchrun", None)
    record.write(folder)

    if record.stall is None and any("ptrace" in text for text in record.not_seen):
        pytest.skip("py-spy cannot read another process here")
    assert not record.timed_out and record.stall is not None
    assert record.stall.waiting == (0, 1)
    result = examine.examine([folder]).result
    (found,) = result.trials
    assert (found.verdict, found.culprits, found.stack["nccl"]) == ("hang", (1,), "2.29.3")
    assert "expert 3 of layer 0 received 0 tokens" in found.cause
    assert "The devices of ranks 0, 1 are stuck in reduce_scatter of model.layers.0" in found.cause
    assert "and waits for the device at spins.py:" in found.cause
    assert "NVIDIA H200" in found.diagnosis.attached["nvidia-smi"]
    assert any(
        text.startswith("NCCL's own view (nothing listens") for text in found.diagnosis.not_seen
    )
    page = html.render([result])
    assert "Where Python and the device are" in page and "NVIDIA H200" in page
