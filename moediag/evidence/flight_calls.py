"""The calls in one dump of PyTorch's Flight Recorder as columns of numbers.

Columns save memory: 1,024 ranks record two million calls, which become objects only where the
diagnosis needs them (:mod:`moediag.evidence.flight_recorder`).
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class Dump:
    """One row for each call (a batch of collectives is one), oldest first. No dataclass: the reader
    of pickles starts sooner without."""

    def __init__(self, version: str = "", library: str = "") -> None:
        self.version = version
        self.library = library
        self.backend = ""
        self.groups: dict[str, OwnGroup] = {}
        self.kinds: list[Kind] = []
        self.kind = array("l")
        #: Count of all records of the process.
        self.index = array("q")
        #: Count within the group from 0, collectives and point-to-point calls each for themselves.
        self.position = array("q")
        #: SCHEDULED, STARTED or COMPLETED.
        self.state = bytearray()
        #: Nanoseconds of the wall clock.
        self.created = array("q")
        #: Groups in which a send or receive tells this process's own place.
        self.places: dict[str, int] = {}
        #: Groups whose positions were corrected for batches of sends and receives.
        self.batched: set[str] = set()
        #: By group, how many calls were issued and how many of them completed.
        self.status: dict[str, tuple[int, int]] = {}
        #: The watchdog gave up on a call.
        self.timed_out = False
        #: The longest timeout of the calls, in seconds.
        self.timeout = 0.0
        #: When the dump was written, in nanoseconds of the wall clock; 0 if it does not tell.
        self.written = 0
        #: Entries that could not be understood.
        self.unreadable = 0
        #: Completed calls were left out.
        self.open_only = False
        #: False: the dump was taken without its calls.
        self.recording = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dump) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

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
