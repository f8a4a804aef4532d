"""Sentences about what a log says: where ranks are, what was not seen, what libraries report."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.diagnosis.schedules.log_positions import (
    ATTEMPTS,
    FAR_APART,
    Position,
    Positions,
    Standing,
    differs,
)
from moediag.diagnosis.words.calls import sentence
from moediag.evidence.log_formats import meaning
from moediag.evidence.model import Evidence, Report
from moediag.evidence.rank_stacks import in_collective, runs_python, stand, that_counts
from moediag.protocol import is_moediag
from moediag.result.wording import agreeing, each_does, plural, ranks

_FEW = 4  # messages that notes repeat


def of_positions(found: Positions, evidence: Evidence) -> str:
    """Where the ranks are in each group, those first where some are behind."""
    order = sorted(found.groups, key=lambda g: (not g.behind, g.front is None, not g.group))
    texts = [text for group in order if (text := _of_group(group, found, evidence))]
    return " ".join(texts)


def _of_group(group: Standing, found: Positions, evidence: Evidence) -> str:
    if group.front is None:
        unnumbered = [one for one in group.members if one.unnumbered]
        return _without_number(unnumbered, group) or _nothing_open(group)
    if group.apart and len({(one.call, one.open) for one in group.members}) > 1:
        return _not_compared(group)
    text = sentence(_do(group.waiting, group, f"waits in {_call(group, group.front)}"))
    if group.apart in (ATTEMPTS, FAR_APART):
        text += f" {sentence(group.apart)}"
    if group.odd:
        text = sentence(
            f"different calls meet as number {group.front} of {group.label}: "
            + "; ".join(_do(side, group, f"is in {_op(side[0])}") for side in group.odd)
        )
    for one in group.behind:
        text += f" {_behind(one, group, found)}"
    if group.ahead:
        text += f" {sentence(f'it completed on {_who(group.ahead, group)}')}"
    return f"{text} {_unseen(group, evidence)}".rstrip()


def _behind(one: Position, group: Standing, found: Positions) -> str:
    who = _who((one,), group)
    if one.open is not None:
        text = f"{who} is behind: it waits in {_op(one)}, number {one.open}"
        if one.issued is not None and group.front is not None and one.issued >= group.front:
            text += f", and has issued {one.issued} calls"
        if differs(one, group):
            text += "; others completed later calls, so not all ranks made the same calls"
    elif one.issued == 0:
        text = f"{who} is behind: it has issued no call there"
    else:
        text = f"{who} is behind: the last call that it issued there is number {one.issued}"
        text += ", which completed" if one.completed == one.issued else ""
        text += "; what it did then is not in these messages"
    if one.rank is not None and (where := (found.elsewhere or {}).get(one.rank)):
        text += f", because it waits in {where}" if where != group.label else ""
    return sentence(text)


def _nothing_open(group: Standing) -> str:
    """Members of a group that all completed what they issued. If the own watchdog of one reports a
    timeout, that is on another group."""
    told = [one for one in group.members if one.issued is not None]
    if not told:
        return _without_number([one for one in group.members if one.op], group)
    counts = {one.issued for one in told}
    if counts == {0}:
        return sentence(f"{_who(told, group)} issued no call on {group.label}")
    if any(one.completed is None for one in told):
        return ""
    text = f"{_who(told, group)} completed all calls that they issued on {group.label}"
    text += f", up to number {counts.pop()}" if len(counts) == 1 else ""
    reporters = [one for one in told if one.own]
    if reporters:
        text += f"; the timeout that {_who(reporters, group)} reported is on another group"
    return sentence(text)


def _without_number(members: Sequence[Position], group: Standing) -> str:
    """Which of the members wait in which operation, where no message tells the number of the call;
    "" without members."""
    sides: dict[str, list[Position]] = {}
    for one in members:
        sides.setdefault(_op(one), []).append(one)
    pieces = [_do(who, group, f"waits in {op}") for op, who in sides.items()]
    return f"{sentence('; '.join(pieces))} These lines do not number the calls." if pieces else ""


def _not_compared(group: Standing) -> str:
    sides: dict[tuple[str, int | None], list[Position]] = {}
    idle: dict[int, list[Position]] = {}
    for one in group.members:
        if one.open is not None:
            sides.setdefault((_op(one), one.open), []).append(one)
        elif one.issued is not None:
            idle.setdefault(one.issued, []).append(one)
    pieces = [
        _do(members, group, f"waits in {op}, number {number}")
        for (op, number), members in sides.items()
    ]
    pieces += [
        f"{_who(members, group)} issued calls up to number {number}"
        for number, members in idle.items()
    ]
    text = sentence("; ".join(pieces))
    where = f" on {group.label}" if group.group else ""
    text += f" The numbers{where} are not compared: {group.apart}."
    if not group.group and len(sides) == 2:
        (_, low), last = min(sides.items(), key=lambda side: side[0][1] or 0)
        text += f" If all are of one group, {_do(last, group, f'is behind, at number {low}')}."
    return text


def _call(group: Standing, number: int) -> str:
    some = next((one for one in group.waiting if one.op), group.waiting[0])
    named = any(one.rank is not None for one in group.waiting) or not group.group
    text = f"{_op(some)} on {group.label} " if named else f"{_op(some)} "
    text += f"(SeqNum {number})"
    sites = {one.site for one in group.waiting if one.site}
    return f"{text}, called at {sites.pop()}" if len(sites) == 1 else text


def _op(one: Position) -> str:
    if not one.op:
        return "a call"
    if one.numel_in is None:
        return one.op
    if one.numel_in == one.numel_out or one.numel_out is None:
        return f"{one.op} ({plural(one.numel_in, 'element')})"
    return f"{one.op} ({one.numel_in:,} to {plural(one.numel_out, 'element')})"


def _unseen(group: Standing, evidence: Evidence) -> str:
    """Which members the log does not show, as far as that is known."""
    if group.desc == "default_pg":
        if not evidence.size_known:
            return "How many ranks the job has is not known."
        seen = {one.rank for one in evidence.reports if meaning(one).fault == "positions"}
        missing = [rank for rank in range(evidence.world_size) if rank not in seen]
        if not missing:
            return ""
        if len(missing) == 1 < len(seen):
            return sentence(f"{ranks(missing)} is the only one without such a message")
        return (
            f"That group has {evidence.world_size} ranks; no message of {ranks(missing)} was found."
        )
    size = group.size
    if size is not None and size > len(group.members):
        return f"That group has {size} ranks; messages of {len(group.members)} were found."
    if size is None and group.group:
        return "How many ranks that group has is not known."
    return ""


def _do(members: Sequence[Position], group: Standing, text: str) -> str:
    """What the members do: ``text`` begins with the verb for one of them."""
    return f"{_who(members, group)} {agreeing(text, members)}"


def _who(members: Sequence[Position], group: Standing) -> str:
    known = [one.rank for one in members if one.rank is not None]
    text = ranks(known) if known else ""
    places = [one.place for one in members if one.rank is None and one.place is not None]
    if places:
        whose = f"of {group.label}" if group.group else "as the log numbers them"
        other = f"{ranks(places)} {whose}" if group.group else f"{ranks(places)} ({whose})"
        text = f"{text} and {other}" if text else other
    return text or "a rank that is not named"


# ------------------------------------------------------------------------ other messages


def signals(evidence: Evidence) -> str:
    """Whose watchdog reported the timeout, where only others' messages tell it."""
    told = [one for one in evidence.reports if meaning(one).fault == "positions"]
    own = {one.rank for one in told if not one.about}
    named = {rank for one in told for rank in one.about} - own
    if not named:
        return ""
    lost = named - {*evidence.ranks}
    text = f"The timeout was reported by {ranks(named)}."
    return f"{text} No line of {ranks(lost)} was found." if lost else text


