"""Recorded hangs of two ranks on NCCL 2.30.7 that shared a GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.launch_record import read_launch
from moediag.evidence.trial_folder import _on_devices, read_trial

SAMPLES = Path(__file__).parents[2] / "samples"
RECORDED = SAMPLES / "nccl_hang" / "attempt-0"  # rank 0 calls all_reduce alone
BACKWARD = SAMPLES / "nccl_backward_hang"  # an expert gets no token on rank 1, under FSDP2


def without(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for file in folder.rglob(name):
            file.unlink()

    return change


def entry(number: int, change: dict[str, object], completed: str) -> Callable[[Path], None]:
    """Changes one call in the dumps, and the number of the last one that completed."""

    def rewrite(folder: Path) -> None:
        for file in folder.glob("*.flight.json"):
            dump = json.loads(file.read_text())
            dump["entries"][number] |= change
            dump["pg_status"]["0"]["last_completed_collective"] = completed
            file.write_text(json.dumps(dump))

    return rewrite


OPEN = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": 0}
DONE = {"state": "completed", "retired": True, "time_discovered_completed_ns": 1}
# No device has completed the first call, in which the ranks agree.
stuck_earlier = entry(0, OPEN, "-1")
# The two calls that differ completed, and the device is in the one behind them.
ran_on = entry(1, DONE, "2")


def called_away(folder: Path) -> None:
    """The watchdog knew of no rank that it waits in a call, as in destroy_process_group."""
    launch = json.loads((folder / "launch.json").read_text())
    launch["stall"] |= {"waiting": [], "elsewhere": [0, 1, 2]}  # 2: on another node, not seen
    (folder / "launch.json").write_text(json.dumps(launch))


@pytest.mark.parametrize(
    ("change", "culprits"),
    [
        (without("nothing"), (0,)),
        (ran_on, (0,)),
        (called_away, (0,)),
        # The stacks alone show both ranks in the same call.
        (without("*.flight.json"), ()),
        (without("source.json"), ()),
        (stuck_earlier, ()),
    ],
    ids=[
        "all evidence",
        "ran on",
        "called away",
        "no Flight Recorder",
        "no source",
        "stuck before that",
    ],
)
def test_the_rank_is_named_where_its_device_waits(
    change: Callable[[Path], None], culprits: tuple[int, ...], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(RECORDED, tmp_path / "attempt-0"))
    change(folder)
    found = diagnose(read_trial(folder))
    assert (found.verdict, found.culprits) == ("hang", culprits), found.cause
    if culprits:
        assert "under `if rank == 0` at gpu_jobs.py:24" in found.cause
        assert "waits for the device at gpu_jobs.py:26" in found.cause


def test_what_nccl_itself_says_is_kept() -> None:
    found = diagnose(read_trial(RECORDED))
    assert "Rank 1 has launched up to operation 2" in found.attached["NCCL's RAS"]


def completed_everywhere(folder: Path) -> None:
    for file in folder.glob("*.flight.json"):
        file.write_text(file.read_text().replace('"started"', '"completed"'))


def went_on(folder: Path) -> None:
    launch = json.loads((folder / "launch.json").read_text())
    launch["ended"] = launch["started"] + 20
    (folder / "launch.json").write_text(json.dumps(launch))


def test_devices_that_stayed_in_a_call_until_the_time_limit_hang(tmp_path: Path) -> None:
    """No stack showed the wait: one thread was in a copy, the other launched a kernel."""
    found = diagnose(read_trial(BACKWARD))
    assert (found.verdict, found.culprits, found.confidence) == ("hang", (1,), "high"), found.cause
    assert "expert 3 of layer 1 received 0 tokens" in found.cause
    for change in (without("*.flight.json"), completed_everywhere, went_on):
        folder = Path(shutil.copytree(BACKWARD, tmp_path / change.__name__ / "unfixed"))
        change(folder)
        found = diagnose(read_trial(folder))
        assert (found.verdict, found.culprits) == ("inconclusive", ()), found.cause


@pytest.mark.parametrize(("op", "stands"), [("all_reduce", True), ("recv", False)])
def test_a_receive_that_was_posted_early_shows_no_wait(op: str, stands: bool) -> None:
    read = read_trial(BACKWARD)
    ranks = {
        rank: replace(seen, collectives=tuple(replace(c, op=op) for c in seen.collectives))
        for rank, seen in read.ranks.items()
    }
    launch = read_launch(BACKWARD / "launch.json")
    assert (_on_devices(launch, ranks) is not None) == stands
