"""Ranks that hold the same parameters update them equally often."""

from __future__ import annotations

from collections import defaultdict

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, law, recorded
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.law_splits import checks_of
from moediag.diagnosis.schedules.align import POINT_TO_POINT
from moediag.evidence.law_model import PART, REDUCED, LawCheck
from moediag.result import Verdict
from moediag.result.wording import at_line, counted, few_on_each, ranks

_ENOUGH = 2  # updates


@law(Verdict.REPLICA_DIVERGENCE)
def updates_left_out(facts: Facts) -> Findings:
    """Ranks of a watched job that hold the same parameters updated them a different number of times
    for the same reductions of gradients."""
    seen = facts.evidence.ranks.values()
    if any(call.op in POINT_TO_POINT for one in seen for call in one.collectives):
        return  # a rank may make more calls than another
    for key in dict.fromkeys(key for key, _ in facts.of(checks_of)):
        rows = _rows(facts, key)
        lags = [max(counts.values()) - min(counts.values()) for counts in rows]
        apart = [counts for counts, lag in zip(rows, lags, strict=True) if lag]
        # Where the first one differs already, a rank may have made one more before the others.
        if len(apart) < _ENOUGH or lags != sorted(lags) or lags[0] == lags[-1]:
            continue
        sides = agreement.sides(apart[0])
        fewest = sides[min(sides)]
        alone = agreement.minority(sides.values())
        checks = (check for own in facts.of(recorded).values() for check in own.checks)
        one = next(check for check in checks if check.key == key)
        yield Broken(
            "After the same calls on the groups of an optimizer, ranks had made different numbers "
            f"of updates of {counted(one.names)} by its step(){at_line(one.line)}: first "
            f"{few_on_each(apart[0])}, at last {few_on_each(apart[-1])}. For the same reductions "
            f"{ranks(fewest)} updated less often: a step() was left out or made twice on some "
            "ranks only, and parameters and optimizers differ since.",
            pattern="update left out",
            next_step="Look for a branch around step() that ranks may take differently: a skipped "
            "batch, a check of a rank's own loss or norm, an exception that is handled.",
            culprits=alone if len(alone) == 1 and alone != (0,) else (),
            lasting=True,
            names=one.names,
        )
        return


def _rows(facts: Facts, key: str) -> list[dict[int, int]]:
    """The updates so far of each rank, after equal calls of all ranks; only if all pieces belong to
    all of them."""
    laws = facts.of(recorded)
    found: dict[tuple[int | None, ...], dict[int, int]] = defaultdict(dict)
    for rank, own in laws.items():
        for check in own.checks:
            if check.key == key and check.optimizer and _over_all(check, len(laws)):
                for updates, *clocks in check.past:
                    found[tuple(clocks)].setdefault(rank, updates or 0)
    ordered = sorted(found, key=lambda clocks: sum(one or 0 for one in clocks))
    world = facts.evidence.world_size
    return [found[clocks] for clocks in ordered if len(found[clocks]) == world > 1]


def _over_all(check: LawCheck, world: int) -> bool:
    kept = check.pieces and all(piece.how in (REDUCED, PART) for piece in check.pieces)
    known = bool(check.clocks) and None not in check.clocks
    return bool(kept) and known and all(len(piece.ranks) == world for piece in check.pieces)
