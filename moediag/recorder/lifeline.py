"""Ends a rank when its launcher dies, and writes its stacks when a signal ends it."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import IO, Optional, Tuple

from moediag.protocol import stacks_file

_PR_SET_PDEATHSIG = 1
_parent: Optional[int] = None
_stacks: Optional[IO[str]] = None  # faulthandler keeps the descriptor, so the file must live


def attach(folder: str, rank: int) -> None:
    """Ties this process to its parent and sends ``faulthandler`` output to ``rank-N.stacks.txt``.

    SIGTERM writes the stacks and then has its normal effect; SIGUSR1 only writes them. Never
    raises: a rank without a lifeline is better than no rank.
    """
    die_with_parent()
    _stacks_to(str(Path(folder) / stacks_file(rank)))


def die_with_parent() -> bool:
    """Asks the kernel to kill this process when its parent dies (Linux); returns whether it will.

    The kernel ties this to the thread that created the process: if that launcher thread ends, its
    ranks are killed, too. A launcher waits for its ranks, so that is intended.
    """
    global _parent
    _parent = os.getppid()
    if not sys.platform.startswith("linux"):
        return False
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        done = bool(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        done = False
    # If the parent died between fork and here, the signal will never come.
    if os.getppid() != _parent or (_parent == 1 and not _launcher_is_init()):
        os._exit(1)
    return done


def parent_gone() -> bool:
    """Whether the parent has changed since :func:`attach`; False without attach."""
    return _parent is not None and os.getppid() != _parent


def _launcher_is_init() -> bool:
    """Whether process 1 is the launcher, as in a container; otherwise it adopted this process."""
    try:
        with open("/proc/1/cmdline", "rb") as file:  # noqa: PTH123
            command = file.read()
    except OSError:
        return True
    return any(word in command for word in (b"python", b"torchrun", b"moediag", b"pytest"))


def _stacks_to(
    path: str,
    enable: bool = True,
    numbers: Tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1),
) -> None:
    global _stacks
    try:
        _stacks = open(path, "a", encoding="utf-8")  # noqa: SIM115, PTH123
        if enable:
            faulthandler.enable(file=_stacks, all_threads=True)
        for number in numbers:
            chain = number != signal.SIGUSR1
            faulthandler.register(number, file=_stacks, all_threads=True, chain=chain)
    except (OSError, ValueError, AttributeError, RuntimeError):
        pass


def stacks_beside_others(folder: str, rank: int) -> None:
    """Like :func:`attach` for a watched job, but keeps the job's own handlers: SIGTERM writes the
    stacks and then runs the job's handler. Never raises."""
    free = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    _stacks_to(
        str(Path(folder) / stacks_file(rank)),
        enable=not faulthandler.is_enabled(),
        numbers=(signal.SIGTERM, signal.SIGUSR1) if free else (signal.SIGTERM,),
    )
