"""One dump of PyTorch's Flight Recorder (format 2.x, pickle or JSON) as columns of numbers.

A dump is a ring buffer of the last calls of one process. All differences between torch releases
and backends are handled here: names of operations, how completion is recorded, operations that were
issued together. Columns save memory: 1,024 ranks record two million calls, which become objects
only where the diagnosis needs them (:mod:`moediag.evidence.flight_recorder`).

Known from torch's ``FlightRecorder.hpp`` and from real dumps (torch 2.13, gloo):

- gloo's ``state`` stays ``scheduled``; a completed call is ``retired``. On NCCL a call that is
  retired but not completed has timed out.
- gloo's reduce-scatter is recorded as the all-reduce that it uses; its send and recv are not
  recorded at all; ``pg_config`` is empty.
- What was issued as one batch shares ``collective_seq_id`` (or ``p2p_seq_id``), and only the
  entry ``coalesced`` that closes the batch is ever completed.
- Older releases count a batch of sends and receives as a collective too. How many of these there
  are differs between ranks, so they are taken out again.
- The recorder looks at the events of a call when the watchdog retires it, and at those of all other
  calls when a dump is written: a start or completion of a call that is not retired has the dump's
  own time (the start needs ``TORCH_NCCL_ENABLE_TIMING``).
- ``onlyActive`` leaves completed calls out; JSON then has no ``entries`` at all if nothing is open.
- ``pg_status`` counts the calls of each group that were enqueued and completed. Its keys are
  ``pg_id``, which the entries translate to names; it counts sends and receives separately, but
  shows the number of whichever came last.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from moediag.evidence import flight_status
from moediag.evidence.flight_names import plain_dtype, plain_op, plain_text, user_site

SCHEDULED, STARTED, COMPLETED = 0, 1, 2
MAX_ENTRIES = 1_000_000
_MAX_SHAPES = 20_000_000  # tensors in a whole dump
_MAX_FRAMES = 200
_MOST_UNSEEN = 1000  # open calls of a group that only pg_status counts
_MAX_MEMBERS = 3_000_000  # of all groups together
_FOREVER = 1 << 62  # nanoseconds
_ONE_LOOK = 10**9  # nanoseconds that it takes at most to look at all calls

_STATES = {"completed": COMPLETED, "started": STARTED}
_NAME = re.compile(
    r"^(?:(?P<backend>\w+):)?(?P<op>\S+)(?: (?P<a>\d{1,7})(?:->|<-)(?P<b>\d{1,7}))?$"
)


class NoDump(ValueError):
    """The data is not a Flight Recorder dump; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What many calls have in common. ``group``: this process's own name of the group; ``peer``:
    of send and recv, counted within the group; ``site``: "file.py:12 function"."""

    group: str
    op: str
    numel_in: int
    numel_out: int
    dtype: str
    site: str = ""
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class OwnGroup:
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


def is_dump(raw: Any) -> bool:
    """Whether plain data looks like a dump."""
    return (
        isinstance(raw, dict)
        and ("entries" in raw or "pg_config" in raw)
        and isinstance(raw.get("entries", []), list)
        and isinstance(raw.get("pg_config", {}), dict)
        and ("pg_config" in raw or _is_entry(next(iter(raw["entries"]), None)))
    )


def _is_entry(raw: Any) -> bool:
    return isinstance(raw, dict) and "profiling_name" in raw


def read(raw: Any) -> Dump:
    """The dump as columns. Invalid entries are only counted. Raises NoDump."""
    if not is_dump(raw):
        raise NoDump("neither entries nor pg_config")
    version = plain_text(raw.get("version"))[:40]
    if version and version.partition(".")[0] not in ("1", "2"):
        raise NoDump(f"format {version}; 2.x is supported")
    entries = raw.get("entries", [])
    if len(entries) > MAX_ENTRIES:
        raise NoDump(f"{len(entries):,} entries; at most {MAX_ENTRIES:,} are read")
    dump = Dump(version, library=plain_text(raw.get("comm_lib_version"))[:40])
    members = 0
    for name, config in raw.get("pg_config", {}).items():
        if isinstance(config, Mapping):
            own = plain_text(config.get("name", name)) or plain_text(name)
            ranks = _ranks(config.get("ranks"))
            members += len(ranks)
            if members > _MAX_MEMBERS:
                raise NoDump("more members of groups than any job has")
            if own or ranks:  # gloo of torch 2.11-2.13 writes one group without a name
                dump.groups[own] = OwnGroup(_desc(config.get("desc")), ranks)
    reader = _Reader(dump)
    for entry in entries:
        try:
            reader.entry(entry)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as bad:
            if isinstance(bad, NoDump):
                raise
            dump.unreadable += 1
    dump.written = reader.looked_at[1] if _is_one_moment(*reader.looked_at) else 0
    told = raw.get("pg_status")
    dump.status = flight_status.of_groups(told, reader.ids, dump.groups)
    dump.recording = "entries" in raw or not told or bool(dump.status)
    if dump.recording:
        _without_entries(dump, "entries" in raw)
    return dump


def _without_entries(dump: Dump, included: bool) -> None:
    """What ``pg_status`` says of a dump that shows no completed call, or no call at all."""
    issued = any(of[0] > 0 for of in dump.status.values())
    open_ = {name: of for name, of in dump.status.items() if of[0] > of[1]}
    if not included and open_:
        dump.recording = False
        for name, (last, done) in open_.items():
            number = len(dump.kinds)
            dump.kinds.append(Kind(name, "", 0, 0, ""))
            for position in range(done, min(last, done + _MOST_UNSEEN)):
                dump.index.append(len(dump.index) + 1)
                dump.position.append(position)
                dump.created.append(0)
                dump.kind.append(number)
                dump.state.append(SCHEDULED)
    elif COMPLETED not in dump.state and issued and (not dump.kind or dump.index[0] > 0):
        dump.open_only = True


class _Reader:
    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.of_kind: dict[Kind, int] = {}
        self.known: dict[tuple[Any, ...], tuple[int, bool]] = {}
        self.row: dict[str, int] = {}  # group -> row of its last collective
        self.count: dict[str, int] = {}  # group -> collective_seq_id that was seen last
        self.shift: dict[str, int] = {}  # group -> how many of these counted no collective
        self.batch: dict[str, tuple[int, list[int]]] = {}  # group -> (p2p_seq_id, its rows)
        self.sites: dict[tuple[int, ...], str] = {}
        self.ids: dict[str, Any] = {}  # group -> its pg_id
        self.shapes = 0
        self.looked_at = (_FOREVER, 0)  # the first and the last look at a call that is not retired
        self.record: int | None = None

    def entry(self, e: dict[str, Any]) -> None:
        """Adds one record: a new row, or more about an older one.

        Types are checked first: nested values could take forever to hash or to compare.
        """
        name = e["profiling_name"]
        group = e.get("process_group")
        local, desc = group if group is not None else (str(_number(e.get("pg_id"))), "")
        inputs, outputs = e.get("input_sizes") or (), e.get("output_sizes") or ()
        self.shapes += len(inputs) + len(outputs)
        if self.shapes > _MAX_SHAPES:
            raise NoDump("more tensors than any dump holds")
        dtypes = e.get("input_dtypes") or e.get("output_dtypes") or ("",)
        dtype = dtypes[0] if len(dtypes) == 1 else _dtypes(dtypes)
        if not (type(name) is type(local) is type(desc) is type(dtype) is str):
            raise TypeError("text")
        frames = e.get("frames") or ()
        if len(frames) > _MAX_FRAMES:
            frames = frames[:_MAX_FRAMES]
        key = (name, local, desc, _numel(inputs), _numel(outputs), dtype, tuple(map(id, frames)))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self.kind(key, frames)
            self.ids[plain_text(local)] = e.get("pg_id")
            if type(limit := e.get("timeout_ms")) is int:
                self.dump.timeout = max(self.dump.timeout, limit / 1000)
        number, p2p = found
        kind = self.dump.kinds[number]
        seq = e.get("collective_seq_id")
        if type(seq) is not int:
            seq = _number(e.get("seq_id") if seq is None else seq)
        self.count_record(e)
        op = kind.op
        state = self.state(e)
        if p2p or (op == "coalesced" and self.is_batch(e, kind.group)):
            self.point_to_point(e, kind, number, seq, state)
            return
        group = kind.group
        last = self.row.get(group)
        if last is not None and seq == self.count.get(group):
            closes = op.endswith("coalesced") or not (inputs or outputs)
            self.more(last, number, closes, state)
            return
        self.add(e, number, seq - 1 - self.shift.get(group, 0), state)
        self.count[group] = seq
        self.row[group] = len(self.dump.kind) - 1

    def count_record(self, e: dict[str, Any]) -> None:
        """Notes a gap in the record numbers: the calls between had completed."""
        record = e.get("record_id")
        if type(record) is int:
            self.dump.open_only |= self.record is not None and record > self.record + 1
            self.record = record

    def add(self, e: dict[str, Any], number: int, position: int, state: int) -> None:
        dump, indexes = self.dump, self.dump.index
        row = len(indexes)
        index = row if self.record is None else self.record
        if row and index <= indexes[-1]:
            index = indexes[-1] + 1
        indexes.append(index)
        try:
            dump.position.append(position)
            dump.created.append(e.get("time_created_ns") or 0)
        except (TypeError, OverflowError):
            del indexes[row:], dump.position[row:], dump.created[row:]
            raise
        dump.kind.append(number)
        dump.state.append(state)

    def more(self, row: int, number: int, closes: bool, state: int) -> None:
        """Adds another collective of the same batch, or the entry that closes it."""
        dump = self.dump
        dump.state[row] = max(dump.state[row], state) if closes else min(dump.state[row], state)
        if closes:
            return
        first, second = dump.kinds[dump.kind[row]], dump.kinds[number]
        dump.kind[row] = self.intern(
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
        self, e: dict[str, Any], kind: Kind, number: int, seq: int, state: int
    ) -> None:
        group, of_p2p = kind.group, _number(e.get("p2p_seq_id", 0))
        before = self.count.get(group, seq if self.dump.wrapped else 0)
        if seq > before:  # an older release: the batch was counted as a collective
            self.shift[group] = self.shift.get(group, 0) + seq - before
            self.dump.batched.add(group)
        self.count[group] = max(seq, before)
        # A collective after this batch never has the number that the batch took.
        self.row.pop(group, None)
        if kind.op == "coalesced":
            for row in self.batch.get(group, (0, []))[1]:
                self.dump.state[row] = max(self.dump.state[row], state)
            return
        batch = self.batch.get(group)
        if batch is None or batch[0] != of_p2p:
            batch = self.batch[group] = (of_p2p, [])
        self.add(e, number, of_p2p - 1, state)
        batch[1].append(len(self.dump.kind) - 1)

    def is_batch(self, e: dict[str, Any], group: str) -> bool:
        """Whether ``coalesced`` closes a batch of sends and receives."""
        if "is_p2p" in e:
            return bool(e["is_p2p"])
        batch = self.batch.get(group)
        return batch is not None and batch[0] == _number(e.get("p2p_seq_id", 0))

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

    def kind(self, key: tuple[Any, ...], frames: Any) -> tuple[int, bool]:
        """(number of the kind, whether it is a send or receive)."""
        name, local, desc, numel_in, numel_out, dtype, _ = key
        found = _NAME.match(plain_text(name))
        if found is None:
            raise ValueError(name)
        if found["backend"] and not self.dump.backend:
            self.dump.backend = found["backend"].lower()
        group = plain_text(local)
        if group not in self.dump.groups:
            self.dump.groups[group] = OwnGroup(_desc(desc))
        op = plain_op(found["op"])
        p2p = op in ("send", "recv")
        peer = int(found["b"]) if found["b"] else None
        if found["a"]:
            self.dump.places.setdefault(group, int(found["a"]))
        if p2p:
            numel_in, numel_out = (numel_in or numel_out), (numel_out or numel_in)
        kind = Kind(
            group, op, numel_in, numel_out, plain_dtype(plain_text(dtype)), self.site(frames), peer
        )
        return self.intern(kind), p2p

    def intern(self, kind: Kind) -> int:
        number = self.of_kind.get(kind)
        if number is None:
            number = self.of_kind[kind] = len(self.dump.kinds)
            self.dump.kinds.append(kind)
        return number

    def site(self, frames: Any) -> str:
        """The innermost frame of the user's own code; innermost frames come first."""
        if not frames:
            return ""
        key = tuple(map(id, frames))
        found = self.sites.get(key)
        if found is None:
            found = self.sites[key] = user_site(frames)
        return found


