"""The lines of the user's program that say why ranks are where they are: the paths of two groups of
ranks from their last common call, or where ranks are and what lets only them come there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moediag.diagnosis.blame.fork_search import Decision
from moediag.diagnosis.blame.forks import Fork
from moediag.diagnosis.blame.standings import Standing
from moediag.evidence.control_flow import CAUGHT, FALSE, OVER, TRUE, TURN
from moediag.evidence.model import Condition, Evidence
from moediag.evidence.program_source import Program
from moediag.result import PathLine
from moediag.result.wording import ranks

_WAYS = {
    TRUE: "true", FALSE: "false", TURN: "went on", OVER: "ended", CAUGHT: "caught an exception",
}  # fmt: skip


_SIDES = {
    "under": "true", "inline": "true", "else": "false", "after": "false", "after-else": "true",
    "loop": "inside", "with": "inside", "decorator": "inside", "handler": "caught an exception",
}  # fmt: skip
_MOST_PLACES = 4
_MOST_CONDITIONS = 2


def path_lines(
    found: Fork | None, standings: Sequence[Standing], evidence: Evidence
) -> tuple[PathLine, ...]:
    """The last common call, the decision or those of which it is one, the first line that only one
    side executed, and where both sides are. If no decision is known: where ranks are, and the
    conditions that the others do not have. Only lines whose source is known."""
    program = found.program if found is not None else Program(evidence.sources, evidence.one_node)
    lines = _lines(found, evidence) if found and found.decisions else _standing(standings, evidence)
    shown = (_as_written(*one, program) for one in dict.fromkeys(lines))
    return tuple(one for one in shown if one.text)


def _as_written(line: PathLine, function: str, program: Program) -> PathLine:
    file = program.file(line.file, line.line, function.rpartition(".")[2])
    if file is None or not 0 < line.line <= len(file.lines):
        return line
    text = file.lines[line.line - 1]
    indent = len(text) - len(text.lstrip())
    return replace(line, file=program.shown(file), text=text.strip(), indent=indent)


def _standing(standings: Sequence[Standing], evidence: Evidence) -> Iterator[tuple[PathLine, str]]:
    """Each with the name of its function, or ""."""
    for one in standings[:_MOST_PLACES]:
        for condition in one.apart[:_MOST_CONDITIONS]:
            acts = ((one.ranks, _way(condition)), *_others(condition, one, evidence))
            yield PathLine(condition.file, condition.line, "", acts), ""
        file, _, line = one.at.rpartition(":")
        if file and line.isdigit():
            yield PathLine(file, int(line), "", ((one.ranks, one.what),)), one.function
        # A helper's line says less than the one that called it, in another file or on one side.
        there = [o.callers for o in standings if o.at == one.at]
        others = [o.callers for o in standings if o is not one]
        caller = next((at for at in one.callers if not (others and all(at in o for o in others))
                       and (at.rpartition(":")[0] != file or not all(at in o for o in there))),
                      "" if others else next(iter(one.callers), ""))  # fmt: skip
        place, _, function = caller.partition(" ")
        above, _, line = place.rpartition(":")
        guarded = any(c.names_rank and (c.side, c.file) == ("under", above) for c in one.apart)
        if file and caller and not guarded:
            yield PathLine(above, int(line), "", ((one.ranks, "came from here"),)), function


def _others(
    condition: Condition, one: Standing, evidence: Evidence
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Ranks for which the condition of ``one`` was otherwise when they were examined."""
    if condition.side not in ("under", "else"):
        return
    known = evidence.ranks.items()
    place, otherwise = f"{condition.file}:{condition.line}", condition.side == "else"
    found = [rank for rank, seen in known if place in seen.tested and rank not in one.ranks]
    if found and all(evidence.ranks[rank].tested[place].holds is otherwise for rank in found):
        yield tuple(sorted(found)), str(otherwise).lower()


def _way(condition: Condition) -> str:
    if condition.text.startswith("except"):
        caught = condition.side in ("under", "handler")
        return "caught an exception" if caught else "had no exception"
    way = _SIDES[condition.side]
    return f"{way}, so no `{condition.leaves}`" if condition.leaves else way


def _lines(found: Fork, evidence: Evidence) -> Iterator[tuple[PathLine, str]]:
    for side in found.sides:
        if side.common is not None and side.before:
            last = side.before[-1]
            both = len({one.before[-1:] for one in found.sides}) == 1
            who = tuple(sorted(r for s in found.sides for r in s.ranks)) if both else side.ranks
            did = f"last made the same call, {side.common.op}"
            yield PathLine(last.file, last.line, found.text(last), ((who, did),)), last.function
    certain = len(found.decisions) == 1
    for one in found.decisions:
        pairs = list(zip(found.sides, one.ways, one.only, strict=True))
        known = [(s.ranks, way) for s, way, _ in pairs if certain and way in _WAYS]
        ways = _WAYS | {FALSE: "had no exception"} if one.text.startswith("except") else _WAYS
        acts = tuple((who, ways[way]) for who, way in known)
        yield PathLine(one.file, one.line, one.text, acts, certain), ""
        for side, _, (line, text) in pairs:
            chain = {(at.file, at.line) for at in side.chain}
            if certain and line not in (0, one.line) and (one.file, line) not in chain:
                yield PathLine(one.file, line, text, ((side.ranks, "alone came here"),)), ""
    for side in found.sides:
        if side.chain:
            stall, made = evidence.stall, side.call is not None and side.call.completed
            stands = stall is not None and side.ranks[0] in stall.waiting and not made
            waits = "waits in" if stands else "called"
            did = f"{waits} {side.call.op}" if side.call is not None else "ended here"
            last = side.chain[-1]
            told = ((side.ranks, did),)
            yield PathLine(last.file, last.line, found.text(last), told), last.function


def advice(found: Fork | None) -> str:
    """What to change at the decision; "" if none is known."""
    if found is None or not found.decisions:
        return ""
    if len(found.decisions) > 1:
        told = [f"`{one.text}` at {one.file}:{one.line}" for one in found.decisions]
        return (
            f"{_both(found)} diverged at one of these: {', '.join(told)}. Make all ranks decide "
            "the same way there."
        )
    (one,) = found.decisions
    at = f"{one.file}:{one.line}"
    if CAUGHT in one.ways:
        side = found.sides[one.ways.index(CAUGHT)]
        if "StopIteration" in one.text:
            return (
                f"Give all ranks the same number of items: {ranks(side.ranks)} had no more at {at}."
            )
        return (
            f"Only {ranks(side.ranks)} caught an exception at {at} (`{one.text}`) and left the "
            "path of the others: do not catch it there, or let all ranks leave together."
        )
    how = _how(found, one)
    if TURN in one.ways or OVER in one.ways:
        return f"Make all ranks run `{one.text}` at {at} the same number of times{how}."
    return f"Make all ranks decide the same way at {at}: `{one.text}`{how}{_set_at(found, one)}."


def _set_at(found: Fork, one: Decision) -> str:
    """``; it is set at train.py:15``: where the value that parted the ranks comes from."""
    file = found.program.file(one.file)
    test = getattr(file.node(one.line), "test", None) if file is not None else None
    made = found.program.set_at(test, file) if file is not None and test is not None else []
    return f"; it is set at {' and '.join(made)}" if 0 < len(made) <= _MOST_CONDITIONS else ""


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