def notes(evidence: Evidence, cause: str) -> tuple[str, ...]:
    """Messages that are not in the cause, one note each: the ranks that wrote it, and its words."""
    told: dict[str, list[int]] = {}
    for one in evidence.reports:
        if meaning(one).noted and one.text.rstrip(".") not in cause:
            told.setdefault(_short(one), []).extend([] if one.rank is None else [one.rank])
    texts = []
    for text, who in list(told.items())[:_FEW]:
        texts.append(f"In the log{f' of {ranks(who)}' if who else ''}: {text}")
    if len(told) > _FEW:
        texts.append(f"{plural(len(told) - _FEW, 'more message')} of this kind in the log.")
    return tuple(texts)


def _short(one: Report) -> str:
    if one.kind == "stuck":
        limit = f" for {one.seconds:g} s" if one.seconds else ""
        return f"NCCL's watchdog thread made no progress{limit}."
    return one.text if one.text.endswith(".") else f"{one.text}."


def stacks(evidence: Evidence) -> str:
    """Where processes are by their stacks, also those whose rank is not known."""
    told = {}
    for rank, seen in evidence.ranks.items():
        stack = that_counts(seen.stacks)
        if stack is not None and (at := stand(stack, seen.libraries)):
            told[rank] = f"is in {at}"
    found = [*each_does(told), *unnamed_stacks(evidence)]
    more = len(found) - _FEW
    text = "; ".join(found[:_FEW]) + (f"; and {more} more" if more > 0 else "")
    return sentence(text) if text else ""


def threads(evidence: Evidence) -> tuple[str, ...]:
    """A note on each rank with two threads of the program inside collectives: their order in one
    process group is then not defined."""
    texts = []
    for rank, seen in sorted(evidence.ranks.items()):
        source = next((stack.source for stack in seen.stacks if stack.frames), "")
        inside = {
            stack.thread: stand(stack, seen.libraries)
            for stack in seen.stacks
            if stack.source == source
            and runs_python(stack)
            and in_collective(stack)
            and not any(is_moediag(frame.file) for frame in stack.frames)
        }
        if len(inside) > 1:
            told = "; ".join(f"{name} in {at}" for name, at in list(inside.items())[:_FEW])
            texts.append(
                f"{plural(len(inside), 'thread')} of rank {rank} are in collectives ({told}). On "
                "one process group their order is not defined: give each thread a group of its own."
            )
    more = len(texts) - _FEW
    return (*texts[:_FEW], *([f"The same on {plural(more, 'more rank')}."] if more > 0 else ()))


def unnamed_stacks(evidence: Evidence) -> list[str]:
    """Where processes are whose rank is not known."""
    reports = [one for one in evidence.reports if one.kind == "stack"]
    return [f"{one.detail} (rank not known) is in {one.text}" for one in reports]


def sites(evidence: Evidence) -> str:
    """The lines of the program that made calls which failed."""
    found: dict[str, list[int]] = {}
    for one in evidence.reports:
        if one.kind == "site" and one.rank is not None:
            found.setdefault(one.detail, []).append(one.rank)
    return " ".join(
        f"The call that failed on {ranks(who)} was made at {at}."
        for at, who in list(found.items())[:_FEW]
    )
