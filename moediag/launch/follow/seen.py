"""What a supervisor has observed of a launch so far, including which rank died first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from moediag import protocol
from moediag.evidence.launch_record import Death
from moediag.evidence.model import UNTOLD, ExitStatus, Stall
from moediag.evidence.signal_names import named_in, status_of
from moediag.launch.processes import Process
from moediag.launch.rank_sample import RankSample
from moediag.result import wording

# Messages of gloo, the store and NCCL when the connection to another rank is lost.
LOST_PEER = ("by peer", "Broken pipe", "ncclRemoteError", "remote process exited")

_TERMINATED = "-15"
_SHOWN = 4  # ranks of which a note tells what they did


@dataclass
class Seen:
    """Collects the fields of the LaunchRecord."""

    started: float
    first_progress: float | None = None
    processes: dict[int, Process] = field(default_factory=dict)
    exits: dict[int, ExitStatus] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)
    stall: Stall | None = None
    timed_out: bool = False
    interrupted: bool = False
    launch_error: str = ""
    capture_seconds: float | None = None
    not_seen: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def deaths(self, folder: Path) -> tuple[Death, ...]:
        """Returns ranks that failed by themselves, in order. The kernel closes a killed rank's
        connections before it reports the rank's end, so peers may seem to fail first. Their error
        messages show that they only lost a connection."""
        found = []
        for rank, status in self.exits.items():
            if status.code == 0 or status.by_us:
                continue
            noticed = self.ended_at.get(rank, time.time())
            message, at = _error(folder, rank)
            lost_peer = any(words in message for words in LOST_PEER)
            found.append((lost_peer, min(noticed, at or noticed), rank))
        return tuple(Death(rank, at) for _, at, rank in sorted(found))


def _error(folder: Path, rank: int) -> tuple[str, float | None]:
    """Returns the message and time of the exception that ended ``rank``."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        path = folder / protocol.error_file(rank)
        message = protocol.read_json(path)["message"]
        return str(message["message"]), float(message["extraInfo"]["time"])
    return "", None


def traces(folder: Path, sample: RankSample, pid: int) -> ExitStatus | None:
    """How a rank ended, from its files and from what its parent noted; None if it finished normally
    or never began."""
    rank = sample.rank
    if (folder / protocol.error_file(rank)).exists():
        return ExitStatus(code=1)
    if sample.state == "finished" or sample.progress < 0:
        return None
    text = ""
    with suppress(OSError):
        path = folder / protocol.stacks_file(rank)
        text = path.read_text(encoding="utf-8", errors="replace")
    if name := named_in(text, before="Fatal Python error: "):
        return ExitStatus(signal=name)
    told = {path.name: path.read_text() for path in folder.glob(protocol.child_end_file("*"))}
    if (code := told.get(protocol.child_end_file(pid))) and code.lstrip("-").isdigit():
        others = code == _TERMINATED and {*told.values()} != {code}  # a parent ends the others so
        return replace(status_of(int(code)), by_us=others)
    if text and not (folder / "capture" / f"rank-{rank}.proc.txt").exists():
        return ExitStatus(signal="SIGTERM", by_us=True)  # its launcher ended it with the others
    return ExitStatus(signal=UNTOLD)


def slow(stall: Stall, seconds: float, worked: Mapping[int, str]) -> str:
    """Returns the note on a stall that ended by itself. ``worked``: what ranks were seen doing."""
    found = f"slow: {wording.ranks(stall.waiting)} waited {seconds:.0f} s"
    if not stall.waiting:
        found = f"slow: {wording.ranks(stall.elsewhere)} took {seconds:.0f} s to end"
    elif stall.elsewhere:
        found += f" for {wording.ranks(stall.elsewhere)}"
    does = [f"rank {rank} {work}" for rank, work in sorted(worked.items())[:_SHOWN]]
    return "; ".join(
        [f"{found}, from {stall.at:.0f} s after the start", *does, "the job went on by itself"]
    )
