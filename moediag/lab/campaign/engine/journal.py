"""An append-only file of the finished items of a campaign: one JSON object per line.

The first line is the header: the question and its command. Every other line is one finished item. A
line is one ``write`` to a file opened for appending and is flushed to the disk, so a kill at any
moment costs at most the line being written. An incomplete last line is dropped when the file is
opened again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Generic, TypeVar

import moediag
from moediag.errors import EvidenceError, UsageError
from moediag.lab.campaign.engine import journal_file
from moediag.pipeline.run_folder import run_folder
from moediag.protocol import build
from moediag.records import dataclass

JOURNAL_FILE = "journal.jsonl"
SCHEMA_VERSION = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Header:
    """The question of a campaign."""

    campaign: str
    """Name in messages: run, bisect, matrix, …"""
    question: Mapping[str, Any]
    """Everything that decides the answer, as plain JSON, by names that users know."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Digests of what is too long to show. Only names that both commands have are compared."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What a resumed campaign takes from the journal instead of the present command."""
    command: tuple[str, ...] = ()
    """The command line as typed, from ``moediag`` on."""

    def line(self) -> dict[str, Any]:
        version = {"schema_version": SCHEMA_VERSION, "moediag_version": moediag.__version__}
        return {"e": "header", **version, **json.loads(json.dumps(dataclasses.asdict(self)))}


class Journal:
    """The open file; a context manager. Use :func:`opened`, :func:`create` or :func:`resume`."""

    def __init__(self, path: Path, fd: int, header: Header, lines: list[dict[str, Any]]) -> None:
        self.path = path
        self.header = header
        self.lines = lines
        """All lines after the header, in order."""
        self._fd = fd

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def resume_command(self) -> str:
        return resume_command(self.header.command, self.folder)

    def append(self, kind: str, values: Mapping[str, Any]) -> None:
        """Adds a line. Raises DiskFull, or EvidenceError if it cannot be written; earlier lines
        stay readable."""
        line = {"e": kind, **values}
        journal_file.append(self._fd, self.path, line, f"To resume: {self.resume_command}")
        self.lines.append(line)


class Records(Mapping[str, T], Generic[T]):
    """The journal's lines of one kind as objects, by name, in the order of the lines.

    Raises EvidenceError, with the line, if one is unreadable or duplicated."""

    def __init__(
        self,
        journal: Journal,
        kind: str,
        read: Callable[[dict[str, Any]], T],
        write: Callable[[T], Mapping[str, Any]],
    ) -> None:
        self._journal = journal
        self._kind = kind
        self._write = write
        self._known: dict[str, T] = {}
        for number, line in enumerate(journal.lines, 2):
            if line.get("e") != kind:
                continue
            try:
                name = line["name"]
                if name in self._known:
                    raise ValueError(f"{name} is there twice")
                self._known[name] = read(line["value"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                why = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
                raise EvidenceError(
                    f"{journal.path}:{number}: {why}",
                    "Remove that line; what it recorded is done again.",
                ) from error

    @classmethod
    def of(
        cls, journal: Journal, kind: str, record: type[T],
        write: Callable[[Any], Mapping[str, Any]] = dataclasses.asdict,
    ) -> Records[T]:  # fmt: skip
        """The lines as dataclasses."""
        return Records(journal, kind, functools.partial(build, record), write)

    def __getitem__(self, name: str) -> T:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, name: str, value: T) -> None:
        """Records ``value``. Raises ValueError for an existing name, and as
        :meth:`Journal.append`."""
        if name in self._known:
            raise ValueError(f"{name} was finished before")
        self._journal.append(self._kind, {"name": name, "value": self._write(value)})
        self._known[name] = value


# ------------------------------------------------------------------------ open


def opened(header: Header, out: Path | None, resumed: bool, name: str) -> Journal:
    """Returns the journal of a new campaign in ``out`` (default: a new folder named after
    ``name``), or resumes the campaign in ``out``. Raises as :func:`create` and :func:`resume`."""
    if resumed:
        if out is None:
            raise UsageError(
                f"--resume needs the folder of the {header.campaign}",
                "Give it with --out; an interrupted command prints the whole line to type.",
            )
        return resume(out.resolve(), header)
    if out is not None and (out / JOURNAL_FILE).exists():
        return create(out.resolve(), header)  # which reports what is there
    return create(run_folder(out, name), header)


def create(folder: Path, header: Header) -> Journal:
    """Creates a journal in ``folder``. Raises UsageError if one exists."""
    path = folder / JOURNAL_FILE
    folder.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise UsageError(
            f"{path}: a {header.campaign} was started here",
            "Add --resume to continue it, or give another folder with --out.",
        )
    return _begun(path, journal_file.locked(path, os.O_CREAT), header)


def resume(folder: Path, wanted: Header) -> Journal:
    """Returns the journal of an earlier command with the same question, open for appending.

    Raises UsageError if there is none, if another moediag has it open, or if it belongs to another
    question (naming every difference); EvidenceError if it cannot be read.
    """
    path = folder / JOURNAL_FILE
    if not path.is_file():
        raise UsageError(f"--resume: there is no {path}", "Omit --resume to start it.")
    fd = journal_file.locked(path)
    try:
        lines, whole = journal_file.read(path)
        if not lines:  # killed before its header was written
            os.ftruncate(fd, 0)
            return _begun(path, fd, wanted)
        there = _header(path, lines[0])
        for line in lines[1:]:
            if line.get("e") == "resumed" and isinstance(line.get("digests"), dict):
                there = dataclasses.replace(there, digests={**there.digests, **line["digests"]})
        found = list(_differences(there, wanted))
        if found:
            raise UsageError(
                f"--resume: {path} belongs to another {there.campaign}: " + "; ".join(found),
                f"To resume that one: {resume_command(there.command, folder)}\n"
                "To start a new one, omit --resume and give another folder with --out.",
            )
        journal_file.cut(fd, path, whole)
        command = wanted.command or there.command
        journal = Journal(path, fd, dataclasses.replace(there, command=command), lines[1:])
        new = {k: v for k, v in wanted.digests.items() if k not in there.digests}
        if new:
            journal.append("resumed", {"digests": new})  # with more to do than the first command
        return journal
    except BaseException:
        os.close(fd)
        raise


def lines_of(folder: Path) -> tuple[Header, list[dict[str, Any]]]:
    """Returns (header, further lines) of the journal in ``folder``, unlocked and unchanged. Raises
    EvidenceError."""
    path = folder / JOURNAL_FILE
    try:
        lines, _ = journal_file.read(path)
    except OSError as error:
        raise EvidenceError(f"{path}: {error.strerror or error}") from error
    if not lines:
        raise EvidenceError(f"{path}: it ended before its first line was written")
    return _header(path, lines[0]), lines[1:]


def resume_command(command: Sequence[str], folder: Path) -> str:
    """Returns the command to type in the folder of the first command: that command with
    ``--resume`` and the journal's folder."""
    words = [word for word in command if word != "--resume"]
    if not any(word == "--out" or word.startswith("--out=") for word in words):
        words += ["--out", str(folder)]
    return shlex.join([*words, "--resume"])


