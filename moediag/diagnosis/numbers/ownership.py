"""Who holds which experts: compares the rows of all ranks together with the checkpoint.

Together the ranks must hold every expert of every layer, each equally often and where sharding
puts it. The rows that are there instead reveal how the others were lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.expert_holders import (
    AT_REST,
    BY_RANK_0,
    by_parameter,
    moments_of,
    numbers,
)
from moediag.evidence.model import Evidence, HeldWeights
from moediag.records import dataclass
from moediag.result.wording import listed, plural, ranks

if TYPE_CHECKING:
    from moediag.protocol import ExpertRows

# Moment -> the first words of a sentence.
WHEN = {"loaded": "After loading", "prepared": "After sharding", "resumed": "After resuming"}
RESHARDED = "one-slice-sharded-again"
DIAGONAL = "piece-of-own-slice"
COPIED = "one-slice-everywhere"
NOT_LOADED = "not-loaded"
MISPLACED = "misplaced"
LOST = (RESHARDED, DIAGONAL, COPIED, NOT_LOADED, MISPLACED)
OFF = "not-sharded"
NOT_LEFT_OUT = "not-left-out"
OTHER_WEIGHTS = "other-weights"
_DESCRIBED = 2  # parameters of which the text says what they hold instead


@dataclass(frozen=True, slots=True)
class OwnershipFacts:
    """Whether the ranks together hold the checkpoint's experts."""

    pattern: str = ""
    """One of this module's names; "" where nothing is wrong."""
    text: str = ""
    when: str = ""
    parameters: tuple[str, ...] = ()
    """FQNs of the wrong parameters."""
    ranks: tuple[int, ...] = ()
    """Ranks where they are wrong."""
    held: Mapping[int, tuple[int, ...]] | None = None
    """For the first wrong parameter: rank -> experts of its rows."""
    seen: bool = False
    """Something was compared."""
    experts: int = 0
    """Experts per layer."""
    axis: int = 1
    """Requested size of the ep axis."""

    @property
    def wrong(self) -> bool:
        return bool(self.pattern)


def ownership_facts(evidence: Evidence) -> OwnershipFacts:
    """The facts at the last moment that every rank reported."""
    moments = moments_of(evidence)
    when = _last_common(moments, evidence.world_size)
    if when is None:
        return OwnershipFacts()
    now = moments[when]
    some = next(iter(now.values()))
    parameters = by_parameter(now)
    most = max((_experts(own, some) for own in parameters.values()), default=some.whole)
    seen = OwnershipFacts(when=when, seen=True, experts=most, axis=some.asked)
    off = _off(evidence, seen)
    if off is not None:
        return off
    wrong = {
        fqn: by_rank
        for fqn, by_rank in parameters.items()
        if not _right(by_rank, _experts(by_rank, some))
    }
    if wrong:
        return _lost(wrong, moments, when, some)
    return _not_left_out(moments, seen) or _others(now, seen)


def _last_common(moments: Mapping[str, Mapping[int, HeldWeights]], world: int) -> str | None:
    whole = [when for when in AT_REST if len(moments.get(when, {})) >= world > 0]
    return whole[-1] if whole else None


def _experts(by_rank: Mapping[int, ExpertRows], some: HeldWeights) -> int:
    """Experts of one parameter."""
    return next((rows.experts for rows in by_rank.values() if rows.experts), some.whole)


def _right(by_rank: Mapping[int, ExpertRows], whole: int) -> bool:
    """Whether every expert is held equally often and every row is the expert that sharding says."""
    if any(_strange(rows) for rows in by_rank.values()):
        return False
    counts = Counter(expert for rows in by_rank.values() for expert in rows.held)
    return counts.keys() == set(range(whole)) and len(set(counts.values())) <= 1


def _strange(rows: ExpertRows) -> bool:
    """Whether some row is no expert, or not the expert that sharding says."""
    pairs = zip(rows.declared, rows.held, strict=True)
    return any(held < 0 or (declared >= 0 and declared != held) for declared, held in pairs)


# ------------------------------------------------------------------------ what is wrong


