"""Collectives in NCCL's own log, ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL,INIT``: one line a call.

Formats: NVIDIA/nccl, src/enqueue.cc (`ncclEnqueueCheck`) and src/init.cc (``Init COMPLETE``), 2.4
to 2.30. ``opCount`` is a hexadecimal number that counts per communicator; calls of one group of
NCCL share it. A process is known by host and number; its rank stands in the line of its
communicator's start, or is its device where one node runs one process on each device.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from moediag.evidence.flight_names import plain_op
from moediag.evidence.model import Report
from moediag.records import dataclass
from moediag.result.wording import plural

_AT = (
    r"(?<![\w.-])(?P<host>[\w.-]{1,80}):(?P<pid>\d{1,9}):\d{1,9} \[(?P<device>\d{1,4})\] NCCL INFO "
)
_CALL = re.compile(
    _AT + r"(?P<op>[A-Z]\w{1,30}): opCount (?P<n>[0-9a-f]{1,16}) sendbuff \S{1,40} recvbuff "
    r"\S{1,40} count (?P<count>\d{1,18}) datatype (?P<type>\d{1,4}) op (?P<reduce>\d{1,9}) root "
    r"(?P<root>\d{1,9}) comm (?P<comm>\w{1,40}) \[nranks=(?P<size>\d{1,7})\]"
)
_INIT = re.compile(
    _AT + r"[^\n]{0,60}?\bcomm (?P<comm>\w{1,40}) rank (?P<rank>\d{1,7}) nranks \d{1,7} "
    r"(?P<rest>[^\n]{0,200})"
)
_ID = re.compile(r"\bcommId (0x[0-9a-f]{1,16})")
_TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
          "bfloat16", "float8_e4m3", "float8_e5m2")  # fmt: skip
_POINT_TO_POINT = frozenset({"Send", "Recv"})

Member = tuple[str, str, str]  # host, process, communicator's address there
Position = tuple[int, int]  # opCount, and the how many-th call with it


@dataclass(frozen=True, slots=True)
class Call:
    """What must be equal on all ranks of a communicator."""

    op: str
    count: int
    dtype: str
    root: int
    reduction: int

    @property
    def text(self) -> str:
        root = f", root {self.root}" if self.op in ("broadcast", "reduce") else ""
        return f"{self.op} ({plural(self.count, 'element')}, {self.dtype}{root})"


def read(text: str) -> tuple[Report, ...]:
    """The first call of each communicator in which ranks differ; () without such lines."""
    if "opCount" not in text:
        return ()
    calls: dict[Member, dict[Position, Call]] = {}
    sizes: dict[Member, int] = {}
    devices: dict[Member, int] = {}
    apart: set[Member] = set()  # sends and receives count as well, and differ between ranks
    times: Counter[tuple[Member, int]] = Counter()
    for one in _CALL.finditer(text):
        member = one["host"], one["pid"], one["comm"]
        sizes[member], devices[member] = int(one["size"]), int(one["device"])
        if one["op"] in _POINT_TO_POINT:
            apart.add(member)
            continue
        number = int(one["type"])
        dtype = _TYPES[number] if number < len(_TYPES) else f"datatype {number}"
        call = Call(
            plain_op(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", one["op"])),
            int(one["count"]), dtype, int(one["root"]), int(one["reduce"]),
        )  # fmt: skip
        at = int(one["n"], 16)
        calls.setdefault(member, {})[at, times[member, at]] = call
        times[member, at] += 1
    ranks, names = _ranks(text)
    found = []
    for members in _communicators(sizes, names):
        known = {member: calls[member] for member in members if member in calls}
        if apart & known.keys():
            continue
        found += _compared(known, _numbers(members, sizes, devices, ranks), max(sizes.values()))
    return tuple(found)


def _ranks(text: str) -> tuple[dict[Member, int], dict[Member, str]]:
    """The rank of each member in its communicator, and what all members call that."""
    ranks: dict[Member, int] = {}
    names: dict[Member, str] = {}
    for one in _INIT.finditer(text):
        member = one["host"], one["pid"], one["comm"]
        ranks[member] = int(one["rank"])
        if name := _ID.search(one["rest"]):
            names[member] = name[1]
    return ranks, names


def _communicators(sizes: Mapping[Member, int], names: Mapping[Member, str]) -> list[list[Member]]:
    """The members of each communicator: by its name, or by its size where each process has one of
    that size only."""
    found: dict[tuple[int, str], list[Member]] = {}
    for member, size in sizes.items():
        found.setdefault((size, names.get(member, "")), []).append(member)
    return [
        members
        for (size, name), members in found.items()
        if len(members) <= size
        and (name or len({(host, pid) for host, pid, _ in members}) == len(members))
    ]


def _numbers(
    members: list[Member],
    sizes: Mapping[Member, int],
    devices: Mapping[Member, int],
    ranks: Mapping[Member, int],
) -> dict[Member, int]:
    """The rank of each member; {} if it is not known of all."""
    found = {member: ranks[member] for member in members if member in ranks}
    if len(found) == len(members):
        return found
    own = {member: devices[member] for member in members}
    one_node = len({host for host, _, _ in members}) == 1
    whole = sorted(own.values()) == list(range(sizes[members[0]]))
    return own if one_node and whole else {}


def _compared(
    known: Mapping[Member, Mapping[Position, Call]], ranks: Mapping[Member, int], most: int
) -> list[Report]:
    """The first difference between the members of one communicator."""
    seen = Counter(position for calls in known.values() for position in calls)
    for position in sorted(position for position, times in seen.items() if times > 1):
        here = {member: calls[position] for member, calls in known.items() if position in calls}
        if len(set(here.values())) < 2:
            continue
        number = f"number {position[0]}"
        whole = len(known) == most
        if ranks and whole:
            sides = tuple(sorted((ranks[m], f"{call.text} {number}") for m, call in here.items()))
            return [Report("nccl-calls", sides=sides, size=most, text=number)]
        some = list(here.items())[:4]
        told = [f"{_process(member, ranks)} is in {call.text}" for member, call in some]
        text = f"NCCL's log shows different calls {number} in one communicator: {'; '.join(told)}"
        return [Report("nccl-unnamed-calls", size=most, text=text)]
    return []


def _process(member: Member, ranks: Mapping[Member, int]) -> str:
    rank = f", rank {ranks[member]} there" if member in ranks else ""
    return f"process {member[1]} on {member[0]}{rank}"
