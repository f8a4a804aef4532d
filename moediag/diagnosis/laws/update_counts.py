"""Ranks that hold the same parameters update them equally often."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, law, recorded
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.law_splits import checks_of
from moediag.evidence.law_model import PART, REDUCED, LawCheck
from moediag.evidence.model import Evidence
from moediag.result import Verdict
from moediag.result.wording import at_line, ranks

_ENOUGH = 2  # checks
_MANY = 3  # updates

# Calls on the groups that keep the parameters of an optimizer equal.
_Clocks = tuple[int | None, ...]


@law(Verdict.REPLICA_DIVERGENCE)
def updates_left_out(facts: Facts) -> Findings:
    """Ranks of a watched job that hold the same parameters updated them a different number of times
    for the same reductions of gradients."""
    for key in dict.fromkeys(key for key, _ in facts.of(checks_of)):
        yield from _of_past(facts, key)
        rows = _rows(facts, key)
        equal = [count for count, clocks in rows.items() if len(set(clocks.values())) == 1]
        apart = [count for count, clocks in rows.items() if len(set(clocks.values())) > 1]
        later = [count for count in apart if equal and count > equal[0]]
        if len(later) < _ENOUGH or (equal and equal[-1] > later[0]):
            continue
        sides = agreement.sides(rows[later[0]])
        if not _steady({count: rows[count] for count in later}):
            continue
        alone = agreement.minority(sides.values())
        fewest = sides[max(sides, key=_calls)]
        line = _line(facts.evidence, key)
        told = ", ".join(f"{_calls(clocks)} on {ranks(who)}" for clocks, who in sides.items())
        yield Broken(
            f"Before call {later[0] + 1} of the optimizer's step(){at_line(line)}, the calls on "
            f"its groups were {told}; before call {equal[-1] + 1} they were equal on all "
            f"ranks. For the same reductions {ranks(fewest)} updated less often: a step() was "
            "left out or made twice on some ranks only, and parameters and optimizers differ "
            "since.",
            pattern="update left out",
            next_step="Look for a branch around step() that ranks may take differently: a skipped "
            "batch, a check of a rank's own loss or norm, an exception that is handled.",
            culprits=alone if len(alone) == 1 and alone != (0,) else (),
            lasting=True,
        )
        return


def _of_past(facts: Facts, key: str) -> Findings:
    """Updates that ranks made after the same calls, again and again different ones; transfers
    between two ranks may make the calls of one more than those of another."""
    laws = facts.of(recorded)
    ranks_seen = facts.evidence.ranks.values()
    if any(call.peer is not None for seen in ranks_seen for call in seen.collectives):
        return
    found: dict[_Clocks, dict[int, int]] = defaultdict(dict)
    for rank, own in laws.items():
        for check in own.checks:
            if check.key == key and check.optimizer and _over_all(check, len(laws)):
                for updates, *clocks in check.past:
                    found[tuple(clocks)].setdefault(rank, updates or 0)
    whole = [found[c] for c in sorted(found, key=_calls) if len(found[c]) == len(laws) > 1]
    lags = [max(counts.values()) - min(counts.values()) for counts in whole]
    apart = [counts for counts, lag in zip(whole, lags, strict=True) if lag]
    if len(apart) >= _MANY and lags[0] == 0 and lags == sorted(lags) and lags[-1] > 1:
        last = apart[-1]
        fewest = [rank for rank, count in last.items() if count == min(last.values())]
        told = ", ".join(f"{count} on rank {rank}" for rank, count in list(last.items())[:4])
        yield Broken(
            "After the same calls on the groups of an optimizer, ranks had made different numbers "
            f"of updates by its step(){at_line(_line(facts.evidence, key))} (at last {told}): "
            f"{ranks(fewest)} left out updates, again and again, and parameters and optimizers "
            "differ since.",
            pattern="updates left out",
            next_step="Look for a branch around step() that ranks take differently.",
            culprits=tuple(fewest) if len(fewest) == 1 < len(laws) - 1 else (),
            lasting=True,
        )


def _steady(rows: dict[int, dict[int, _Clocks]]) -> bool:
    """Whether all ranks made the same calls from one of these updates to the next, and before the
    first one some made the calls of whole updates more. DDP's ``join`` adds calls on ranks that
    have no samples left."""
    for (earlier, first), (count, then) in pairwise(rows.items()):
        calls = {_calls(then[rank]) - _calls(first[rank]) for rank in then}
        each, rest = divmod(calls.pop(), count - earlier)
        least = min(map(_calls, first.values()))
        if calls or rest or each < 1 or any((_calls(c) - least) % each for c in first.values()):
            return False
    return True


def _calls(clocks: _Clocks) -> int:
    return sum(one or 0 for one in clocks)


def _rows(facts: Facts, key: str) -> dict[int, dict[int, _Clocks]]:
    """Earlier updates of an optimizer -> rank -> calls so far; only where all ranks checked, have
    the same pieces, and all pieces belong to all of them."""
    laws = facts.of(recorded)
    found: dict[int, dict[int, _Clocks]] = defaultdict(dict)
    for rank, own in laws.items():
        for check in own.checks:
            if check.key == key and check.optimizer and _over_all(check, len(laws)):
                found[check.count][rank] = check.clocks
    world = facts.evidence.world_size
    return {count: of for count, of in sorted(found.items()) if len(of) == world > 1}


def _over_all(check: LawCheck, world: int) -> bool:
    kept = check.pieces and all(piece.how in (REDUCED, PART) for piece in check.pieces)
    known = bool(check.clocks) and None not in check.clocks
    return bool(kept) and known and all(len(piece.ranks) == world for piece in check.pieces)


def _line(evidence: Evidence, key: str) -> str:
    checks = (check for own in recorded(evidence).values() for check in own.checks)
    return next((check.line for check in checks if check.key == key), "")
