"""The worker processes of a rank's data loader, from py-spy's JSON of the rank's children.

Written by :mod:`moediag.launch.capture.worker_stacks`. A child is a worker if its stack shows
torch's worker loop.
"""

from __future__ import annotations

import re
from pathlib import Path

from moediag.evidence.model import Worker
from moediag.evidence.rank_stacks import parse_pyspy
from moediag.protocol import read_stored

_WORKER_LOOP = "torch/utils/data/_utils/worker.py"


def read(capture: Path, rank: int) -> tuple[Worker, ...]:
    """The workers of ``rank``, by pid; other children are left out."""
    found = []
    for path in capture.glob(f"rank-{rank}.worker-*.json"):
        name = re.fullmatch(r"rank-\d+\.worker-(\d+)\.json", path.name)
        try:
            stacks = parse_pyspy(read_stored(path).decode("utf-8", "replace"))
        except OSError:
            continue
        frames = [frame for stack in stacks for frame in stack.frames]
        if name is not None and any(frame.file.endswith(_WORKER_LOOP) for frame in frames):
            found.append(Worker(int(name[1]), stacks))
    return tuple(sorted(found, key=lambda worker: worker.pid))
