"""What a supervisor has observed of a launch so far, including which rank died first."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from moediag import protocol
from moediag.evidence.launch_record import Death
from moediag.evidence.model import ExitStatus, Stall
from moediag.launch.processes import Process

# Messages of gloo, the store and NCCL when the connection to another rank is lost.
LOST_PEER = ("by peer", "Broken pipe", "ncclRemoteError", "remote process exited")


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


def status_of(code: int) -> ExitStatus:
    if code >= 0:
        return ExitStatus(code=code)
    try:
        return ExitStatus(signal=signal.Signals(-code).name)
    except ValueError:
        return ExitStatus(signal=f"signal {-code}")
