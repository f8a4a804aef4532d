"""NCCL's RAS subsystem: what ``ncclras`` prints about a job, as text (2.24 and newer) or as JSON
(2.28.7 and newer).

Formats: NVIDIA/nccl, src/ras/client_support.cc (`rasClientRunComms`, `rasDumpCommsToJSON`); what
they mean: docs/userguide/source/troubleshooting/ras.rst. A reading shows one moment: counts of a
job that runs differ as well, and so does the status of ranks while communicators begin or end. Only
numbers that have not changed in a second reading show that a job stands. Ranks are those of the
communicator.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from moediag.evidence.model import Report
from moediag.records import dataclass
from moediag.result.wording import plural
from moediag.result.wording import ranks as of_ranks

_MOST_PLACES = 4
_HEAD = re.compile(r"^ *Group +Comms +Nodes +Ranks|^NCCL version \d|^#\d+-\d+ \([0-9a-f]+\) [A-Z]")
_ROW = re.compile(
    r"^ *(?P<group>\d{1,9}) +\d+ +\d+ +[\d-]+ +(?P<size>\d{1,9}) +\d+ +[A-Z]+ +[A-Z,]+ *$"
)
_TOTAL = re.compile(r"^ +\d+ +\d+ +\d+ +\d+ +(?P<gpus>\d{1,9}) *$")
_TOOK = re.compile(r"^Communicators\.\.\. \((?P<took>[\d.]+)s\)")
_COMM = re.compile(r"^#(?P<group>\d{1,9})-\d+ \((?P<hash>[0-9a-f]{1,16})\) (?P<what>[A-Z]+)")
_DIFFER = re.compile(
    r"^ *Communicator ranks have different (?:(?P<op>\w+) operation counts|status)"
)
_STATE = (
    r"(?:launched up to operation (?P<count>\d{1,18})|(?P<none>not launched any operations)"
    r"|status (?P<status>[A-Z]+))"
)
_MANY = re.compile(rf"^ *(?P<number>\d{{1,9}}) ranks have {_STATE}")
_ONE = re.compile(rf"^ *Rank (?P<rank>\d{{1,7}}) has {_STATE}")
_WRONG = re.compile(
    r"^ *(?:(?P<number>\d{1,9}) ranks|Rank (?P<rank>\d{1,7})) reported (?P<error>[\w ]+?)(?: --|$)"
)
_MEMBER = re.compile(r"^ *Rank (?P<rank>\d{1,7}) (?:has [^\n]{1,60} |reported [\w ]+ )?-- ")
_LISTED = re.compile(r"^ *The (?:missing|unknown) ranks?: (?P<ranks>\d[\d, ]*)")
_PLACE = re.compile(
    r"(?:-- GPU (?P<gpu>\d+)[^\n]{0,20} managed by process|^ *Process) (?P<pid>\d+) "
    r"on node (?P<node>\S+)"
)
_DEAD = re.compile(r"^ *(?P<number>\d{1,9}) job process(?:es are| is) considered dead")
_EVENT = re.compile(r"\bPEER_DEAD: Process (?P<pid>\d+) on node (?P<node>\S+)")
_ERRORS = {1: "Unhandled CUDA error", 2: "System error", 3: "Internal error",
           4: "Invalid argument", 5: "Invalid usage", 6: "Remote process error"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks of a communicator in one state."""

    #: The operations that they have launched; or their status.
    state: int | str
    number: int
    #: Those that the text lists.
    ranks: tuple[int, ...] = ()

    def text(self, op: str, first: bool) -> str:
        listed = len(self.ranks) == self.number
        who = of_ranks(self.ranks) if listed else f"{self.number} {'' if first else 'other '}ranks"
        have = "has" if self.number == 1 else "have"
        if isinstance(self.state, str):
            return f"{who} {have} status {self.state}"
        if not self.state:
            return f"{who} {have} not launched any {op}"
        return f"{who} {have} launched up to {op} {self.state}"


@dataclass(slots=True)
class Reading:
    """What one query of RAS found."""

    #: GPUs of the job; 0 if not known.
    gpus: int = 0
    #: What distinguishes it from other readings, or "".
    name: str = ""
    #: (communicator, its size, operation or "status", sides)
    apart: list[tuple[str, int, str, list[Side]]] = field(default_factory=list)
    #: (error, its ranks, communicator)
    errors: list[tuple[str, list[int], str]] = field(default_factory=list)
    #: (ranks without data, communicator)
    missing: list[tuple[list[int], str]] = field(default_factory=list)
    #: Number of processes that are considered dead, and those that are named.
    dead: int = 0
    processes: list[str] = field(default_factory=list)
    places: dict[int, str] = field(default_factory=dict)