def _is_one_moment(first: int, last: int) -> bool:
    """False also of a recorder that looks at the calls while they run."""
    return 0 < last <= first + _ONE_LOOK


def _numel(shapes: Any) -> int:
    total = 0
    for shape in shapes:
        if len(shape) == 1:  # as most have
            n = shape[0]
        else:
            if len(shape) > 32:  # torch allows 64 dimensions; nobody uses as many
                raise ValueError("dimensions")
            n = 1
            for size in shape:
                n *= size
        total += n
    if type(total) is not int or not 0 <= total < 1 << 62:
        raise ValueError("elements")
    return total


def _dtypes(dtypes: Sequence[Any]) -> str:
    """Those of a call with several tensors, or with none."""
    if not all(type(text) is str for text in dtypes[:64]):
        raise TypeError("text")
    return " ".join(sorted({*dtypes[:64]}))


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("number")
    return value


def _desc(value: Any) -> str:
    text = plain_text(value)[:200]
    return "" if text == "undefined" else text


def _ranks(value: Any) -> tuple[int, ...]:
    """``"[0, 1]"`` or a list."""
    if isinstance(value, str):
        return _parsed(value)
    if not isinstance(value, list | tuple) or not all(type(rank) is int for rank in value):
        return ()
    return tuple(value) if all(0 <= rank < 1 << 20 for rank in value) else ()


@lru_cache(maxsize=20_000)
def _parsed(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,6}", text[:8_000_000]))
