"""What libraries, the kernel and schedulers report in a log, by the table `log_formats.FORMATS`.

Nothing is concluded here: a :class:`Report` says what the line says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from moediag.evidence import frtrace, horovod, log_lines, nccl_calls, nccl_ras, ray_train
from moediag.evidence.flight_names import plain_dtype, plain_op
from moediag.evidence.log_formats import FORMATS
from moediag.evidence.log_lines import Line
from moediag.evidence.model import Frame, Report
from moediag.evidence.rank_stacks import of_user

_TEXT = 240  # characters of a line that a report keeps
_FAR = 10_000  # works in flight: a larger difference is an uninitialised number

# What torch 2.3 and newer print after a timeout, if the Flight Recorder keeps stacks.
_TRACE = "Stack trace of the failed collective:"
_FRAME = re.compile(r"\s*#\d+ (\S.*)")
_CLOCK = re.compile(r"\[[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)")  # month, day, time

# Where frameworks, launchers and NCCL say how many ranks a job or a group has.
_SIZES = re.compile(
    r"WORLD_SIZE[=:]\s*(\d{1,7})|world[_ ]size(?: ?[=:] ?|s=\[)(\d{1,7})|\bnranks[ =](\d{1,7})|"
    r"MEMBER: \d{1,7}/(\d{1,7})|\d{1,7}/(\d{1,7}) clients joined|"
    r"hccl_world_group\], rankSize\[(\d{1,7})"
)
_PEERS = re.compile(r"is connected to \d{1,7} peer ranks\. Expected [\w ]{1,40}: (\d{1,7})")

# Readers of what tools print about the whole job, on several lines.
TOOLS = (nccl_ras.read, horovod.read, ray_train.read, frtrace.read, nccl_calls.read)
Writer = tuple[int | None, int | None, int | None]
Call = tuple[int | None, str, int | None, int | None]


def job_size(reports: Iterable[Report], exactly: bool = False) -> int:
    """The number of ranks at least, from the sizes of groups and the numbers of members.
    ``exactly``: only the size of the group of all ranks, 0 if no call tells it."""
    found = 0
    reports = list(reports)
    if exactly:
        # Horovod counts only the ranks that it names.
        counted = (o.size for o in reports if o.kind.startswith(("ras-", "fr-", "nccl-")))
        return max((*(group_size(o) or 0 for o in reports if o.of_all), *counted), default=0)
    for one in reports:
        named = (*one.about, *(rank for rank, _ in one.sides), one.place or 0)
        members = [rank for rank in named if rank < log_lines.MAX_RANK]
        found = max(found, one.size, group_size(one) or 0, max(members) + 1 if any(members) else 0)
    return max(found, sum(one.kind == "stack" for one in reports))


def told_size(lines: Iterable[Line]) -> int:
    """The largest number of ranks that a line gives for a job or a group; 0 if none does."""
    found = 0
    for line in lines:
        text = line.text
        if "size" in text.lower() or "nranks" in text or "MEMBER" in text or "joined" in text:
            for match in _SIZES.finditer(text):
                found = max(found, *(int(number) for number in match.groups() if number))
        if "peer ranks" in text and (peers := _PEERS.search(text)):
            found = max(found, int(peers[1]) + 1)
    return found if found < log_lines.MAX_RANK else 0


def group_size(one: Report) -> int | None:
    """The size of a report's group from a gather or a scatter, whose one side holds all ranks'
    parts; None for other operations."""
    small, large = sorted((one.numel_in or 0, one.numel_out or 0))
    if one.op not in ("all_gather", "reduce_scatter") or small <= 0 or large % small:
        return None
    return large // small if small < large < small * log_lines.MAX_RANK else None


def read(lines: Iterable[Line], own: int | None = None) -> tuple[Report, ...]:
    """All reports in a log, in order. ``own``: the rank that wrote every line without a mark."""
    lines = list(lines)
    whole = "\n".join(line.text for line in lines)
    found = [one for read in TOOLS for one in read(whole)]
    frames: list[Frame] | None = None
    of: int | None = None
    for line in lines:
        rank = line.rank if line.rank is not None and not line.local else own
        rank = line.rank if rank is None else rank
        if frames is not None:
            if frame := _frame(line.text):
                frames.append(frame)
                continue
            found += _site(frames, of)
            frames = None
        found += _of_line(line, rank)
        if _TRACE in line.text:
            at = line.text.index(_TRACE)
            frames, of = [], log_lines.marked(line.text, at, rank)
    if frames is not None:
        found += _site(frames, of)
    return tuple(dict.fromkeys(_with_groups(found)))


def _frame(text: str) -> Frame | None:
    """The frame in ``#4 train from /home/me/train.py:33``."""
    found = _FRAME.match(text)
    function, _, place = (found[1] if found else "").partition(" from ")
    file, _, line = place.rstrip().rpartition(":")
    known = file and line.isdecimal() and len(line) < 10
    return Frame(file, int(line), function) if known else None


