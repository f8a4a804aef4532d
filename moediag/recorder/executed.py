"""Which functions of the installed packages this rank runs, and which classes its model is made
of, each written down the first time.

A rank that is killed has written all that it ran until then. Only the thread that calls
:func:`start` and Python threads that start later are seen: what autograd's own threads run (the
backward on a GPU, and so what checkpointing recomputes there) is not.
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
    """Begins; returns what ends it. Before 3.12 every call of a function costs a fraction of a
    microsecond, later only the first call of each. Raises OSError when the file cannot be made."""
    path = Path(folder) / executed_file(recorder.rank)
    log = _Log(os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
    for module in list(sys.modules.values()):
        # Not getattr: a lazy module would import what is asked of it.
        name = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(name, str):
            log.line(name, 0)
    recorder.on_module = log.module
    return _monitor(log) if sys.version_info >= (3, 12) else _profile(log)


class _Log:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._roots = _roots()
        self._files: Dict[str, Optional[int]] = {}  # None: none of an installed package
        self._modules: Set[Tuple[type, str]] = set()

    def code(self, code: CodeType) -> None:
        self.line(code.co_filename, 0 if code.co_name == "<module>" else code.co_firstlineno)

    def line(self, filename: str, line: int) -> None:
        number = self._file(filename)
        if number is not None:
            self._write([number, line])

    def module(self, module: Any, fqn: str) -> None:
        """The classes of ``module``, the outermost of layers and experts alike standing for all;
        wrappers change an object's class to one derived from its own."""
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
        # A full disk is noticed by those whose files matter more.
        with contextlib.suppress(OSError):
            os.write(self._fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _profile(log: _Log) -> Callable[[], None]:
    # By id: hashing a code object takes its whole content. Kept, so that no id is used again.
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
    """The folders that modules are imported from, the innermost first, each with whether it is
    one of packages: site-packages lie inside the standard library's own folder."""
    found = {str(Path(entry).absolute()) for entry in sys.path if entry}
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return tuple((root, root not in standard) for root in sorted(found, key=len, reverse=True))


def _relative(filename: str, roots: Tuple[Tuple[str, bool], ...]) -> Optional[str]:
    """As imported, e.g. ``transformers/modeling_utils.py``; None for the standard library,
    moediag itself and code without a file."""
    if not filename.endswith(".py"):
        return None
    for root, packages in roots:
        if filename.startswith(root + os.sep):
            name = filename[len(root) + 1 :].replace(os.sep, "/")
            return None if not packages or name.startswith("moediag/") else name
    return None
