"""What the recorder learns about a device: one rank on NCCL, so one GPU is enough. Skipped without
a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moediag import protocol
from moediag.evidence.trial_folder import read_trial
from moediag.protocol import Trial

pytestmark = pytest.mark.gpu

JOB = """
import sys, time, threading
from pathlib import Path
import torch, torch.distributed as dist
from moediag import protocol
from moediag.recorder import install

folder, scene = Path(sys.argv[1]), sys.argv[2]
torch.cuda.set_device(0)
recorder = install(str(folder), 0, 1)
dist.init_process_group("nccl", rank=0, world_size=1, store=dist.FileStore(sys.argv[3], 1))
x = torch.ones(1 << 10, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
SECONDS = 2 * 10**9  # about a second of the device's clock
if scene == "stuck":
    dist.all_gather_into_tensor(torch.empty(1 << 10, device="cuda"), x)
    torch.cuda._sleep(5 * SECONDS)
    dist.all_reduce(x)
    (folder / protocol.dump_request_file(0)).touch()
    torch.cuda.synchronize()  # Python notices here, and issues nothing more
else:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
        time.sleep(3)  # the other thread would ask meanwhile
    graph.replay()
    torch.cuda.synchronize()
    print("captured", flush=True)
"""


@pytest.fixture
def nccl() -> None:
    if not dist.is_nccl_available():
        pytest.skip(f"torch {torch.__version__} has no NCCL")


def job(folder: Path, scene: str) -> str:
    folder.mkdir()
    Trial("t", "s", "unfixed", world_size=1, backend="nccl").write(folder)
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(folder), scene, str(folder.parent / "store")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_recorder_knows_how_far_the_device_is(tmp_path: Path, nccl: None) -> None:
    job(tmp_path / "t", "stuck")
    seen = read_trial(tmp_path / "t").ranks[0]
    assert (tmp_path / "t" / protocol.flight_file(0)).exists()
    ops = [(c.op, c.on_device) for c in seen.collectives]
    assert ops[0] == ("all_reduce", "completed")
    assert ops[1] == ("all_gather", "completed")
    assert ops[2][0] == "all_reduce" and ops[2][1] in ("issued", "started")
    assert seen.versions["nccl"]


def test_a_graph_can_be_captured_while_recording(tmp_path: Path, nccl: None) -> None:
    assert "captured" in job(tmp_path / "t", "graph")
