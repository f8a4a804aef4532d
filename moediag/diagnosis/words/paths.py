"""The paths of two groups of ranks from their last common call to where they are, line by line."""

from __future__ import annotations

from collections.abc import Iterator

from moediag.diagnosis.blame.forks import Decision, Fork, Side
from moediag.evidence.control_flow import CAUGHT, FALSE, OVER, TRUE, TURN
from moediag.evidence.model import Evidence
from moediag.result import PathLine
from moediag.result.wording import ranks

_WAYS = {
    TRUE: "true", FALSE: "false", TURN: "went on", OVER: "ended", CAUGHT: "caught an exception",
}  # fmt: skip


def path_lines(found: Fork | None, evidence: Evidence) -> tuple[PathLine, ...]:
    """The last common call, the decision or those of which it is one, the first line that only one
    side executed, and where both sides are. Empty if no decision is known."""
    return tuple(dict.fromkeys(_lines(found, evidence))) if found and found.decisions else ()


def _lines(found: Fork, evidence: Evidence) -> Iterator[PathLine]:
    for side in found.sides:
        if side.common is not None and side.before:
            last = side.before[-1]
            both = len({one.before[-1:] for one in found.sides}) == 1
            who = tuple(sorted(r for s in found.sides for r in s.ranks)) if both else side.ranks
            did = f"last call that both made: {side.common.op}"
            yield PathLine(last.file, last.line, found.text(last), ((who, did),))
    certain = len(found.decisions) == 1
    for one in found.decisions:
        pairs = list(zip(found.sides, one.ways, one.only, strict=True))
        acts = tuple((s.ranks, _WAYS[way]) for s, way, _ in pairs if certain and way in _WAYS)
        yield PathLine(one.file, one.line, one.text, acts, certain)
        for side, _, (line, text) in pairs:
            if certain and line and not _stands(side, one.file, line):
                yield PathLine(one.file, line, text, ((side.ranks, "only here since that call"),))
    for side in found.sides:
        if side.chain:
            stall = evidence.stall
            waits = stall is not None and side.ranks[0] in stall.waiting
            did = f"{'waits in' if waits else 'called'} {side.call.op}" if side.call else "is here"
            last = side.chain[-1]
            yield PathLine(last.file, last.line, found.text(last), ((side.ranks, did),))


def _stands(side: Side, file: str, line: int) -> bool:
    return any((one.file, one.line) == (file, line) for one in side.chain)


def advice(found: Fork | None) -> str:
    """What to change at the decision; "" if none is known."""
    if found is None or not found.decisions:
        return ""
    if len(found.decisions) > 1:
        told = [f"`{one.text}` at {one.file}:{one.line}" for one in found.decisions]
        return (
            f"{_both(found)} parted at one of these: {', '.join(told)}. Make all ranks decide "
            "alike there."
        )
    (one,) = found.decisions
    at = f"{one.file}:{one.line}"
    if CAUGHT in one.ways:
        side = found.sides[one.ways.index(CAUGHT)]
        return (
            f"Only {ranks(side.ranks)} caught an exception at {at} (`{one.text}`) and left the "
            "path of the others: do not catch it there, or let all ranks leave together."
        )
    how = _how(found, one)
    if TURN in one.ways or OVER in one.ways:
        return f"Make all ranks take equally many turns of `{one.text}` at {at}{how}."
    return f"Make all ranks decide alike at {at}: `{one.text}`{how}."


def _how(found: Fork, one: Decision) -> str:
    """`` was true on rank 1, false on rank 0``; of a loop ``: it ended on rank 1, …``."""
    pairs = list(zip(found.sides, one.ways, strict=True))
    told = [f"{_WAYS[way]} on {ranks(side.ranks)}" for side, way in pairs if way in _WAYS]
    if not told:
        return f" parted {_both(found)}"
    loop = any(way in (TURN, OVER) for way in one.ways)
    return f"{': it ' if loop else ' was '}{', '.join(told)}"


def _both(found: Fork) -> str:
    one, two = found.sides
    return f"{ranks(one.ranks).capitalize()} and {ranks(two.ranks)}"
