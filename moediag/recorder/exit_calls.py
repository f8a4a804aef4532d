"""Records where the program ends its process itself. ``os._exit`` leaves neither an exception nor
the interpreter's end, and an exit code of 0 does not show whether the program was done."""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import Any, Callable

from moediag.recorder.core import Recorder


def install(recorder: Recorder) -> None:
    recorder.patches.replace(os, "_exit", functools.partial(_telling, recorder, "os._exit"))
    recorder.patches.replace(sys, "exit", functools.partial(_telling, recorder, "sys.exit"))


def _telling(recorder: Recorder, name: str, original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def leave(*status: Any) -> Any:
        try:
            if name == "sys.exit" and threading.current_thread() is not threading.main_thread():
                return original(*status)  # it ends the thread only
            code = repr(status[0]) if status and isinstance(status[0], int) else ""
            recorder.leaves(f"{name}({code})", sys._getframe(1))
        except Exception as error:
            recorder.fault("exits", error)
        return original(*status)

    return leave
