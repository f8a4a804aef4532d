"""The optimizer of a model lives as long as its training."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.evidence.law_model import REDUCED, LawCheck
from moediag.result.wording import at_line, few, plural, ranks

_ENOUGH = 2  # times


@law(suspects=True)
def moments_dropped(facts: Facts) -> Findings:
    """The optimizer of a wrapped model is made anew again and again, without the state of the one
    before; or an optimizer's own state is emptied, on some ranks or again and again."""
    every = facts.of(recorded)
    anew: dict[tuple[int, ...], list[tuple[int, LawCheck]]] = defaultdict(list)
    emptied: dict[tuple[int, ...], list[tuple[int, LawCheck]]] = defaultdict(list)
    for rank, own in every.items():
        # All optimizers of the same parameters and class, in the order of their making.
        of: dict[str, dict[str, list[LawCheck]]] = defaultdict(lambda: defaultdict(list))
        for check in own.checks:
            of[check.key.rpartition(".")[0]][check.key].append(check)
        for made in of.values():
            rows = [[c for c in one if c.optimizer and _reduced(c)] for one in made.values()]
            again = [new[0] for old, new in pairwise(filter(None, rows)) if _takes_over(old, new)]
            if len(again) >= _ENOUGH:
                anew[tuple(check.step for check in again)].append((rank, again[0]))
            for one in made.values():
                # It had counted fewer updates than at the check before.
                less = [b for a, b in pairwise(one) if 0 <= b.age < a.age and b.count > a.count]
                if less:
                    emptied[tuple(check.step for check in less)].append((rank, less[0]))
    for steps, found in emptied.items():
        check = found[-1][1]
        if len(found) < len(every) or len(steps) >= _ENOUGH:
            alone = " alone" if len(found) < len(every) else ""
            yield Suspicious(
                f"On {ranks(rank for rank, _ in found)}{alone}, before "
                f"{'steps' if len(steps) > 1 else 'step'} {few(steps)}, something emptied the "
                f"state (moments, step counts) of the {check.optimizer} that steps"
                f"{at_line(check.line)}: it had counted {check.age:g} of "
                f"{plural(check.count, 'update')}.",
                check.names,
            )
    for steps, found in anew.items():
        check = found[-1][1]
        yield Suspicious(
            f"On {ranks(rank for rank, _ in found)} the {check.optimizer} that steps"
            f"{at_line(check.line)} was made anew before steps {few(steps)}: each time the state "
            f"(moments, step counts) of {plural(len(check.pieces), 'parameter')} began again.",
            check.names,
        )


def _reduced(check: LawCheck) -> bool:
    return all(piece.how == REDUCED for piece in check.pieces)


def _takes_over(old: list[LawCheck], new: list[LawCheck]) -> bool:
    """Whether the second optimizer began without state, after the first one had some and made its
    last update. State that was loaded has counted more updates than the optimizer made."""
    has_state = any(value is not None for row in old[-1].state.values() for value in row)
    first = new[0]
    empty = not any(value is not None for row in first.state.values() for value in row)
    fresh = empty if not first.count else 0 <= first.age <= first.count
    return has_state and fresh and old[-1].step < first.step
