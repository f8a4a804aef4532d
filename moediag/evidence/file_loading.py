"""The content of many files, whatever they hold.

Text and JSON are read in this process unless there is much of it. Pickles are read by expendable
processes (:mod:`moediag.evidence.file_reader`): one for all files of a call, several where there is
much to read. A file that ends its reader is refused, and a new reader goes on with the next one.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

from moediag.evidence import file_reader
from moediag.evidence.file_reader import Loaded, is_pickle, load

MAX_READERS = 16
Members = tuple[int, ...]
_MUCH = 8 * 1024 * 1024  # bytes from which a reader on each core pays for its start
# Isolated and without site-packages: a reader needs the standard library and this package.
_ROOT = Path(__file__).parents[2]
_MAIN = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); "
_MAIN += f"from {file_reader.__name__} import main; main()"
_COMMAND = (sys.executable, "-I", "-S", "-c", _MAIN)


def loaded(files: Sequence[Path]) -> Iterator[Loaded]:
    """The content of each file, in order."""
    much = sum(file.stat().st_size for file in files) >= _MUCH
    apart = [much or _must_be_read_apart(file) for file in files]
    for_readers = [file for file, one in zip(files, apart, strict=True) if one]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    count = min(cores, MAX_READERS) if much else 1
    with closing(_by_readers(for_readers, count)) as read:
        for file, one in zip(files, apart, strict=True):
            yield next(read) if one else load(file)


def _must_be_read_apart(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return is_pickle(file.read(2))
    except OSError:
        return False


def _by_readers(files: Sequence[Path], count: int) -> Generator[Loaded, None, None]:
    """In order; each of ``count`` readers takes every ``count``-th file."""
    members: dict[Members, Members] = {}
    parts = [files[number::count] for number in range(count)]
    readers = [_Reader(part, members) for part in parts if part]
    try:
        for number in range(len(files)):
            yield readers[number % count].result()
    finally:
        for reader in readers:
            reader.close()


class _Answer(pickle.Unpickler):
    """``sent``: the members that this process sent before, by number; ``members``: one object for
    equal members, whichever process sent them."""

    def __init__(
        self, file: IO[bytes], sent: dict[int, Members], members: dict[Members, Members]
    ) -> None:
        super().__init__(file)
        self._sent = sent
        self._members = members

    def persistent_load(self, pid: Any) -> Members:
        number, new = pid
        if new is not None:
            self._sent[number] = self._members.setdefault(tuple(new), tuple(new))
        return self._sent[number]


class _Reader:
    """A process that reads ``files``, started anew whenever a file ends it."""

    def __init__(self, files: Sequence[Path], members: dict[Members, Members]) -> None:
        self._left = list(files[::-1])
        self._members = members
        self._sent: dict[int, Members] = {}
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        self._sent.clear()
        process = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"\0".join(os.fsencode(path) for path in self._left[::-1]))
        return process

    def result(self) -> Loaded:
        """The content of the next file, or why there is none."""
        self._left.pop()
        assert self._process.stdout is not None
        try:
            found: Loaded = _Answer(self._process.stdout, self._sent, self._members).load()
            return found
        except (EOFError, pickle.UnpicklingError):
            self._process.stdout.close()
            lost = Loaded(refused=_reason(self._process.wait()))
        if self._left:
            self._process = self._started()
        return lost

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()


def _reason(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"takes more than {file_reader.SECONDS:g} s to read"
    end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"reading it ended the reader ({end})"
