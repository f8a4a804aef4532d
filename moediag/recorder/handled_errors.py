"""Tells which exception the main thread handles when the rank is examined: a rank that waits inside
an ``except`` block has swallowed an exception that its peers did not have. Once the block has
ended, the interpreter no longer knows the exception."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from moediag.masking import masked
from moediag.recorder.core import Recorder
from moediag.recorder.user_lines import UserLines


def install(recorder: Recorder) -> None:
    """Needs Python 3.10; an older one is not asked."""
    current = getattr(sys, "_current_exceptions", None)
    if current is None:
        return
    user = recorder.user_lines

    def tell() -> None:
        found = current().get(threading.main_thread().ident)
        error = found[1] if isinstance(found, tuple) else found
        if isinstance(error, Exception):
            _tell(recorder, error, user)

    recorder.on_capture.append(tell)


def _tell(recorder: Recorder, error: Exception, user: UserLines) -> None:
    trace: Any = error.__traceback__
    # Its first frame is the one that handles it. Libraries handle exceptions of their own.
    if trace is None or not user.is_user(trace.tb_frame.f_code.co_filename):
        return
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if user.is_user(code.co_filename):
            where = f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    recorder.log.event(
        "handling", type=type(error).__name__, message=masked(str(error))[:2000], where=where
    )