def _lost(
    wrong: Mapping[str, Mapping[int, ExpertRows]],
    moments: Mapping[str, Mapping[int, HeldWeights]],
    when: str,
    some: HeldWeights,
) -> OwnershipFacts:
    fqn, by_rank = next(iter(wrong.items()))
    whole = _experts(by_rank, some)
    held = {rank: tuple(rows.held) for rank, rows in by_rank.items()}
    slices = _slices(fqn, held, moments, when, whole, some.asked)
    pattern, who = _pattern(held, slices, whole)
    absent = sorted(set(range(whole)) - {e for rows in held.values() for e in rows})
    text = f"{WHEN[when]} the {whole} experts of a layer are not all where they belong: "
    text += "; ".join(f"{names} {'holds' if one else 'hold'} {numbers(rows)}"
                      for names, one, rows in _together(held))  # fmt: skip
    text += f", and {_none_has(absent)}" if absent else ""
    text += f" ({plural(len(wrong), 'expert parameter')}). {_mechanism(pattern, who, slices)}"
    total = {rows.rows for rows in by_rank.values()}
    if total != {whole} and pattern in (RESHARDED, DIAGONAL):
        text += f" The whole parameter has {max(total)} rows now, for {whole} experts."
    where = set(held)
    if pattern in (NOT_LOADED, MISPLACED):  # otherwise a library did the same on all ranks
        strange = {r for rows in wrong.values() for r, own in rows.items() if _strange(own)}
        where = strange or where
    return OwnershipFacts(
        pattern=pattern,
        text=text,
        when=when,
        parameters=tuple(wrong),
        ranks=tuple(sorted(where)),
        held=held,
        seen=True,
        experts=whole,
        axis=some.asked,
    )


def _slices(
    fqn: str,
    held: Mapping[int, tuple[int, ...]],
    moments: Mapping[str, Mapping[int, HeldWeights]],
    when: str,
    whole: int,
    asked: int,
) -> dict[int, tuple[int, ...]]:
    """Rank -> the experts it had after loading; where that is unknown or incomplete, those of its
    place on the axis."""
    loaded = moments.get("loaded", {}) if when != "loaded" else {}
    each = whole // max(asked, 1)
    slices = {}
    for rank in held:
        at = (rank % max(asked, 1)) * each
        slices[rank] = tuple(range(at, at + each))
        before = [r for r in loaded[rank].experts if r.fqn == fqn] if rank in loaded else []
        if before and before[0].held and min(before[0].held) >= 0:
            slices[rank] = tuple(before[0].held)
    return slices


def _pattern(
    held: Mapping[int, tuple[int, ...]], slices: Mapping[int, tuple[int, ...]], whole: int
) -> tuple[str, int | None]:
    """(the pattern, the rank whose experts it involves, if it is one rank's). A slice of all
    ``whole`` experts explains no loss, because it is the whole parameter."""
    everything = sorted(e for rows in held.values() for e in rows)
    if all(expert < 0 for expert in everything):
        return NOT_LOADED, None
    for rank, own in slices.items():
        if len(set(own)) == whole:
            continue
        if len(held) > 1 and all(sorted(rows) == sorted(own) for rows in held.values()):
            return COPIED, rank
        if everything == sorted(own):
            return RESHARDED, rank
    if all(_piece(rows, slices[rank], whole) for rank, rows in held.items()):
        return DIAGONAL, None
    return (NOT_LOADED if min(everything) < 0 else MISPLACED), None


def _piece(rows: Sequence[int], own: Sequence[int], whole: int) -> bool:
    return len(rows) < len(own) < whole and set(rows) < set(own)


def _mechanism(pattern: str, who: int | None, slices: Mapping[int, tuple[int, ...]]) -> str:
    own = f"rank {who}'s slice ({numbers(slices[who])})" if who is not None else ""
    return {
        RESHARDED: f"That is {own}, taken for the whole parameter and sharded again over all "
        "ranks; the other ranks' experts were overwritten.",
        DIAGONAL: "Each rank took its own slice for the whole parameter and kept one piece of it; "
        "the rest of every slice is gone.",
        COPIED: f"That is {own} on every rank: as plain tensors of one name they were taken for "
        "copies of each other, and one rank's was kept.",
        NOT_LOADED: "Some rows match no expert of the checkpoint: they were not loaded, or have "
        "changed since.",
        MISPLACED: "The rows are experts of the checkpoint, but not those that their place says.",
    }[pattern]


