"""The worker processes of a data loader."""

from __future__ import annotations

import json
from pathlib import Path

from moediag.evidence.rank_stacks import read_workers
from moediag.launch.capture import worker_stacks

LOOP = "/env/lib/python3.12/site-packages/torch/utils/data/_utils/worker.py"
LOADER = "/env/lib/python3.12/site-packages/torch/utils/data/dataloader.py"


def write(folder: Path, pid: int, *files: str) -> None:
    frames = [{"filename": file, "line": 3, "name": "f"} for file in files]
    text = json.dumps([{"thread_name": "MainThread", "frames": frames}])
    worker_stacks.file_of(folder, 1, pid).write_text(text)


def test_children_in_the_worker_loop_are_workers(tmp_path: Path) -> None:
    write(tmp_path, 30, "/me/data.py", LOOP)
    write(tmp_path, 20, LOOP)
    write(tmp_path, 10, "/me/logger.py")
    assert [worker.pid for worker in read_workers(tmp_path, 1)] == [20, 30]
    assert read_workers(tmp_path, 0) == ()


def test_broken_files_are_no_workers(tmp_path: Path) -> None:
    worker_stacks.file_of(tmp_path, 1, 30).write_text("{")
    assert read_workers(tmp_path, 1) == ()


def test_a_rank_in_a_loader_waits_for_data() -> None:
    assert worker_stacks.waits_for_data([{"filename": "/me/a.py"}, {"filename": LOADER}])
    assert not worker_stacks.waits_for_data([{"filename": "/me/a.py"}])
