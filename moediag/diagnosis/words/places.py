"""Lines of the user's code and their conditions in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moediag.diagnosis.blame.standings import Standing
from moediag.evidence.model import Condition
from moediag.result import Place

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


def words(condition: Condition) -> str:
    """``under `if rank == 0` at train.py:94``."""
    text = _SIDES[condition.side].format(condition.text, condition.leaves)
    return f"{text} at {condition.file}:{condition.line}"


def places(found: Iterable[Standing], culprits: Sequence[int]) -> tuple[Place, ...]:
    """Where the ranks are, for result.json; culprits first."""
    blamed = set(culprits)
    return tuple(
        Place(one.ranks, one.line, one.what, one.callers, tuple(map(words, one.apart)))
        for one in sorted(found, key=lambda one: not blamed & {*one.ranks})
    )