def read(text: str) -> tuple[Report, ...]:
    """What readings in a text say of ranks that differ; () without any reading."""
    lines = text.splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("NCCL version ")]
    if not starts and any(_HEAD.match(line) for line in lines):
        starts = [0]
    found: list[Report] = []
    for at, end in zip(starts, [*starts[1:], len(lines)], strict=False):
        if any(_HEAD.match(line) for line in lines[at + 1 : end]):
            found += _reports(_reading(lines[at:end]))
    events = {f"process {one['pid']} on node {one['node']}": None for one in _EVENT.finditer(text)}
    if events:
        found += _reports(Reading(dead=len(events), processes=[*events]))
    return tuple(found)


def of_json(raw: Any) -> tuple[Report, ...] | None:
    """The same from parsed JSON; None if RAS did not write it."""
    if not isinstance(raw, dict) or "nccl_version" not in raw:
        return None
    reading = Reading(name=str(raw.get("timestamp") or ""))
    devices: set[tuple[str, str]] = set()
    for comm in _dicts(raw.get("communicators")):
        size = comm.get("size")
        size = size if isinstance(size, int) else 0
        _of_communicator(reading, f"communicator {comm.get('hash')}", size, comm)
        devices.update(
            (str(one.get("host")), str(one.get("nvml_dev")))
            for one in (*_dicts(comm.get("ranks")), *_dicts(comm.get("missing_ranks")))
        )
    reading.gpus = len(devices)
    return tuple(_reports(reading))


# --------------------------------------------------------------------------- the text


def _reading(lines: Sequence[str]) -> Reading:
    reading = Reading()
    sizes: dict[str, int] = {}
    comm, size, op = "", 0, ""
    listed: list[int] = []  # where the ranks of following lines belong
    sides: list[tuple[int | str, int, list[int]]] = []

    def close() -> None:
        if op and len(sides) > 1:
            found = [Side(state, number, tuple(who)) for state, number, who in sides]
            reading.apart.append((comm, size, op, found))
        sides.clear()

    for line in lines:
        if found := _ROW.match(line):
            sizes[found["group"]] = int(found["size"])
        elif found := _TOTAL.match(line):
            reading.gpus = int(found["gpus"])
        elif found := _TOOK.match(line):
            reading.name = found["took"]
        elif found := _COMM.match(line):
            close()
            size, op, listed = sizes.get(found["group"], 0), "", []
            comm = f"communicator {line.partition(' ')[0]} ({found['hash']})"
            if found["what"] == "INCOMPLETE":
                reading.missing.append((listed, comm))
        elif found := _DIFFER.match(line):
            close()
            op = found["op"] or ("status" if line.rstrip().endswith("status") else "operation")
        elif found := _MANY.match(line) or _ONE.match(line):
            one = found.groupdict().get("rank")
            listed = [] if one is None else [int(one)]
            number = int(found["number"]) if one is None else 1
            sides.append((found["status"] or int(found["count"] or 0), number, listed))
        elif found := _WRONG.match(line):
            listed = [] if found["rank"] is None else [int(found["rank"])]
            reading.errors.append((found["error"], listed, comm))
        elif found := _LISTED.match(line):
            listed += [int(rank) for rank in re.findall(r"\d+", found["ranks"])]
        elif found := _DEAD.match(line):
            reading.dead = int(found["number"])
        elif (found := _MEMBER.match(line)) and int(found["rank"]) not in listed:
            listed.append(int(found["rank"]))
        if place := _PLACE.search(line):
            where = f"process {place['pid']} on node {place['node']}"
            member = _MEMBER.match(line)
            if member is not None:
                reading.places[int(member["rank"])] = f"GPU {place['gpu']}, {where}"
            elif reading.dead:
                reading.processes.append(where)
    close()
    return reading


# --------------------------------------------------------------------------- JSON


