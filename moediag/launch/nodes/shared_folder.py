"""The folder that the nodes of a job share: ``JOB/NODE/pulse.json`` and, after a stall or a death,
``JOB/NODE/evidence-N/``. A node writes only into its own folder and reads the others'."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from moediag import protocol
from moediag.launch.capture.collect import CAPTURE_FOLDER
from moediag.launch.nodes.status import KEY, Pulse, of_json

# Limit on the evidence that a node publishes or fetches: shared disks are slow. The newest segment
# of a rank's log has 4 MiB by default.
MOST_BYTES = 256 * 1024 * 1024
SHORT_LOG = 512 * 1024  # if the newest segment is shorter, the one before it is copied, too
_PULSE_BYTES = 16 * 1024 * 1024
_OF_RANK = re.compile(
    r"rank-\d+\.(?:pid|job\.json|events\.jsonl|events\.older\.jsonl|heartbeat|error\.json"
    r"|laws\.jsonl|laws\.older\.jsonl|stacks\.txt|flight\.json|outcome\.json|log)"
)
_OF_CAPTURE = re.compile(
    r"rank-\d+\.(?:pyspy\.json|native\.txt|pystack\.txt|proc\.txt|tail\.txt|worker-\d+\.json)"
    r"|source\.json"
)
_OTHERS = (protocol.LAUNCH_FILE, protocol.TRIAL_FILE)


class SharedFolder:
    """The folder of node ``own`` in job ``job`` below ``root``. Methods raise OSError."""

    def __init__(self, root: Path, job: str, own: str) -> None:
        self.folder = root / job
        self.own = self.folder / own
        self.refused: dict[str, str] = {}
        """By node: why its last message was not taken."""

    def want(self) -> None:
        """Announces that this node will fetch evidence."""

    def close(self) -> None:
        """Ends the exchange."""

    def put(self, pulse: Pulse) -> None:
        self.own.mkdir(parents=True, exist_ok=True)
        protocol.write_json(self.own / protocol.PULSE_FILE, pulse.to_json())

    def pulses(self) -> list[Pulse] | None:
        """Returns the others' last pulses, without files that are invalid or being replaced; None
        if nothing could be read."""
        found = []
        for place in self._others():
            path = place / protocol.PULSE_FILE
            try:
                if path.stat().st_size > _PULSE_BYTES:
                    raise ValueError("too large")
                pulse = of_json(protocol.read_json(path))
                if pulse.key != place.name:
                    raise ValueError(f"written by {pulse.key}")
            except OSError:
                continue
            except ValueError as error:
                self.refused[place.name] = str(error)[:200]
                continue
            self.refused.pop(place.name, None)
            found.append(pulse)
        return found

    def _others(self) -> Iterator[Path]:
        for place in self.folder.iterdir() if self.folder.is_dir() else ():
            if place != self.own and KEY.fullmatch(place.name) and place.is_dir():
                yield place

    def publish(self, evidence: Path, number: int) -> list[str]:
        """Copies the files of this node's ranks. Returns the names of files that were too large."""
        into = self.own / _folder(number)
        left_out = copied(evidence, into)
        if number > 1:
            shutil.rmtree(self.own / _folder(number - 1), ignore_errors=True)
        return left_out

    def fetch(self, key: str, number: int, into: Path) -> list[str]:
        """Copies what node ``key`` published to ``into``. Returns the names of files that were too
        large."""
        return copied(self.folder / key / _folder(number), into)


def _folder(number: int) -> str:
    return f"evidence-{number}"


def copied(source: Path, into: Path) -> list[str]:
    """Copies the known files of an attempt, the newest logs first; never links or other files.
    Returns the names of files that were too large."""
    into.mkdir(parents=True, exist_ok=True)
    room, left_out = MOST_BYTES, []
    for path, name in sorted(_wanted(source), key=lambda found: _importance(found[1])):
        with suppress(FileNotFoundError):  # the file is gone: an answered dump request
            size = path.stat().st_size
            if size > room:
                left_out.append(name)
                continue
            room -= size
            target = into / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    return left_out


def _wanted(source: Path) -> Iterator[tuple[Path, str]]:
    for path in source.iterdir():
        name = path.name
        if name in _OTHERS or (_OF_RANK.fullmatch(name) and not _needless(path)):
            if path.is_file() and not path.is_symlink():
                yield path, name
        elif name == CAPTURE_FOLDER and path.is_dir() and not path.is_symlink():
            for one in path.iterdir():
                if _OF_CAPTURE.fullmatch(one.name) and one.is_file() and not one.is_symlink():
                    yield one, f"{name}/{one.name}"


def _needless(path: Path) -> bool:
    """Whether ``path`` is an older log segment whose newer segment is long enough."""
    if ".events.older." not in path.name:
        return False
    newer = path.with_name(path.name.replace(".older", ""))
    with suppress(OSError):
        return newer.stat().st_size >= SHORT_LOG
    return False


def _importance(name: str) -> tuple[int, str]:
    large = (".events.jsonl", ".flight.json", ".native.txt", ".pystack.txt", ".older.jsonl", ".log")
    return next((n for n, end in enumerate(large, 1) if name.endswith(end)), 0), name
