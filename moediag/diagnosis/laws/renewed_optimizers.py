"""The optimizer of a model lives as long as its training."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.evidence.law_model import REDUCED, LawCheck
from moediag.result.wording import at_line, plural, ranks

_ENOUGH = 2  # times


@law(suspects=True)
def moments_dropped(facts: Facts) -> Findings:
    """The optimizer of a wrapped model is made anew again and again, without the state of the one
    before; or an optimizer's own state is emptied, on some ranks or again and again."""
    yield from _emptied(facts)
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    first: dict[tuple[int, ...], LawCheck] = {}
    for rank, own in facts.of(recorded).items():
        # All optimizers of the same parameters and class, in the order of their making.
        of: dict[str, dict[str, list[LawCheck]]] = defaultdict(dict)
        for check in own.checks:
            if check.optimizer and all(piece.how == REDUCED for piece in check.pieces):
                digest, _, _ = check.key.rpartition(".")
                of[digest].setdefault(check.key, []).append(check)
        for rows in of.values():
            anew = [new[0] for old, new in pairwise(rows.values()) if _takes_over(old, new)]
            if len(anew) >= _ENOUGH:
                steps = tuple(check.step for check in anew)
                found[steps].append(rank)
                first[steps] = anew[0]
    for steps, who in found.items():
        check = first[steps]
        yield Suspicious(
            f"On {ranks(who)} the {check.optimizer} that steps{at_line(check.line)} was made anew "
            f"before steps {', '.join(map(str, steps[:6]))}: each time the state (moments, step "
            f"counts) of {plural(len(check.pieces), 'parameter')} began again.",
            tuple(piece.name for piece in check.pieces),
        )


def _emptied(facts: Facts) -> Findings:
    """The state of one optimizer had counted fewer updates than at the check before."""
    every = facts.of(recorded)
    emptied: dict[tuple[int, ...], list[int]] = defaultdict(list)
    first: dict[tuple[int, ...], LawCheck] = {}
    for rank, own in every.items():
        of: dict[str, list[LawCheck]] = defaultdict(list)
        for check in own.checks:
            of[check.key].append(check)
        for rows in of.values():
            again = [
                new
                for old, new in pairwise(rows)
                if 0 <= new.age < old.age and new.count > old.count
            ]
            if again:
                steps = tuple(check.step for check in again)
                emptied[steps].append(rank)
                first[steps] = again[0]
    for steps, who in emptied.items():
        check = first[steps]
        if len(who) < len(every) or len(steps) >= _ENOUGH:
            alone = " alone" if len(who) < len(every) else ""
            yield Suspicious(
                f"On {ranks(who)}{alone}, before {'steps' if len(steps) > 1 else 'step'} "
                f"{', '.join(map(str, steps[:6]))}, something emptied the state (moments, step "
                f"counts) of the {check.optimizer} that steps{at_line(check.line)}: it had counted "
                f"{check.age:g} of {plural(check.count, 'update')}.",
                tuple(piece.name for piece in check.pieces),
            )


def _takes_over(old: list[LawCheck], new: list[LawCheck]) -> bool:
    """Whether the second optimizer began without state, after the first one had some and made its
    last update. State that was loaded has counted more updates than the optimizer made."""
    has_state = any(value is not None for row in old[-1].state.values() for value in row)
    first = new[0]
    empty = not any(value is not None for row in first.state.values() for value in row)
    fresh = empty if not first.count else 0 <= first.age <= first.count
    return has_state and fresh and old[-1].step < first.step
