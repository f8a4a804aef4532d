"""Records of which files of installed packages this rank runs a function, each at first use.

The file of a killed rank is complete up to the kill. Only the thread that calls :func:`start` and
Python threads started later are traced; autograd's own threads (the backward on a GPU, including
what checkpointing recomputes there) are not.
"""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Callable, Optional, Set, Tuple

from moediag.protocol import executed_file


def start(folder: str, rank: int) -> Callable[[], None]:
    """Starts recording; returns the function that ends it. Before Python 3.12 every call of a
    function costs a fraction of a microsecond; since then only its first call. Raises OSError if
    the file cannot be created."""
    path = Path(folder) / executed_file(rank)
    log = _Log(os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
    return _monitor(log) if sys.version_info >= (3, 12) else _profile(log)


class _Log:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._roots = _roots()
        self.known: Set[str] = set()
        """Files, by the names in code objects."""

    def code(self, code: CodeType) -> None:
        if code.co_filename in self.known or code.co_name == "<module>":
            return
        self.known.add(code.co_filename)
        name = _relative(code.co_filename, self._roots)
        if name is not None:
            # Ignore a full disk here; writers of more important files report it.
            with contextlib.suppress(OSError):
                os.write(self._fd, name.encode("utf-8", "surrogateescape") + b"\n")


def _profile(log: _Log) -> Callable[[], None]:
    known = log.known

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename not in known:
            log.code(frame.f_code)

    threading.setprofile(seen)
    sys.setprofile(seen)

    def stop() -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    return stop


def _monitor(log: _Log) -> Callable[[], None]:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    tool = monitoring.PROFILER_ID
    monitoring.use_tool_id(tool, "moediag")

    def seen(code: CodeType, offset: int) -> Any:
        log.code(code)
        return monitoring.DISABLE

    monitoring.register_callback(tool, monitoring.events.PY_START, seen)
    monitoring.set_events(tool, monitoring.events.PY_START)

    def stop() -> None:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)

    return stop


def _roots() -> Tuple[Tuple[str, bool], ...]:
    """Returns the import folders, innermost first, each with whether it holds packages:
    site-packages is inside the standard library's folder."""
    found = {str(Path(entry).absolute()) for entry in sys.path if entry}
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return tuple((root, root not in standard) for root in sorted(found, key=len, reverse=True))


def _relative(filename: str, roots: Tuple[Tuple[str, bool], ...]) -> Optional[str]:
    """Returns the path as imported, e.g. ``transformers/modeling_utils.py``; None for the standard
    library, moediag itself and code without a file."""
    if not filename.endswith(".py"):
        return None
    for root, packages in roots:
        if filename.startswith(root + os.sep):
            name = filename[len(root) + 1 :].replace(os.sep, "/")
            return None if not packages or name.startswith("moediag/") else name
    return None
