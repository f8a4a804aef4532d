"""Under ``watch --laws``, a program of one process that never creates a process group is recorded
as rank 0 of 1, from the first optimizer on: laws hold there, too."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, Callable

from moediag import protocol

# A launcher set one of these: the process may have peers.
_LAUNCHED = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def expect(kind: Any, start: Callable[[], None]) -> None:
    """Calls ``start`` when this process constructs its first optimizer, a ``kind``, if it may be a
    program of one process: no launcher started it, and it is no child of the program."""
    own = str(os.getpid())
    if protocol.ENV_LAWS not in os.environ or os.environ.get(protocol.ENV_RANK_PID, own) != own:
        return
    size = os.environ.get("WORLD_SIZE")
    if size != "1" and (size or any(name in os.environ for name in _LAUNCHED)):
        return
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return
    original = kind.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if kind.__init__ is __init__:
            kind.__init__ = original
            start()
        original(self, *args, **kwargs)

    kind.__init__ = __init__
