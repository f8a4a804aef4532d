"""Recognising user frames by recorded folders, or else by the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moediag.diagnosis.end_states.whereabouts import program_line, whereabouts
from moediag.evidence import file_loading
from moediag.evidence.model import Evidence, Frame, RankEvidence, Stack
from moediag.evidence.rank_stacks import in_collective
from moediag.evidence.trial_folder import read_trial
from moediag.protocol import in_libraries, innermost_user

MOEDIAG = Path(__file__).parents[3] / "moediag"
TORCH = "/opt/pytorch/torch/distributed/distributed_c10d.py"  # a source checkout
FOLDERS = ("/opt/pytorch/torch", "/env/lib/python3.12", "/env/lib/python3.12/site-packages")
OWN = (
    "/home/u/torch/train.py", "/home/u/moediag/train.py", "/home/u/moediag/tests/victims/spins.py",
    "/home/u/moediag/errors.py", "/home/u/lib/python/train.py", "/home/u/multiprocessing/train.py",
    "<string>", "/home/u/ops/fast.pyx",
)  # fmt: skip


@pytest.mark.parametrize("folders", [FOLDERS, ()], ids=["recorded", "not-recorded"])
@pytest.mark.parametrize("file", OWN)
def test_code_in_a_folder_named_like_a_library_is_user_code(
    file: str, folders: tuple[str, ...]
) -> None:
    library = "/env/lib/python3.12/site-packages/accelerate/optimizer.py"
    assert innermost_user([TORCH, library, file], folders) == 2


@pytest.mark.parametrize(
    "file",
    [
        "/env/lib/python3.12/threading.py",
        "/env/lib/python3.12/site-packages/transformers/trainer.py",
        "/opt/pytorch/torch/nn/modules/linear.py",
        "<frozen importlib._bootstrap>",
        "pyarrow/error.pxi",
        "/tmp/torchinductor_u/jc/cjcdc6jularqpngbxhsi5bnwto3baxnezypc46wl2aqhvbyg5gou.py",
    ],
)
@pytest.mark.parametrize("folders", [FOLDERS, ()], ids=["recorded", "not-recorded"])
def test_library_code_is_not_user_code(file: str, folders: tuple[str, ...]) -> None:
    assert in_libraries([TORCH, file], folders) == [True, True]
    assert innermost_user([TORCH, file], folders) is None


def test_moediag_modules_are_recognised_without_recorded_folders() -> None:
    assert in_libraries(["/any/moediag/recorder/core.py", "/any/moediag/recorder/mine.py"]) == [
        True,
        False,
    ]


def test_a_recorded_folder_takes_precedence_over_the_path() -> None:
    """The user's own site-packages folder is not the one that the rank imports from."""
    file = "/home/u/site-packages/train.py"
    assert in_libraries([file], FOLDERS) == [False] and in_libraries([file]) == [True]


@pytest.mark.parametrize("home", ["/home/u/torch", "/home/u/moediag", "/home/u/datasets"])
def test_a_stack_keeps_the_user_line(home: str) -> None:
    frames = tuple(Frame(file, 9, "f") for file in (TORCH, f"{home}/train.py"))
    seen = RankEvidence(0, stacks=(Stack("MainThread", "py-spy", frames),), libraries=FOLDERS)
    assert program_line(seen) == "train.py:9 f"
    assert whereabouts(Evidence(1, {0: seen}), [0]) == "Rank 0 is at train.py:9 f."


@pytest.mark.parametrize("folder", ["nccl-repro", "gloo", "c10d"])
def test_a_folder_named_like_a_backend_is_not_a_collective(folder: str) -> None:
    def stack(*files: str) -> Stack:
        return Stack("MainThread", "py-spy", tuple(Frame(file, 1, "f") for file in files))

    assert not in_collective(stack(f"/home/u/{folder}/train.py"))
    assert in_collective(stack(f"/home/u/{folder}/train.py", "/v/vllm/pynccl.py"))
    assert in_collective(stack(f"/home/u/{folder}/train.py", TORCH))


JOB = """
import os, sys, faulthandler
from pathlib import Path
import torch, torch.distributed as dist
from moediag.recorder import install

def step():
    dist.all_reduce(torch.ones(3))
    c10d = torch._C._distributed_c10d
    dump = c10d._dump_fr_trace(includeCollectives=True, includeStackTraces=True, onlyActive=False)
    Path(sys.argv[1], "trace_rank_0").write_bytes(dump)
    faulthandler.dump_traceback(open(Path(sys.argv[1], "rank-0.stacks.txt"), "w"))
    torch.ones(3).reshape(2, 2)

install(sys.argv[1], 0, 1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
step()
"""


@pytest.mark.parametrize("name", [pytest.param("torch", marks=pytest.mark.wide), "moediag"])
def test_a_rank_in_a_folder_named_like_moediag_is_recorded(tmp_path: Path, name: str) -> None:
    """moediag in a clone named moediag, as ``git clone`` makes it, and the job in ``name``."""
    clone, home, evidence = (tmp_path / part for part in ("moediag", name, "evidence"))
    for folder in {clone, home, evidence}:
        folder.mkdir()
    (clone / "moediag").symlink_to(MOEDIAG)
    (home / "train.py").write_text(JOB)
    environment = {**os.environ, "PYTHONPATH": str(clone), "TORCH_FR_BUFFER_SIZE": "100"}
    command = [sys.executable, str(home / "train.py"), str(evidence)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    (evidence / "rank-0.log").write_text(done.stderr)
    line = next(n for n, text in enumerate(JOB.splitlines(), 1) if "reshape" in text)

    (seen,) = read_trial(evidence).ranks.values()
    assert str(clone / "moediag") in seen.libraries
    assert seen.error is not None and seen.error.where == f"train.py:{line} step", done.stderr
    main = next(s for s in seen.stacks if any(f.function == "step" for f in s.frames))
    assert program_line(replace(seen, stacks=(main,))) == f"train.py:{line - 1} step"
    dump = file_loading.load(evidence / "trace_rank_0").dump
    assert dump is not None and dump.kinds[0].site.startswith("train.py:")
    (evidence / "rank-0.events.jsonl").unlink()  # as from other tools: nothing recorded
    (seen,) = read_trial(evidence).ranks.values()
    assert not seen.libraries
    assert seen.error is not None and seen.error.where == f"train.py:{line} step"


def test_an_older_log_without_folders_is_read(tmp_path: Path) -> None:
    event = {"e": "start", "t": 1.0, "rank": 0, "world_size": 1, "backend": None}
    (tmp_path / "rank-0.events.jsonl").write_text(json.dumps(event) + "\n")
    assert read_trial(tmp_path).ranks[0].libraries == ()
