"""A rank never outlives its launcher, and says where it stood when something ends it."""

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

    On SIGTERM the stacks are written and the signal then does what it would have done; SIGUSR1
    only writes them. Never raises: a rank without a lifeline is better than no rank.
    """
    die_with_parent()
    _stacks_to(str(Path(folder) / stacks_file(rank)))


def die_with_parent() -> bool:
    """Asks the kernel to kill this process when its parent dies (Linux); True when it will.

    The request belongs to the thread that made this process: a launcher thread that ends kills
    its ranks too, which is what a launcher that waits for them wants.
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
    # The parent may have died between fork and here; then no signal will ever come.
    if os.getppid() != _parent or (_parent == 1 and not _launcher_is_init()):
        os._exit(1)
    return done


def parent_gone() -> bool:
    """Whether the parent seen by :func:`attach` is no longer the parent; False without attach."""
    return _parent is not None and os.getppid() != _parent


def _launcher_is_init() -> bool:
    """In a container the launcher itself may be process 1; any other process 1 adopted us."""
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
    """For a job that is not ours: only where it has no handler of its own. On SIGTERM the stacks
    are written and its own handler then runs. Raises nothing."""
    free = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    _stacks_to(
        str(Path(folder) / stacks_file(rank)),
        enable=not faulthandler.is_enabled(),
        numbers=(signal.SIGTERM, signal.SIGUSR1) if free else (signal.SIGTERM,),
    )
