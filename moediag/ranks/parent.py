"""Ends each process of a launch with the process that started it.

Linux sends the parent-death signal when the *thread* that forked ends, so it is only used if that
is a main thread; other processes watch a pipe or the parent's pid.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


def die_with_parent(parent: int) -> None:
    """Requests SIGKILL for this process when the thread that forked it ends. ``parent``: its pid.
    If the parent has already ended, no signal would come, so this ends the process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def allow_tracing() -> None:
    """Allows py-spy and pystack of the same user to inspect this process, even if Yama's scope 1
    allows only its ancestors; no effect elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def default_signals() -> None:
    """Resets signal handlers that a fork inherited. SIGINT ends a rank at once instead of raising a
    KeyboardInterrupt that would look like a failure of the rank."""
    signal.set_wakeup_fd(-1)
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(sig, signal.SIG_DFL)
