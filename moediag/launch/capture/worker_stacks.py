"""Stacks of the child processes of a rank, if its main thread waits for them."""

from __future__ import annotations

from pathlib import Path

from moediag.launch.processes import all_stats

MOST = 16  # workers of one rank
_LOADER = "torch/utils/data/dataloader.py"


def waits_for_data(frames: list[dict[str, object]]) -> bool:
    """Whether py-spy's frames of a main thread show it in a data loader."""
    return any(str(frame.get("filename", "")).endswith(_LOADER) for frame in frames)


def waits_for_children(frames: list[dict[str, object]]) -> bool:
    """Whether the main thread waits at the end of its program for child processes."""
    return any(frame.get("name") == "_exit_function" for frame in frames)


def children(pid: int) -> list[int]:
    """The pids of the direct children of ``pid``, at most MOST."""
    return sorted(stat.pid for stat in all_stats().values() if stat.ppid == pid)[:MOST]


def file_of(capture: Path, rank: int, pid: int) -> Path:
    """Where py-spy's JSON of a child belongs, see `moediag.evidence.rank_stacks.read_workers`."""
    return capture / f"rank-{rank}.worker-{pid}.json"
