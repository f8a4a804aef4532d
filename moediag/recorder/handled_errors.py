"""Tells which exception the main thread handles when the rank is examined: a rank that waits inside
an ``except`` block has swallowed an exception that its peers did not have. Once the block has
ended, the interpreter no longer knows the exception. Also records exceptions that end a thread:
the rank lives on without it."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from moediag.masking import masked
from moediag.recorder.core import Recorder

_MOST = 8  # threads of one rank


def install(recorder: Recorder) -> None:
    """Needs Python 3.10 for the main thread; an older one is not asked."""
    _follow_threads(recorder)
    current = getattr(sys, "_current_exceptions", None)
    if current is None:
        return

    def tell() -> None:
        found = current().get(threading.main_thread().ident)
        error = found[1] if isinstance(found, tuple) else found
        trace: Any = error.__traceback__ if isinstance(error, Exception) else None
        # Its first frame is the one that handles it. Libraries handle exceptions of their own.
        if trace is not None and recorder.user_lines.is_user(trace.tb_frame.f_code.co_filename):
            _tell(recorder, "handling", error)

    recorder.on_capture.append(tell)


def _follow_threads(recorder: Recorder) -> None:
    previous, told = threading.excepthook, []

    @functools.wraps(previous)
    def hook(args: Any) -> None:
        if not isinstance(args.exc_value, (SystemExit, type(None))) and len(told) < _MOST:
            told.append(args.thread)
            try:
                name = getattr(args.thread, "name", "")
                _tell(recorder, "thread_error", args.exc_value, thread=name)
            except Exception as error:
                recorder.fault("exceptions of threads", error)
        previous(args)

    def restore() -> None:
        if threading.excepthook is hook:
            threading.excepthook = previous

    threading.excepthook = hook
    recorder.on_uninstall.append(restore)


def _tell(recorder: Recorder, kind: str, error: BaseException, **more: str) -> None:
    """``where``: the innermost line of the user's code, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if recorder.user_lines.is_user(frame.filename)]
    where = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in own[-1:]]
    message = masked(str(error))[:2000]
    recorder.log.event(
        kind, bool(more), type=type(error).__name__, message=message, where="".join(where), **more
    )