def _of_communicator(reading: Reading, name: str, size: int, raw: Mapping[str, Any]) -> None:
    ranks = {r["rank"]: r for r in _dicts(raw.get("ranks")) if isinstance(r.get("rank"), int)}
    counts: dict[str, dict[int, int | str]] = {}
    states: dict[int, int | str] = {}
    wrong: dict[str, list[int]] = {}
    for rank, one in ranks.items():
        reading.places[rank] = (
            f"GPU {one.get('cuda_dev')}, process {one.get('pid')} on node {one.get('host')}"
        )
        for op, count in _dict(one.get("collective_counts")).items():
            if isinstance(count, int):
                counts.setdefault(str(op), {})[rank] = count
        status = _dict(one.get("status"))
        states[rank] = _status(status)
        for value in (status.get("init_state"), status.get("async_error")):
            if isinstance(value, int) and value not in (0, 7):
                wrong.setdefault(_ERRORS.get(value, "Unexpected error"), []).append(rank)
    for one in _dicts(raw.get("missing_ranks")):
        rank, status = one.get("rank"), _dict(one.get("status"))
        if not isinstance(rank, int):
            continue
        if status.get("considered_dead"):
            reading.dead += 1
            reading.processes.append(f"process {one.get('pid')} on node {one.get('host')}")
        if status.get("unresponsive") or status.get("considered_dead"):
            reading.missing.append(([rank], name))
        else:
            states[rank] = "NOCOMM"
    reading.errors += [(error, who, name) for error, who in wrong.items()]
    for op, values in (("status", states), *counts.items()):
        by_state: dict[int | str, list[int]] = {}
        for rank, state in values.items():
            by_state.setdefault(state, []).append(rank)
        if len(by_state) > 1:
            sides = [Side(state, len(who), tuple(sorted(who))) for state, who in by_state.items()]
            reading.apart.append((name, size, op, sides))


def _status(status: Mapping[str, Any]) -> str:
    """As the text output calls it."""
    if status.get("abort_flag"):
        return "ABORT"
    if status.get("finalize_called") or status.get("destroy_flag"):
        return "FINALIZE"
    return "INIT" if status.get("init_state") else "RUNNING"


def _dicts(value: Any) -> Iterator[Mapping[str, Any]]:
    return (one for one in value if isinstance(one, dict)) if isinstance(value, list) else iter(())


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


# --------------------------------------------------------------------------- what it says


def _reports(reading: Reading) -> Iterator[Report]:
    said = False
    for error, who, comm in reading.errors:
        text = f"NCCL's RAS: {of_ranks(who) if who else 'ranks'} of {comm} reported: {error}"
        yield Report("ras-error", about=tuple(who), size=reading.gpus, text=text)
        said = True
    lost = Counter(rank for who, _ in reading.missing for rank in who)
    if reading.dead or reading.missing:
        yield _lost(reading, sorted(lost))
        said = True
    for comm, size, op, sides in reading.apart:
        yield _apart(reading, comm, size, op, sides)
        said = True
    if not said:
        yield Report("ras-equal", size=reading.gpus, text="NCCL's RAS: no rank differs")


def _lost(reading: Reading, ranks: Sequence[int]) -> Report:
    if reading.dead:
        one = reading.dead == 1
        text = f"{plural(reading.dead, 'process')} {'is' if one else 'are'} dead or unreachable"
        text += f" ({', '.join(dict.fromkeys(reading.processes[:_MOST_PLACES]))})"
    else:
        text = "processes do not answer"
    if ranks:
        comms = dict.fromkeys(comm for _, comm in reading.missing)
        text += f"; nothing is known of {of_ranks(ranks)} of {next(iter(comms))}"
    kind = "ras-dead" if reading.dead else "ras-silent"
    return Report(kind, about=tuple(ranks), size=reading.gpus, text=f"NCCL's RAS: {text}")


def _apart(reading: Reading, comm: str, size: int, op: str, sides: Sequence[Side]) -> Report:
    order = sorted(sides, key=lambda one: (0, -one.state) if isinstance(one.state, int) else (1, 0))
    pieces = [side.text(op, first=at == 0) for at, side in enumerate(order)]
    text = f"{'; '.join(pieces)}, in {comm}" + (f", which has {size} ranks" if size else "")
    few = (rank for side in sides if side.number <= _MOST_PLACES for rank in side.ranks)
    told = [f"rank {rank}: {reading.places[rank]}" for rank in few if rank in reading.places]
    text += f" ({'; '.join(told[:_MOST_PLACES])})" if told else ""
    # Who is behind is named if the communicator has all ranks: then its numbers are the job's.
    last = order[-1]
    counted = isinstance(last.state, int) and size > 0 and size == reading.gpus
    named = counted and len(last.ranks) == last.number and 2 * last.number < size
    behind = last.ranks if named else ()
    size = reading.gpus or size
    return Report("ras-apart", about=behind, size=size, text=text, detail=reading.name)


def unchanged(reports: Iterable[Report]) -> tuple[Report, ...]:
    """Differences that two readings show alike: the job stands."""
    readings: dict[tuple[str, tuple[int, ...]], set[str]] = {}
    for one in reports:
        if one.kind == "ras-apart" and one.detail:
            readings.setdefault((one.text, one.about), set()).add(one.detail)
    same = {key for key, names in readings.items() if len(names) > 1}
    found = (one for one in reports if (one.text, one.about) in same)
    return tuple({(one.text, one.about): one for one in found}.values())
