"""What lies at the paths that somebody gave: every file recognised by its content, not its name.

Only whose file it is (which rank) is read off names, where the content does not tell. Nothing that
is found can end the search: a file that is refused, cut off or not understood is said in
``not_seen`` and the others are read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moediag.evidence import console_output as outputs
from moediag.evidence import exits, file_loading, flight_recorder
from moediag.evidence import rank_stacks as stacks
from moediag.evidence.file_loading import Loaded
from moediag.evidence.flight_dump import Dump
from moediag.evidence.model import ExitStatus, RankError, Stack

MAX_FILES = 50_000
MAX_RANK = 1 << 20

_BY_WORD = re.compile(r"rank[\s_.\-=]*0*(\d{1,7})(?!\d)", re.IGNORECASE)
_BY_NUMBER = re.compile(r"(?<![\d.])0*(\d{1,4})(?:\.[A-Za-z][\w.]*)?$")
_BY_FOLDER = re.compile(r"^(?:attempt_(?P<attempt>\d{1,4})/)?(?P<rank>\d{1,5})$")
_OF_TORCHRUN = ("stdout.log", "stderr.log", "error.json")


@dataclass(slots=True)
class Found:
    """Everything that was recognised, by rank; ``dumps``: one a rank, the youngest. ``written``:
    when the dumps' files were last written, seconds of the wall clock. ``files``: how many were
    understood. ``refused``: why files were not, in words."""

    dumps: dict[int, Dump] = field(default_factory=dict)
    stacks: dict[int, list[Stack]] = field(default_factory=dict)
    errors: dict[int, RankError] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    exits: dict[int, ExitStatus] = field(default_factory=dict)
    first: tuple[int, ...] = ()
    written: float = 0.0
    files: int = 0
    refused: list[str] = field(default_factory=list)


def read(paths: Iterable[Path]) -> Found:
    """Never raises for what a file holds. Paths are folders (searched in depth) or files."""
    found = Found()
    collector = _Collector(found)
    files = []
    for number, (file, root) in enumerate(_files(paths)):
        if number == MAX_FILES:
            found.refused.append(f"files after the first {MAX_FILES:,}")
            break
        if collector.is_readable(file):
            files.append((file, root))
    for (file, root), loaded in zip(files, file_loading.loaded([f for f, _ in files]), strict=True):
        try:
            collector.file(file, root, loaded)
        except OSError as error:
            found.refused.append(f"{file} ({error.strerror})")
    collector.close()
    return found


def _files(paths: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """(regular file, the path that it was found under), each file once."""
    seen: set[Path] = set()
    for path in paths:
        for file in _below(path):
            if file not in seen:
                seen.add(file)
                yield file, path


def _below(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(folder) / name


class _Collector:
    def __init__(self, found: Found) -> None:
        self.found = found
        self.of_nobody: list[tuple[Path, str]] = []  # recognised, but whose?
        self.source: dict[int, Path] = {}  # rank -> its dump's file
        self.attempt: dict[int, int] = {}

    def is_readable(self, path: Path) -> bool:
        """A regular file with something in it; reading a pipe would never end."""
        try:
            status = path.stat()
        except OSError as error:
            self.found.refused.append(f"{path} ({error.strerror})")
            return False
        if not stat.S_ISREG(status.st_mode):
            self.found.refused.append(f"{path} (no regular file)")
        elif status.st_size == 0:
            if path.name not in _OF_TORCHRUN:  # a rank that wrote nothing is no loss
                self.found.refused.append(f"{path} (empty)")
        else:
            return True
        return False

    def file(self, path: Path, root: Path, loaded: Loaded) -> None:
        raw = loaded.json
        if loaded.refused:
            self.found.refused.append(f"{path} ({loaded.refused})")
        elif loaded.dump is not None:
            self.dump(path, root, loaded.dump)
        elif raw is None:
            self.text(path, root)
        elif isinstance(raw, list) and stacks.is_pyspy(raw):
            self.add_stacks(path, root, stacks.pyspy(raw))
        elif (error := exits.elastic_error(raw)) is not None:
            self.error(path, root, error)
        else:
            self.found.refused.append(f"{path} (JSON of a kind that is not known)")

    # -------------------------------------------------------------------- dumps

    def dump(self, path: Path, root: Path, dump: Dump) -> None:
        rank = self.whose_dump(path, root, dump)
        if rank is None:
            self.of_nobody.append((path, "a Flight Recorder dump"))
            return
        self.found.files += 1
        self.found.written = max(self.found.written, path.stat().st_mtime)
        older = self.found.dumps.get(rank)
        if older is not None:
            young = _worth(dump) > _worth(older)
            dropped = self.source[rank] if young else path
            self.found.refused.append(f"{dropped} (rank {rank} has a younger or fuller dump)")
            if not young:
                return
        self.found.dumps[rank], self.source[rank] = dump, path

    def whose_dump(self, path: Path, root: Path, dump: Dump) -> int | None:
        """By its name, unless its content speaks against that."""
        named, own = _rank_of(path, root), flight_recorder.own_rank(dump)
        if named is None or own is None or named == own:
            return own if named is None else named
        self.found.refused.append(f"the name of {path} (its content says rank {own})")
        return own

    # -------------------------------------------------------------------- the rest

    def text(self, path: Path, root: Path) -> None:
        text = outputs.ends(path)
        kind = stacks.kind_of(text)
        if kind == "pystack":
            self.add_stacks(path, root, stacks.parse_pystack(text))
        elif kind == "py-spy":
            self.add_stacks(path, root, stacks.parse_pyspy_text(text))
        else:
            self.log(path, root, text)

    def log(self, path: Path, root: Path, text: str) -> None:
        """The output of one rank, of several with prefixes, or the launcher's."""
        ended, first = outputs.torchrun_summary(text)
        self.found.exits.update(ended)
        self.found.first = self.found.first or first
        parts = outputs.by_rank(text)
        own = _rank_of(path, root)
        rest = parts.pop(None, "")
        if own is not None and not parts.keys() - {own}:
            parts = {own: outputs.unprefixed(text)}
        elif own is None and not parts and not ended:
            found = stacks.parse_faulthandler(text)
            what = "stacks" if found else "a log" if outputs.is_log(text) else ""
            if not what:
                self.found.refused.append(f"{path} (text of a kind that is not known)")
            else:
                self.of_nobody.append((path, what))
            return
        elif own is not None and rest and own not in parts:
            parts[own] = rest
        self.found.files += 1
        for rank, part in parts.items():
            if rank is not None and self.is_latest(path, rank):
                self.output(rank, part)

    def is_latest(self, path: Path, rank: int) -> bool:
        """torchrun's ``attempt_1`` follows ``attempt_0``: what the first left does not count."""
        named = re.search(r"/attempt_(\d{1,4})/", path.as_posix())
        if named is None:
            return True
        attempt = int(named[1])
        before = self.attempt.get(rank, attempt)
        if attempt > before:
            for of_rank in (self.found.outputs, self.found.errors, self.found.stacks):
                of_rank.pop(rank, None)
        self.attempt[rank] = max(attempt, before)
        return attempt >= before

    def output(self, rank: int, text: str) -> None:
        found = stacks.parse_faulthandler(text)
        if found:
            self.found.stacks.setdefault(rank, []).extend(found)
        before = self.found.outputs.get(rank)
        self.found.outputs[rank] = text if before is None else f"{before}\n{text}"

    def add_stacks(self, path: Path, root: Path, found: tuple[Stack, ...]) -> None:
        rank = _rank_of(path, root)
        if not found:
            self.found.refused.append(f"{path} (stacks without any frame)")
        elif rank is None:
            self.of_nobody.append((path, "stacks"))
        else:
            self.found.files += 1
            self.found.stacks.setdefault(rank, []).extend(found)

    def error(self, path: Path, root: Path, error: RankError) -> None:
        rank = _rank_of(path, root)
        if rank is None:
            self.of_nobody.append((path, "an error file"))
        elif self.is_latest(path, rank):
            self.found.files += 1
            self.found.errors[rank] = error

    def close(self) -> None:
        """What has no rank is said; of many such files some."""
        for path, what in self.of_nobody[:8]:
            self.found.refused.append(f"{path} ({what}, but no name or content says of which rank)")
        if len(self.of_nobody) > 8:
            more = len(self.of_nobody) - 8
            self.found.refused.append(f"{more} more files of which nothing says whose they are")


def _rank_of(path: Path, root: Path) -> int | None:
    """``rank_3.log``, ``nccl_trace_rank_3``, ``trace_0003.json``, ``attempt_0/3/stderr.log``,
    ``rank3/out.txt``: a number after the word, the folder of torchrun's, else the last number of
    the name."""
    below = path.relative_to(root).parts if path != root else (path.name,)
    if path.name in _OF_TORCHRUN:
        folder = path.parent
        above = folder.parent.name
        prefix = f"{above}/" if above.startswith("attempt_") else ""
        if found := _BY_FOLDER.match(prefix + folder.name):
            return int(found["rank"])
    for part in reversed(below):
        if words := _BY_WORD.findall(part):
            return _sane(words[-1])
    number = _BY_NUMBER.search(path.name)
    return _sane(number[1]) if number else None


def _sane(number: str) -> int | None:
    return int(number) if int(number) < MAX_RANK else None


def _worth(dump: Dump) -> tuple[int, int, bool]:
    """The younger, the fuller, the one with lines of code."""
    last = dump.created[-1] if dump.created else 0
    return last, len(dump.kind), any(kind.site for kind in dump.kinds)
