"""What many entries of a Flight Recorder dump have in common, found once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from moediag.evidence.flight_calls import Dump, Kind, NoDump, OwnGroup
from moediag.evidence.flight_names import plain_dtype, plain_text, profiled, user_site

_MAX_SHAPES = 20_000_000  # tensors in a whole dump
_MAX_FRAMES = 200
_MAX_NUMEL = 1 << 62


class GroupCount:
    """How far the entries of one group were read."""

    __slots__ = ("batch", "batch_rows", "row", "seq", "shift")

    def __init__(self) -> None:
        self.row: int | None = None  # of its last collective
        self.seq: int | None = None  # collective_seq_id that was seen last
        self.shift = 0  # how many of these counted no collective
        self.batch: int | None = None  # p2p_seq_id of the last batch of sends and receives
        self.batch_rows: list[int] = []


class Known:
    """What many entries have in common."""

    __slots__ = ("group", "in_batch", "kind", "number", "values")

    def __init__(self, number: int, kind: Kind, group: GroupCount, in_batch: bool) -> None:
        self.number = number  # of their kind
        self.kind = kind
        self.group = group
        self.in_batch = in_batch  # send, receive, or the entry that closes a batch
        self.values: tuple[Any, ...] | None = (
            None  # as the first entry has them; None: not to be compared
        )


class Kinds:
    """The kinds and groups of ``dump``, as its entries name them."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.ids: dict[str, Any] = {}  # group -> its pg_id
        self.groups: dict[str, GroupCount] = {}
        self.of_kind: dict[Kind, int] = {}
        self.known: dict[tuple[Any, ...], Known] = {}
        self.sites: dict[tuple[int, ...], str] = {}
        self.shapes = 0

    def of(
        self,
        e: dict[str, Any],
        name: Any,
        group: Any,
        inputs: Any,
        outputs: Any,
        dtypes: Any,
        frames: Any,
    ) -> Known:
        """What the entry has in common with others. Raises NoDump, or
        what a damaged entry leads to."""
        local, desc = group
        try:
            ((numel_in,),) = inputs
            ((numel_out,),) = outputs
            (dtype,) = dtypes
        except ValueError:  # none, several, or tensors of several dimensions
            numel_in, numel_out = self.numel(inputs), self.numel(outputs)
            dtype = _dtype(dtypes or e.get("output_dtypes"))
        if not (type(name) is type(local) is type(dtype) is str):
            raise TypeError("text")  # nested values could take forever to hash
        if not (type(numel_in) is type(numel_out) is int):
            raise TypeError("number")
        key = (name, local, numel_in, numel_out, dtype, *map(id, frames))
        found = self.known.get(key)
        if found is None:
            found = self.learn(key, e, desc, frames)
            if dtypes and _are_flat(group, inputs, outputs, dtypes, frames):
                found.values = name, group, inputs, outputs, dtypes, frames
        return found

    def learn(self, key: tuple[Any, ...], e: dict[str, Any], desc: str, frames: Any) -> Known:
        """What the entries with this key have in common. Raises ValueError."""
        name, local, numel_in, numel_out, dtype = key[:5]
        if type(desc) is not str:
            raise TypeError("text")
        if not (0 <= numel_in < _MAX_NUMEL and 0 <= numel_out < _MAX_NUMEL):
            raise ValueError("elements")
        backend, op, place, peer = profiled(name)
        self.dump.backend = self.dump.backend or backend
        group = plain_text(local)
        if group not in self.dump.groups:
            self.dump.groups[group] = OwnGroup(group_desc(desc))
        p2p = op in ("send", "recv")
        if place is not None:
            self.dump.places.setdefault(group, place)
        if p2p:
            numel_in, numel_out = (numel_in or numel_out), (numel_out or numel_in)
        kind = Kind(
            group,
            op,
            numel_in,
            numel_out,
            plain_dtype(plain_text(dtype)),
            self.site(frames[:_MAX_FRAMES]),
            peer,
        )
        of_group = self.groups.setdefault(group, GroupCount())
        known = Known(self.intern(kind), kind, of_group, p2p or op == "coalesced")
        self.known[key] = known
        self.ids[group] = e.get("pg_id")
        if type(limit := e.get("timeout_ms")) is int:
            self.dump.timeout = max(self.dump.timeout, limit / 1000)
        return known

    def numel(self, shapes: Any) -> int:
        """Elements of several tensors, of none, or of one with several dimensions."""
        self.shapes += len(shapes)
        if self.shapes > _MAX_SHAPES:
            raise NoDump("more tensors than any dump holds")
        total = 0
        for shape in shapes:
            if len(shape) > 32:  # torch allows 64 dimensions; nobody uses as many
                raise ValueError("dimensions")
            n = 1
            for size in shape:
                n *= size
            total += n
        return total

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


def _are_flat(group: Any, inputs: Any, outputs: Any, dtypes: Any, frames: Any) -> bool:
    """Whether these are lists of numbers, texts and plain frames: nothing that is compared with
    them takes long, however it is nested."""
    lists = [group, dtypes, *inputs, *outputs]
    return (
        {*map(type, (inputs, outputs, frames, *lists))} <= {list, tuple}
        and {*map(type, frames)} <= {dict}
        and {*map(type, chain(*lists, *(frame.values() for frame in frames)))} <= {int, str}
    )


def _dtype(dtypes: Sequence[Any] | None) -> str:
    """That of a call with several tensors, or with none."""
    if not all(type(text) is str for text in (dtypes or ())[:64]):
        raise TypeError("text")
    return " ".join(sorted({*(dtypes or ())[:64]}))


def group_desc(value: Any) -> str:
    text = plain_text(value)[:200]
    return "" if text == "undefined" else text
