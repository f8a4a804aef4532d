"""The guard's side channel between the ranks of one process group: exchanges a few numbers.

It is a separate gloo group on the CPU, whatever the job's backend. It is not in torch's registry
(it uses no name and involves no other ranks), so its members can create it alone. They do so at
their first exchange, where the reduction would synchronise them anyway. A rank that waits longer
than a slice marks this in the job's store and reads other ranks' notices there; otherwise the store
is not used.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from datetime import timedelta
from typing import Any, List, Optional, Set, Tuple

import torch
import torch.distributed as dist

_WIDTH = 3  # int64 numbers per exchange
_SLICE = 1.0  # seconds
_PATIENCE = 3.0  # seconds to wait for the notice of a rank that closed its side
_LEFT_OVER = 60.0  # seconds after the timeout until the backend itself aborts an exchange


class Absent(Exception):
    """``members`` (indices in the group) did not come within the timeout; () if all came."""

    def __init__(self, members: Tuple[int, ...]) -> None:
        super().__init__(members)
        self.members = members


class Lost(Exception):
    """The connection to a member broke, and no rank has posted a reason."""


class Told(Exception):
    """Another rank posted a notice on the board."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind = kind
        self.text = text


class Board:
    """One notice that all ranks of the job can read; the first one posted stays."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, kind: str, text: str) -> Tuple[str, str]:
        """Posts a notice; returns the current one: this or an earlier one."""
        there = self._store.compare_set("notice", "", json.dumps([kind, text]))
        return _notice(there)

    def read(self) -> Optional[Tuple[str, str]]:
        return _notice(self._store.get("notice")) if self._store.check(["notice"]) else None

    def wait(self, seconds: float) -> Optional[Tuple[str, str]]:
        end = time.monotonic() + seconds
        found = self.read()
        while found is None and time.monotonic() < end:
            time.sleep(0.05)
            found = self.read()
        return found


def _notice(raw: Any) -> Tuple[str, str]:
    kind, text = json.loads(raw)
    return str(kind), str(text)


class Side:
    """One group's channel on one rank. ``store`` is its own part of the job's store; ``rank`` and
    ``size`` refer to the group; after ``timeout`` seconds a missing rank counts as absent."""

    def __init__(self, store: Any, board: Board, rank: int, size: int, timeout: float) -> None:
        self._store = store
        self._board = board
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._slice = min(_SLICE, timeout / 4)
        self._group: Any = None
        self._open = False  # an exchange is in progress
        self._count = 0
        self._mine = torch.zeros(_WIDTH, dtype=torch.int64)
        self._all = [torch.zeros(_WIDTH, dtype=torch.int64) for _ in range(size)]

    def exchange(self, numbers: List[int]) -> List[List[int]]:
        """Returns every member's three int64 numbers in group order. Raises Absent, Lost, Told."""
        if self._group is None:
            self._meet()
        for at, number in enumerate(numbers):
            self._mine[at] = number
        self._gather(self._all, self._mine)
        return [one.tolist() for one in self._all]

    def exchange_texts(self, text: str) -> List[str]:
        """Returns every member's text in group order; all call it after an :meth:`exchange`."""
        raw = text.encode()
        lengths = [row[0] for row in self.exchange([len(raw), 0, 0])]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        every = [torch.zeros_like(mine) for _ in range(self._size)]
        self._gather(every, mine)
        return [
            bytes(one[:length].tolist()).decode()
            for one, length in zip(every, lengths)  # noqa: B905 - Python 3.9
        ]

    def close(self) -> None:
        """Closes the channel; waiting peers notice immediately. Closing during an exchange would
        block until the backend aborts it, so that group is kept until the process ends."""
        if self._open and self._group is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None

    # ------------------------------------------------------------------ waiting

    def _meet(self) -> None:
        """Creates the group once all members are there: torch's own wait cannot be aborted."""
        self._store.set(self._here(0, self._rank), "")
        began, pause, waiting = time.monotonic(), 0.001, _Waiting(self, 0)
        everyone = [self._here(0, member) for member in range(self._size)]
        while not self._store.check(everyone):
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            if time.monotonic() - began >= self._slice:
                waiting.look(time.monotonic() - began)
        limit = timedelta(seconds=self._timeout + _LEFT_OVER)
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("pairs", self._store), self._rank, self._size, limit
        )

    def _gather(self, every: List[torch.Tensor], mine: torch.Tensor) -> None:
        self._count += 1
        self._open = True
        try:
            work = self._group.allgather([every], [mine])
        except RuntimeError as error:
            raise self._why(error) from error
        self._finish(work)
        self._open = False

    def _finish(self, work: Any) -> None:
        began, waiting = time.monotonic(), _Waiting(self, self._count)
        while True:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=self._slice))
                return
            if work.is_completed():  # just now, or with an error: wait() tells which
                self._open = False
                try:
                    work.wait()
                    return
                except RuntimeError as error:
                    raise self._why(error) from error
            waiting.look(time.monotonic() - began)

    def _why(self, error: Exception) -> Exception:
        notice = self._board.wait(_PATIENCE)
        return Lost(str(error)) if notice is None else Told(*notice)

    def _here(self, count: int, member: int) -> str:
        return f"here/{count}/{member}"


class _Waiting:
    """One member's wait in exchange ``count`` (0: for the creation of the group)."""

    def __init__(self, side: Side, count: int) -> None:
        self._side = side
        self._count = count
        self._marked = False
        self._missing: Set[int] = set()

    def look(self, waited: float) -> None:
        """Checks the board; call it about once per slice. Raises Told, and Absent for members that
        two checks after the timeout miss: a member that has just come marks this within a slice."""
        side = self._side
        notice = side._board.read()
        if notice is not None:
            raise Told(*notice)
        if not self._marked:
            side._store.set(side._here(self._count, side._rank), "")
            self._marked = True
        if waited < side._timeout:
            return
        members = range(side._size)
        missing = {m for m in members if not side._store.check([side._here(self._count, m)])}
        if self._missing and missing:
            raise Absent(tuple(sorted(missing)))
        self._missing = missing
