"""What a bisect has found out so far, in a file that only grows: one JSON object a line.

What the lines say is in :mod:`moediag.campaign.bisect.stored`; how they are written, so that a kill
loses at most one of them, is in :mod:`moediag.campaign.old_journal`.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import filelock

from moediag.campaign.bisect.signature_match import Target
from moediag.campaign.bisect.stored import (
    Header,
    Headless,
    Stored,
    differences,
    header_line,
    learned_line,
    parse,
)
from moediag.campaign.bisect.timeline import ProbeRecord
from moediag.campaign.old_journal import append as _append
from moediag.campaign.old_journal import cut as _repair
from moediag.campaign.old_journal import locked
from moediag.errors import EvidenceError, UsageError

STATE_FILE = "bisect.jsonl"
_START_AGAIN = "Leave --resume away and give another folder with --out to start a new bisect."


class State:
    """The open file; a context manager. Use :func:`create` or :func:`resume`.

    ``stored`` holds everything that is in it. Appending raises EvidenceError when the disk refuses;
    what was written before stays readable.
    """

    def __init__(self, path: Path, stored: Stored, lock: filelock.BaseFileLock) -> None:
        self.path = path
        self.stored = stored
        self._lock = lock
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def __enter__(self) -> State:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._lock.release()

    def learned(self, target: Target) -> None:
        """Records which failure is looked for. Raises ValueError when one is recorded already."""
        if self.stored.target is not None:
            raise ValueError("the failure was learned before")
        _append(self._fd, self.path, learned_line(target))
        self.stored = dataclasses.replace(self.stored, target=target)

    def finished(self, record: ProbeRecord) -> None:
        """Records a finished probe. Raises ValueError when it is recorded already."""
        if any((p.version, p.attempt) == (record.version, record.attempt) for p in self.probes):
            raise ValueError(f"{record.version} was probed before (attempt {record.attempt})")
        _append(self._fd, self.path, {"e": "probe", **record.to_json()})
        self.stored = dataclasses.replace(self.stored, probes=(*self.probes, record))

    def finished_extra(self, record: ProbeRecord) -> None:
        """Records a finished probe of something else than a release that is searched, by its
        name. Raises ValueError when it is recorded already."""
        if self.known(record.version, record.attempt) is not None:
            raise ValueError(f"{record.version} was probed before (attempt {record.attempt})")
        _append(self._fd, self.path, {"e": "extra", **record.to_json()})
        self.stored = dataclasses.replace(self.stored, extras=(*self.stored.extras, record))

    def known(self, name: str, attempt: int = 1) -> ProbeRecord | None:
        """Such a probe, where it is finished."""
        found = (r for r in self.stored.extras if (r.version, r.attempt) == (name, attempt))
        return next(found, None)

    @property
    def probes(self) -> tuple[ProbeRecord, ...]:
        return self.stored.probes

    @property
    def resume_command(self) -> str:
        return resume_command(self.stored.header.command, self.path.parent)


def create(folder: Path, header: Header) -> State:
    """A new state file in ``folder``. Raises UsageError when there is one."""
    path = folder / STATE_FILE
    folder.mkdir(parents=True, exist_ok=True)
    lock = locked(folder, STATE_FILE)
    try:
        if path.exists() and not _headless(path):
            raise UsageError(
                f"{path}: a bisect was begun here",
                "Add --resume to go on with it, or give another folder with --out.",
            )
        return _begun(path, header, lock)
    except BaseException:
        lock.release()
        raise


def _headless(path: Path) -> bool:
    try:
        parse(path, path.read_bytes())
    except Headless:
        return True
    return False


def _begun(path: Path, header: Header, lock: filelock.BaseFileLock) -> State:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _append(fd, path, header_line(header))
    finally:
        os.close(fd)
    return State(path, Stored(header), lock)


def resume(folder: Path, wanted: Header) -> State:
    """The state of an earlier run of the same bisect, ready to be appended to.

    ``wanted`` is what the present command asks for; the releases and the command line are the
    file's. Raises UsageError when there is none, when it belongs to another bisect (naming every
    difference) or another moediag has it open; EvidenceError when it cannot be read.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise UsageError(f"--resume: there is no {path}", "Leave --resume away to start it.")
    lock = locked(folder, STATE_FILE)
    try:
        try:
            stored, whole = parse(path, path.read_bytes())
        except Headless:  # killed before anything was known
            return _begun(path, wanted, lock)
        found = list(differences(stored, wanted))
        if found:
            raise UsageError(
                f"--resume: {path} belongs to another bisect: " + "; ".join(found),
                f"To go on with that one: {resume_command(stored.header.command, folder)}\n"
                + _START_AGAIN,
            )
        _repair(path, whole)
        return State(path, stored, lock)
    except BaseException:
        lock.release()
        raise


def read(path: Path) -> Stored:
    """The content of a state file, or of the folder that holds it; a last line without its end
    is left out. Raises EvidenceError."""
    path = path / STATE_FILE if path.is_dir() else path
    try:
        return parse(path, path.read_bytes())[0]
    except OSError as error:
        raise EvidenceError(f"{path}: {error.strerror or error}") from error


def resume_command(command: Sequence[str], folder: Path) -> str:
    """The line to type, from the folder the first command was typed in: the command again, with
    ``--resume`` and the folder of its state."""
    words = [word for word in command if word != "--resume"]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words += ["--out", str(folder)]
    return shlex.join([*words, "--resume"])
