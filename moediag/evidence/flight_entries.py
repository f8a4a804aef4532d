"""The entries of a Flight Recorder dump, one after the other, as rows of its columns.

Known from torch's ``FlightRecorder.hpp`` and from real dumps (torch 2.13, gloo):

- gloo's ``state`` stays ``scheduled``; a completed call is ``retired``. On NCCL a call that is
  retired but not completed has timed out.
- gloo's reduce-scatter is recorded as the all-reduce that it uses; its send and recv are not
  recorded at all.
- What was issued as one batch shares ``collective_seq_id`` (or ``p2p_seq_id``), and only the
  entry ``coalesced`` that closes the batch is ever completed.
- Older releases count a batch of sends and receives as a collective too. How many of these there
  are differs between ranks, so they are taken out again.
- The recorder looks at the events of a call when the watchdog retires it, and at those of all other
  calls when a dump is written: a start or completion of a call that is not retired has the dump's
  own time (the start needs ``TORCH_NCCL_ENABLE_TIMING``).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from moediag.evidence.flight_calls import (
    COMPLETED,
    SCHEDULED,
    STARTED,
    Dump,
    Kind,
    NoDump,
)
from moediag.evidence.flight_kinds import GroupCount, Kinds, Known

_FOREVER = 1 << 62  # nanoseconds
_ONE_LOOK = 10**9  # nanoseconds that it takes at most to look at all calls

_STATES = {"completed": COMPLETED, "started": STARTED}
_ROW = struct.Struct("=3q").pack
# What is looked up in every entry, and what stands for what an entry lacks.
_OF_MOST = (
    "profiling_name", "process_group", "input_sizes", "output_sizes", "input_dtypes", "frames",
    "collective_seq_id", "record_id", "time_discovered_completed_ns", "retired", "time_created_ns",
)  # fmt: skip
_COMPARED = 6  # of these tell what an entry has in common with others
_ABSENT: dict[str, Any] = dict.fromkeys(_OF_MOST) | dict.fromkeys(_OF_MOST[2:6], ())
_DAMAGE = (
    KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, struct.error,
)  # fmt: skip


class Entries:
    """Adds entries to the columns of ``dump``."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.kinds = Kinds(dump)
        self.looked_at = (_FOREVER, 0)  # the first and the last look at a call that is not retired
        self.last = -1  # index of the last row
        self.rows = bytearray()  # index, position and time of creation of each
        self.numbers: list[int] = []  # of the kind of each
        self.states = bytearray()

    def add(self, entries: Sequence[Any]) -> None:
        """Adds a row for each entry, or more about an older one. Invalid ones are only counted.
        Raises NoDump.

        Nearly all of the time that a dump takes is spent in this loop, so it is written for speed.
        """
        fields_of = _fields_of(entries)
        kind_of, row = self.kinds.of, self.row
        expected = 0
        last: Known | None = None  # what the entry before had in common with others
        follower: dict[Known | None, Known] = {}
        for e in entries:
            try:
                try:
                    fields = fields_of(e)
                except KeyError:  # of another release, or without stack traces
                    fields = fields_of({**_ABSENT, **_of_older(e), **e})
                # A program repeats its calls, so it is tried first what followed the last time.
                found = follower.get(last)
                if found is None or fields[:_COMPARED] != found.values:
                    found = follower[last] = kind_of(e, *fields[:_COMPARED])
                last = found
                seq, record, at, retired, created = fields[_COMPARED:]
                of_group = found.group
                if record != expected:  # calls between two numbers had completed
                    record = self.numbered(record, expected)
                expected = record + 1
                done = retired is True and type(at) is int and at > 0
                state = COMPLETED if done else self.state(e)
                if found.in_batch and (found.kind.op != "coalesced" or _closes(e, of_group)):
                    self.point_to_point(e, found, seq, record, state, created)
                elif seq == of_group.seq and of_group.row is not None:
                    empty = not (fields[2] or fields[3])
                    closes = found.kind.op.endswith("coalesced") or empty
                    self.more(of_group.row, found.number, closes, state)
                else:
                    position = seq - 1 - of_group.shift
                    of_group.row = row(found.number, position, record, state, created)
                    of_group.seq = seq
            except NoDump:
                raise
            except _DAMAGE:
                self.dump.unreadable += 1
        self.close()

    def numbered(self, record: Any, expected: int) -> int:
        """The number of a record that is not the next one, or that has none."""
        if type(record) is not int or not 0 <= record < _FOREVER:
            return self.last + 1
        self.dump.open_only |= self.last >= 0 and record > expected
        return record

    def row(self, number: int, position: int, record: int, state: int, created: Any) -> int:
        """Adds a row; returns its number."""
        index = record if record > self.last else self.last + 1
        self.rows += _ROW(index, position, created or 0)
        self.last = index
        self.numbers.append(number)
        self.states.append(state)
        return len(self.numbers) - 1

    def close(self) -> None:
        """Fills the columns."""
        dump, numbers = self.dump, array("q", bytes(self.rows))
        dump.index, dump.position, dump.created = (numbers[column::3] for column in range(3))
        dump.kind, dump.state = array("l", self.numbers), self.states
        first, last = self.looked_at
        # A recorder that looks at the calls while they run does not tell when it wrote the dump.
        dump.written = last if 0 < last <= first + _ONE_LOOK else 0

    def more(self, row: int, number: int, closes: bool, state: int) -> None:
        """Adds another collective of the same batch, or the entry that closes it."""
        states, numbers = self.states, self.numbers
        states[row] = max(states[row], state) if closes else min(states[row], state)
        if closes:
            return
        first, second = self.dump.kinds[numbers[row]], self.dump.kinds[number]
        numbers[row] = self.kinds.intern(
            Kind(
                first.group,
                first.op if first.op == second.op else "coalesced",
                first.numel_in + second.numel_in,
                first.numel_out + second.numel_out,
                first.dtype if first.dtype == second.dtype else "",
                first.site,
            )
        )

    def point_to_point(
        self, e: dict[str, Any], known: Known, seq: int, record: int, state: int, created: Any
    ) -> None:
        group, of_p2p = known.group, _number(e.get("p2p_seq_id", 0))
        # With a first index above 0, earlier calls are unknown.
        before = group.seq if group.seq is not None else seq if any(self.rows[:8]) else 0
        if seq > before:  # an older release: the batch was counted as a collective
            group.shift += seq - before
            self.dump.batched.add(known.kind.group)
        group.seq = max(seq, before)
        group.row = None  # a collective after this batch never has the number that the batch took
        if known.kind.op == "coalesced":
            for row in group.batch_rows:
                self.states[row] = max(self.states[row], state)
            return
        if group.batch != of_p2p:
            group.batch, group.batch_rows = of_p2p, []
        group.batch_rows.append(self.row(known.number, of_p2p - 1, record, state, created))

    def state(self, e: dict[str, Any]) -> int:
        at = e.get("time_discovered_completed_ns")
        if e.get("retired") is False:
            seen = at or e.get("time_discovered_started_ns")
            if type(seen) is int and 0 < seen < _FOREVER:
                first, last = self.looked_at
                self.looked_at = min(first, seen), max(last, seen)
        if type(at) is int and at > 0:
            return COMPLETED
        told = e.get("state")
        state = _STATES.get(told, SCHEDULED) if type(told) is str else SCHEDULED
        retired = e.get("retired") is True
        if retired and self.dump.backend == "gloo":
            return COMPLETED
        self.dump.timed_out |= retired and state != COMPLETED
        return state


def _fields_of(entries: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Gets what most entries need, by the names as they are in the first entry: a lookup is faster
    with the very object that the dictionary holds."""
    own = dict(zip(*[entries[0]] * 2, strict=True)) if entries and type(entries[0]) is dict else {}
    return itemgetter(*(own.get(name, name) for name in _OF_MOST))


def _closes(e: dict[str, Any], group: GroupCount) -> bool:
    """Whether ``coalesced`` closes a batch of sends and receives."""
    if "is_p2p" in e:
        return bool(e["is_p2p"])
    return group.batch is not None and group.batch == _number(e.get("p2p_seq_id", 0))


def _of_older(e: Mapping[str, Any]) -> dict[str, Any]:
    """What an older release writes under another name."""
    found = {"collective_seq_id": e.get("seq_id")}
    if "process_group" not in e:
        found["process_group"] = (str(_number(e["pg_id"])), "")
    return found


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("number")
    return value