def _site(frames: list[Frame], rank: int | None) -> Iterator[Report]:
    """The line of the program that made the call which timed out."""
    own = of_user(frames) or [frame for frame in frames if "/torch/" not in frame.file]
    for frame in own[:1]:
        where = f"{frame.name}:{frame.line} {frame.function}"
        yield Report("site", rank, detail=where, text=where)


def _of_line(line: Line, rank: int | None) -> Iterator[Report]:
    text = line.text
    for form in FORMATS:
        if form.hint not in text:
            continue
        for match in form.matches(text):
            who = log_lines.marked(text, match.start(), rank)
            one = _report(form.meaning.kind, match, who, _clock(text[: match.start()]))
            yield replace(one, process=line.process)


def _report(kind: str, match: re.Match[str], rank: int | None, time: float) -> Report:
    values = match.groupdict()

    def number(name: str) -> int | None:
        text = values.get(name)
        return int(text) if text is not None else None

    group, desc = values.get("group") or "", values.get("desc") or ""
    desc = "default_pg" if group == "0" else "" if desc == "undefined" else desc
    issued, completed = _counted(number("issued"), number("completed"), number("seq"))
    place = number("place") if number("place") is not None else number("number")
    rank = number("rank") if rank is None else rank
    if rank is None and place is not None and desc == "default_pg":
        rank = place
    return Report(
        kind=kind,
        rank=rank,
        group=group,
        desc=desc,
        place=place,
        seq=number("seq"),
        issued=issued,
        completed=completed,
        op=plain_op(values["op"].lower()) if values.get("op") else "",
        numel_in=number("numel_in"),
        numel_out=number("numel_out"),
        about=tuple(int(text) for text in re.findall(r"\d{1,7}", values.get("about") or "")),
        sides=_sides(values) if kind == "mismatch" else (),
        seconds=(number("ms") or 0) / 1000 or float(number("seconds") or 0),
        time=time,
        text=" ".join(match[0].split())[:_TEXT],
        detail=values.get("why") or "",
    )


def _clock(before: str) -> float:
    """Seconds since the beginning of the year in the last header before a message; 0.0: unknown."""
    clocks = _CLOCK.findall(before)
    if not clocks:
        return 0.0
    month, day, hours, minutes, seconds = map(int, clocks[-1])
    return float((((month * 31 + day) * 24 + hours) * 60 + minutes) * 60 + seconds)


def _counted(
    issued: int | None, completed: int | None, seq: int | None
) -> tuple[int | None, int | None]:
    """Last enqueued and last completed work. -1 means none; some releases print an uninitialised
    number, which is unknown."""
    if issued is None or issued > 1 << 50:
        return None, None
    issued = max(issued, 0, seq or 0)
    if completed is None or completed > issued or completed < issued - _FAR:
        return issued, None
    return issued, max(completed, 0)


def _sides(values: dict[str, str | None]) -> tuple[tuple[int, str], ...]:
    """The ranks of a mismatch, each with its call."""
    found = []
    for n, rank in ((1, values["one"]), (2, values["two"])):
        op = values[f"op{n}"] or (values["bare"] if n == 2 else None)
        if rank is None or not op:
            continue
        text = plain_op(op.lower())
        shape, dtype = values[f"shape{n}"], values[f"dtype{n}"]
        if shape is not None:
            text += f" of shape [{' '.join(shape.split())}]" + (
                f" ({plain_dtype(dtype)})" if dtype else ""
            )
        found.append((int(rank), text))
    if len({text for _, text in found}) == 1 and values["seq1"] and values["seq2"]:
        # Equal calls, of which one rank has made more: a barrier has nothing else.
        numbers = (values["seq1"], values["seq2"])
        found = [
            (rank, f"{text} number {n}") for (rank, text), n in zip(found, numbers, strict=True)
        ]
    return tuple(found)


def _with_groups(found: list[Report]) -> Iterator[Report]:
    """A watchdog's first line does not name its group; its next line, about the same call of the
    same process, does. So does that of another rank in an equal call if both have their rank of the
    job in the group too: then all lower ranks are members."""
    named: dict[Writer, set[tuple[str, str]]] = {}
    alike: dict[Call, set[tuple[str, str]]] = {}
    for one in found:
        if one.group and one.seq is not None:
            named.setdefault(_writer(one), set()).add((one.group, one.desc))
    for one in found:
        if one.kind == "timeout" and one.rank is not None and one.place == one.rank:
            alike.setdefault(_call(one), set()).update(named.get(_writer(one), ()))
    for one in found:
        if one.kind == "timeout" and not one.group:
            groups = named.get(_writer(one), set())
            if not groups and one.rank is not None and one.place == one.rank:
                groups = alike.get(_call(one), set())
            if len(groups) == 1:
                group, desc = next(iter(groups))
                known = one.rank is not None or desc != "default_pg"
                rank = one.rank if known else one.place
                yield replace(one, group=group, desc=desc, rank=rank)
                continue
        yield one


def _writer(one: Report) -> Writer:
    """Who wrote it and about which call."""
    return one.rank, one.place, one.seq


def _call(one: Report) -> Call:
    return one.seq, one.op, one.numel_in, one.numel_out