def _none_has(absent: Sequence[int]) -> str:
    one = len(absent) == 1
    return f"{'expert' if one else 'experts'} {numbers(absent)} {'is' if one else 'are'} on no rank"


def _off(evidence: Evidence, seen: OwnershipFacts) -> OwnershipFacts | None:
    """A rank computes with all experts of a layer although expert parallelism was requested."""
    if seen.axis <= 1:
        return None
    share = -(-seen.experts // seen.axis)  # the larger part of an uneven division
    used = {
        rank: most
        for rank, one in sorted(evidence.ranks.items())
        if one.experts_used and (most := max(one.experts_used.values())) > share
    }
    if not used:
        return None
    most = max(used.values())
    return OwnershipFacts(
        pattern=OFF,
        text=f"Expert parallelism over {seen.axis} ranks was asked for, and "
        f"{'none' if most >= seen.experts else 'less'} took place: "
        f"{ranks(used)} {'computes' if len(used) == 1 else 'compute'} with {most} of "
        f"{seen.experts} experts of a layer, not with {share}. Nothing reports it: the result is "
        "that of a run without expert parallelism, in the memory of one.",
        when=seen.when,
        parameters=tuple(evidence.ranks[min(used)].experts_used),
        ranks=tuple(used),
        seen=True,
        experts=seen.experts,
        axis=seen.axis,
    )


def _not_left_out(
    moments: Mapping[str, Mapping[int, HeldWeights]], seen: OwnershipFacts
) -> OwnershipFacts | None:
    """Experts that should stay untouched, but are placed differently than they were loaded."""
    before = moments.get("loaded") or moments.get(BY_RANK_0) or {}
    moved: dict[str, tuple[str, str]] = {}
    where = []
    for rank, weights in moments[seen.when].items():
        was = {rows.fqn: rows.placement for rows in before[rank].experts} if rank in before else {}
        if not weights.left_out:
            continue
        changed = {
            rows.fqn: (was[rows.fqn], rows.placement)
            for rows in weights.experts
            if rows.fqn in was and was[rows.fqn] != rows.placement
        }
        moved.update(changed)
        where += [rank] if changed else []
    if not moved:
        return None
    old, new = next(iter(moved.values()))
    return OwnershipFacts(
        pattern=NOT_LEFT_OUT,
        text=f"{plural(len(moved), 'expert parameter')} that sharding was told to leave alone "
        f"(ignored_modules) {'was' if len(moved) == 1 else 'were'} sharded all the same: {old} "
        f"after loading, {new} after sharding. Nothing reports it.",
        when=seen.when,
        parameters=tuple(moved),
        ranks=tuple(where),
        seen=True,
        experts=seen.experts,
        axis=seen.axis,
    )


def _others(now: Mapping[int, HeldWeights], seen: OwnershipFacts) -> OwnershipFacts:
    unequal: dict[str, list[int]] = {}
    instead: dict[str, str] = {}
    for rank, weights in now.items():
        for fqn in weights.unequal:
            unequal.setdefault(fqn, []).append(rank)
            if fqn in weights.instead:
                instead.setdefault(fqn, f" On rank {rank}, {fqn} {weights.instead[fqn]}.")
    if not unequal:
        return seen
    where = tuple(sorted({rank for who in unequal.values() for rank in who}))
    return OwnershipFacts(
        pattern=OTHER_WEIGHTS,
        text=f"{WHEN[seen.when]} {plural(len(unequal), 'parameter')} on {ranks(where)} "
        f"{'is' if len(unequal) == 1 else 'are'} not as in the checkpoint: {listed(unequal)}."
        f"{''.join(list(instead.values())[:_DESCRIBED])}",
        when=seen.when,
        parameters=tuple(unequal),
        ranks=where,
        seen=True,
        experts=seen.experts,
        axis=seen.axis,
    )


def _together(held: Mapping[int, tuple[int, ...]]) -> list[tuple[str, bool, tuple[int, ...]]]:
    """Groups ranks that hold the same experts."""
    sides = agreement.sides(held)
    return [(ranks(who), len(who) == 1, rows) for rows, who in sides.items()]
