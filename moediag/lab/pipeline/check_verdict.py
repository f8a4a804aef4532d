"""The verdict of a check in one word, and at most three reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moediag.lab.pipeline.check_fit import GIB, UNMODELLED, Fit, FitWord
from moediag.lab.pipeline.check_result import CheckResult, share
from moediag.protocol import FAILS, MAY_FAIL
from moediag.result.answer_blocks import AnswerState, Row

SAFE, WASTEFUL, WILL_FAIL = "SAFE", "WASTEFUL", "WILL FAIL"
_REASONS = 3
_WASTE = 0.1  # share of the gathered bytes
_NO_CHANGE = "recomputation, a smaller batch and up to 16 times the ranks do not make it fit"
_STYLES = {FitWord.FITS: "good", FitWord.TIGHT: "doubt", FitWord.NO: "bad"}


def verdict(result: CheckResult, diverging: Sequence[str]) -> tuple[str, list[Row]]:
    """Returns the word, empty if nothing was decided, and its reasons. ``diverging``: what is said
    of each simulated case whose ranks diverge."""
    fit = list(fits(result.fit)) if result.fit is not None else []
    failing = [Row("FAILS", text, "bad") for text in (*_texts(result, FAILS), *diverging)]
    waste = [Row("WASTE", text, "doubt") for text in wasted(result)]
    doubts = [Row("MAY FAIL", text, "doubt") for text in _texts(result, MAY_FAIL)]
    rows = [*failing, *fit, *waste, *doubts]
    # Whether it fits was asked: it is never among those left out.
    first = [row for row in rows if row in fit] + [row for row in rows if row not in fit]
    chosen = first[:_REASONS]
    kept = [row for row in rows if row in chosen]
    if len(rows) > _REASONS:
        kept.append(Row("", f"and {len(rows) - _REASONS} more", "faint"))
    if result.state == AnswerState.FAILURE:
        return WILL_FAIL, kept
    if result.state == AnswerState.INCONCLUSIVE:
        return "", kept
    if waste:
        return WASTEFUL, kept
    return (SAFE if result.simulated else ""), kept


def _texts(result: CheckResult, level: str) -> list[str]:
    return [one.text for one in result.checked.findings if one.level == level]


def wasted(result: CheckResult) -> Iterator[str]:
    """Yields what ranks hold or send without need."""
    for cost in result.costs:
        padding = share(cost.padding, cost.gathered)
        if cost.ranks > 1 and padding >= _WASTE:
            yield (
                f"{padding:.0%} of the bytes gathered on {cost.axis}[{cost.ranks}] are padding of "
                "rows that do not divide"
            )
    for owner in result.checked.owners:
        idle = sum(first == last for first, last in owner.ranges)
        if idle:
            yield f"{idle} of {len(owner.ranges)} ranks hold no part of {owner.names[0]}"
            return


def fits(fit: Fit) -> Iterator[Row]:
    """Yields whether it fits, if that is known."""
    if fit.word is not None:
        yield Row(str(fit.word), _fitting(fit), _STYLES[fit.word])


def _fitting(fit: Fit) -> str:
    """Returns the peak against the card, in one sentence."""
    peak, card = fit.peak.total / GIB, fit.capacity / GIB
    name = "" if fit.card.replace(".", "").isdecimal() else f" ({fit.card})"
    least = "" if fit.measured else "at least "
    text = f"{least}{peak:.1f} of {card:.1f} GiB{name} in {fit.peak.at}"
    if fit.worst is not None and fit.peak.total <= fit.capacity < fit.worst.total:
        text += f", but {fit.worst.total / GIB:.1f} GiB if its experts get all tokens that they can"
    if fit.word == FitWord.NO:
        return f"{text}; {f'it fits with {fit.change}' if fit.change else _NO_CHANGE}"
    free = f"{(card - peak):.1f} GiB are left for {UNMODELLED}"
    return f"{text}; only {free}" if fit.word == FitWord.TIGHT else f"{text}; {free}"
