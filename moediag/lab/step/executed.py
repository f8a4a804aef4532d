"""Records which functions of installed packages this rank runs and which classes its model uses,
each at first use.

The file of a killed rank is complete up to the kill. Only the thread that calls :func:`start` and
Python threads started later are traced; autograd's own threads (the backward on a GPU, including
what checkpointing recomputes there) are not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import sysconfig
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from moediag.protocol import executed_file
from moediag.recorder.core import Recorder

_NUMBER = re.compile(r"(^|(?<=\.))\d+(?=\.|$)")  # of a layer or an expert


def start(folder: str, recorder: Recorder) -> Callable[[], None]:
    """Starts recording; returns the function that ends it. Before Python 3.12 every call of a
    function costs a fraction of a microsecond; since then only its first call. Raises OSError if
    the file cannot be created."""
    path = Path(folder) / executed_file(recorder.rank)
    log = _Log(os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
    for module in list(sys.modules.values()):
        # Not getattr, which makes a lazy module import the attribute.
        name = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(name, str):
            log.line(name, 0)
    recorder.on_module = log.module
    return _monitor(log) if sys.version_info >= (3, 12) else _profile(log)


class _Log:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._roots = _roots()
        self._files: Dict[str, Optional[int]] = {}  # None: not in an installed package
        self._modules: Set[Tuple[type, str]] = set()

    def code(self, code: CodeType) -> None:
        self.line(code.co_filename, 0 if code.co_name == "<module>" else code.co_firstlineno)

    def line(self, filename: str, line: int) -> None:
        number = self._file(filename)
        if number is not None:
            self._write([number, line])

    def module(self, module: Any, fqn: str) -> None:
        """Writes the classes of ``module``, once for equal layers and experts. All base classes are
        written, because wrappers replace an object's class by a subclass."""
        place = _NUMBER.sub("*", fqn)
        if (type(module), place) in self._modules:
            return
        self._modules.add((type(module), place))
        for cls in type(module).__mro__:
            filename = getattr(sys.modules.get(cls.__module__), "__dict__", {}).get("__file__")
            number = self._file(filename) if isinstance(filename, str) else None
            if number is not None:
                self._write([number, cls.__qualname__, place])

    def _file(self, filename: str) -> Optional[int]:
        if filename in self._files:
            return self._files[filename]
        name = _relative(filename, self._roots)
        number = None if name is None else len(self._files)
        self._files[filename] = number
        if number is not None:
            self._write([number, name])
        return number

    def _write(self, line: List[Any]) -> None:
        # Ignore a full disk here; writers of more important files report it.
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _profile(log: _Log) -> Callable[[], None]:
    # By id: hashing a code object reads all of it. Keeping the objects prevents reuse of an id.
    known: Dict[int, CodeType] = {}

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if id(code) not in known:
                known[id(code)] = code
                log.code(code)

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