def _begun(path: Path, fd: int, header: Header) -> Journal:
    try:
        journal_file.append(fd, path, header.line(), "Then type the same command again.")
    except BaseException:
        os.close(fd)
        raise
    return Journal(path, fd, header, [])


def _header(path: Path, raw: Mapping[str, Any]) -> Header:
    version = raw.get("schema_version")
    if raw.get("e") != "header" or version != SCHEMA_VERSION:
        raise EvidenceError(
            f"{path}:1: not a header that this moediag reads (schema_version {version!r}, "
            f"not {SCHEMA_VERSION})",
            "Give another folder with --out to start again.",
        )
    try:
        header: Header = build(Header, {f.name: raw[f.name] for f in dataclasses.fields(Header)})
        return header
    except (KeyError, ValueError) as error:
        raise EvidenceError(f"{path}:1: the header is incomplete: {error}") from error


def _differences(there: Header, wanted: Header) -> Iterator[str]:
    """Yields a text for each difference that changes the question."""
    if there.campaign != wanted.campaign:
        yield f"it is a {there.campaign}, not a {wanted.campaign}"
        return
    asked = json.loads(json.dumps(wanted.question))
    for name in dict.fromkeys([*there.question, *asked]):
        old, new = there.question.get(name), asked.get(name)
        if old != new:
            yield f"{name}: {_word(old)}, not {_word(new)}"
    for name in sorted(there.digests.keys() & wanted.digests.keys()):
        if there.digests[name] != wanted.digests[name]:
            yield f"{name} was different then (its files or the options that change it)"


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not given" if value in (None, {}, "") else str(value)
