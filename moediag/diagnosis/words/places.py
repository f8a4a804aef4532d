"""Lines of the user's code and their conditions in words, with the values of names on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from moediag.diagnosis.blame.forks import Fork
from moediag.diagnosis.blame.standings import Standing
from moediag.evidence.model import Condition, Evidence
from moediag.result import Place
from moediag.result.wording import on_each, ranks

_SIDES = {  # how a condition relates to the line
    "under": "under `{}`",
    "else": "in the else branch of `{}`",
    "after": "after `{}: {}`",
    "after-else": "after the else branch of `{}` ({})",
    "loop": "in `{}`",
    "inline": "in `{}`",
    "with": "in `{}`",
    "decorator": "in a function with `{}`",
    "handler": "in the handler `{}`",
}
_MOST = 2  # conditions, and names of each


def words(condition: Condition) -> str:
    """``under `if rank == 0` at train.py:94``."""
    text = _SIDES[condition.side].format(condition.text, condition.leaves)
    return f"{text} at {condition.file}:{condition.line}"


def sends(condition: Condition, one: Standing, other: Standing) -> str:
    """That a condition sends ranks to two places, as :func:`.dividing` finds them."""
    return (
        f"`{condition.text}` at {condition.file}:{condition.line} sends {ranks(one.ranks)} to "
        f"{one.at} and {ranks(other.ranks)} to {other.at}"
    )


def places(found: Iterable[Standing], culprits: Sequence[int]) -> tuple[Place, ...]:
    """Where the ranks are, for result.json; culprits first."""
    blamed = set(culprits)
    return tuple(
        Place(one.ranks, one.line, one.what, one.callers, tuple(map(words, one.apart)))
        for one in sorted(found, key=lambda one: not blamed & {*one.ranks})
    )


def sentences(found: Sequence[Standing], forked: Fork | None, evidence: Evidence) -> str:
    """`` At train.py:456, `main` is True on rank 0, False on rank 1.``, for the conditions that
    part the ranks; "" where no name is known to differ."""
    conditions = [c for one in found for c in one.apart]
    places = [f"{c.file}:{c.line}" for c in conditions]
    places += [f"{one.file}:{one.line}" for one in (forked.decisions if forked else ())]
    texts = []
    for place in dict.fromkeys(places):
        pieces = [
            f"`{name}` is {', '.join(on_each(of))}" for name, of in differing(place, evidence)
        ]
        if pieces:
            texts.append(f" At {place}, {'; '.join(pieces[:_MOST])}.")
    return "".join(texts[:_MOST])


def differing(place: str, evidence: Evidence) -> Iterator[tuple[str, Mapping[int, str]]]:
    """The names in the condition at ``file.py:12`` whose values differ between ranks, by rank."""
    known = {r: seen.tested[place] for r, seen in evidence.ranks.items() if place in seen.tested}
    names = dict.fromkeys(name for test in known.values() for name in test.values)
    for name in names:
        values = {rank: test.values[name] for rank, test in known.items() if name in test.values}
        if len(set(values.values())) > 1:
            yield name, values
