"""The calls in one dump of PyTorch's Flight Recorder as columns of numbers.

Columns save memory: 1,024 ranks record two million calls, which become objects only where the
diagnosis needs them (:mod:`moediag.evidence.flight_recorder`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

SCHEDULED, STARTED, COMPLETED = 0, 1, 2


class NoDump(ValueError):
    """The data is not a Flight Recorder dump; the message says what is missing."""


class Kind(NamedTuple):  # a frozen dataclass takes ten times as long to pickle
    """What many calls have in common. ``group``: this process's own name of the group; ``peer``:
    of send and recv, counted within the group; ``site``: "file.py:12 function"."""

    group: str
    op: str
    numel_in: int
    numel_out: int
    dtype: str
    site: str = ""
    peer: int | None = None


class OwnGroup(NamedTuple):
    """A group as its process knows it; no ``ranks``: not known."""

    desc: str
    ranks: tuple[int, ...] = ()


@dataclass(slots=True)
class Dump:
    """One row for each call (a batch of collectives is one), oldest first.

    ``index``: count of all records of the process; ``position``: count within the group from 0,
    collectives and point-to-point calls each for themselves; ``state``: SCHEDULED, STARTED or
    COMPLETED; ``created``: nanoseconds of the wall clock. ``places``: groups in which a send or
    receive tells this process's own place. ``batched``: groups whose positions were corrected for
    batches of sends and receives. ``unreadable``: entries that could not be understood. ``status``:
    by group, how many calls were issued and how many of them completed. ``timed_out``: the watchdog
    gave up on a call. ``timeout``: the longest timeout of the calls, in seconds. ``written``: when
    the dump was written, in nanoseconds of the wall clock, 0 if it does not tell.
    """

    version: str = ""
    library: str = ""
    backend: str = ""
    groups: dict[str, OwnGroup] = field(default_factory=dict)
    kinds: list[Kind] = field(default_factory=list)
    kind: array[int] = field(default_factory=lambda: array("l"))
    index: array[int] = field(default_factory=lambda: array("q"))
    position: array[int] = field(default_factory=lambda: array("q"))
    state: bytearray = field(default_factory=bytearray)
    created: array[int] = field(default_factory=lambda: array("q"))
    places: dict[str, int] = field(default_factory=dict)
    batched: set[str] = field(default_factory=set)
    status: dict[str, tuple[int, int]] = field(default_factory=dict)
    timed_out: bool = False
    timeout: float = 0.0
    written: int = 0
    unreadable: int = 0
    open_only: bool = False  # completed calls were left out
    recording: bool = True  # False: the dump was taken without its calls

    @property
    def contradicts(self) -> bool:
        """The dump lists no call although some are open: its calls are not known."""
        return not self.kind and any(issued > done for issued, done in self.status.values())

    def incomplete(self) -> Iterator[tuple[str, int]]:
        """Group and position of each incomplete call."""
        for row, state in enumerate(self.state):
            if state != COMPLETED:
                yield self.kinds[self.kind[row]].group, self.position[row]

    @property
    def wrapped(self) -> bool:
        """The ring came round: what was before its first row is not known."""
        return bool(self.index) and self.index[0] > 0
