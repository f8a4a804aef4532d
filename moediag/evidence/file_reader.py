"""The content of one file, and the process that reads files which may harm their reader.

Pickles are read by Python's own unpickler with every global refused, except those of torch's lists:
nothing in a file can be called or built, and no code of it runs. A hostile file can still exhaust
memory, never finish, or crash the interpreter: keys that take forever to hash, nesting that
overflows the stack, a memo slot of four billion. So a pickle is read in a process of its own, with
limits, that may be lost.

That process (:func:`main`) gets paths on stdin, separated by zero bytes, and answers with one
pickled :class:`Loaded` for each on stdout (:class:`Answers`). :mod:`moediag.evidence.file_loading`
starts it. Imports cost as much as the reading of 5,000 entries, so there are few.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pickle
import re
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from moediag.evidence import flight_dump
from moediag.evidence.flight_calls import NoDump

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from moediag.evidence.flight_calls import Dump

MAX_PICKLE = 32 * 1024 * 1024  # a dump of 2,000 entries has a quarter of a million bytes
MAX_JSON = 128 * 1024 * 1024
SECONDS = 10.0  # of CPU time for one file; the largest usually takes one
MEMORY = 4 << 30  # bytes beyond what the process starts with
_MANY = 64  # members of a group that are sent once
# torch's C++ pickler writes `torch.jit._pickle.build_intlist([1, 2])` for a list of integers.
_LISTS = frozenset(f"torch.jit._pickle.build_{kind}list" for kind in ("int", "double", "bool"))


class Refused(ValueError):
    """The file is not read; the message says why."""


class Loaded(NamedTuple):
    """A file's content. When all three are empty the file is text."""

    dump: Dump | None = None
    #: JSON that is not a dump.
    json: Any = None
    #: Why the file was not read.
    refused: str = ""


def is_pickle(head: bytes) -> bool:
    """Whether a file that starts with ``head`` is a pickle of protocol 2 or newer."""
    return head[:1] == b"\x80" and head[1:2] <= b"\x05"


def load(path: Path | str) -> Loaded:
    """The content of the file. A pickle must be read in a process that may be lost."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the reader imports no pathlib
            head = file.read(512)
            if is_pickle(head):
                return Loaded(flight_dump.read(plain_data(_rest(file, head, MAX_PICKLE))))
            if not _is_text(head):
                return Loaded(refused="neither text nor a dump")
            if head.lstrip()[:1] not in (b"{", b"[") or _is_log(head):
                return Loaded()
            return _json(_rest(file, head, MAX_JSON).decode("utf-8", errors="replace"))
    except (Refused, NoDump) as no:
        return Loaded(refused=str(no))
    except OSError as error:
        return Loaded(refused=str(error.strerror))


def _is_text(head: bytes) -> bool:
    """Whether it may be a log: no NUL, and few bytes that are neither UTF-8 nor ASCII."""
    odd = sum(c == "\ufffd" or (c < " " and c not in "\t\n\r\b\f\x1b") for c in
              head.decode("utf-8", errors="replace"))  # fmt: skip
    return b"\0" not in head and odd <= len(head) // 16 + 1


def _is_log(head: bytes) -> bool:
    """Whether text that starts with a bracket is a log with prefixed lines, not JSON."""
    from moediag.evidence import log_lines  # pickles are read sooner without it

    return log_lines.prefixed(head.decode("utf-8", errors="replace"))


def _rest(file: BinaryIO, head: bytes, limit: int) -> bytes:
    data = head + file.read(limit - len(head) + 1)
    if len(data) > limit:
        raise Refused(f"larger than {limit >> 20} MiB")
    return data


def _json(text: str) -> Loaded:
    import json

    try:
        raw = json.loads(text)
    except RecursionError:
        return Loaded(refused="nested too deeply")
    except ValueError:
        cut = re.match(r'\s*(?:\{\s*"|\[\s*[\[{"])', text)  # starts as JSON, not as a log
        return Loaded(refused="truncated JSON" if cut else "")
    return Loaded(flight_dump.read(raw)) if flight_dump.is_dump(raw) else Loaded(json=raw)


# ------------------------------------------------------------------------ pickles


class _List:
    """Stands for torch's ``build_intlist`` and the like; no attribute of it can be set."""

    __slots__ = ()

    def __call__(self, numbers: Any) -> Any:
        if type(numbers) is not list:
            raise Refused("asks for a function call; only plain data is read")
        return numbers


_LIST = _List()


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module}.{name}"
        if wanted not in _LISTS:
            shown = "".join(c if c.isprintable() else "?" for c in wanted[:120])
            raise Refused(f"asks for {shown}; only plain data is read")
        return _LIST

    def persistent_load(self, _: Any) -> Any:
        raise Refused("asks for an external object; only plain data is read")


def plain_data(data: bytes) -> Any:
    """The value that a pickle of plain data describes. Raises Refused, or MemoryError.

    Only for a process that may be lost.
    """
    try:
        # From a file that cannot peek, the unpickler reads each opcode alone: half as fast.
        value = _Plain(io.BufferedReader(io.BytesIO(data))).load()
    except (Refused, MemoryError):
        raise
    except (EOFError, pickle.UnpicklingError):
        raise Refused("truncated or not a pickle") from None
    except Exception as error:  # of any kind, whatever a damaged file leads to
        raise Refused(f"not a pickle of plain data ({type(error).__name__})") from None
    if value is _LIST:
        raise Refused("not a pickle of plain data")
    return value


# ------------------------------------------------------------------------ the process


class Answers(pickle.Pickler):
    """Sends the members of a large group once, however many dumps list them: the dumps of N ranks
    list N members of the world group each. A persistent id is (number, members or None)."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._sent: dict[tuple[int, ...], int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, list[int] | None] | None:
        if type(obj) is not tuple or len(obj) < _MANY:
            return None
        number = self._sent.get(obj)
        if number is not None:
            return number, None
        self._sent[obj] = len(self._sent)
        return self._sent[obj], [*obj]


def main() -> None:
    """Reads the files named on stdin until the last one, or until a limit ends the process."""
    paths = [os.fsdecode(name) for name in sys.stdin.buffer.read().split(b"\0") if name]
    _confine()
    answers = Answers(sys.stdout.buffer)
    for path in paths:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            result = load(path)
        except MemoryError:
            result = Loaded(refused=f"needs more than {MEMORY >> 30} GiB of memory")
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.dump(result)
        answers.clear_memo()
        sys.stdout.buffer.flush()


def _confine() -> None:
    """Limits this process, and turns off the garbage collector: it reads faster without."""
    gc.disable()
    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = 0
    if sys.platform == "linux":
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123
            used = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or used + MEMORY < most:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, most))
