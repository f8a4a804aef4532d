"""What was loaded on some ranks only, under other names, or not at all."""

from __future__ import annotations

from moediag.evidence.law_model import PART, Load, RankLaws
from moediag.evidence.model import Evidence
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class PartLoaded:
    """Parameters of which some ranks loaded their part and the others did not."""

    names: tuple[str, ...]
    loaded: tuple[int, ...]
    others: tuple[int, ...]
    step: int
    line: str
    """The user's line that loaded, or ""."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A checkpoint with an optimizer's state that no optimizer loaded."""

    optimizer: str
    line: str


@dataclass(frozen=True, slots=True)
class LoadFacts:
    part: PartLoaded | None = None
    other_names: Load | None = None
    """A load of which some names were missing and others unexpected."""
    forgotten: Forgotten | None = None


def load_facts(evidence: Evidence) -> LoadFacts:
    laws = {r: seen.laws for r, seen in sorted(evidence.ranks.items()) if seen.laws is not None}
    loads = [load for one in laws.values() for load in one.loads]
    return LoadFacts(
        _part(laws),
        next((load for load in loads if load.missing and load.unexpected), None),
        next((found for one in laws.values() if (found := _forgotten(one))), None)
        if not any(one.optimizer_loads for one in laws.values())
        else None,
    )


def _part(laws: dict[int, RankLaws]) -> PartLoaded | None:
    """Before the first update, the whole parameter was one thing on the ranks that loaded it, other
    things on those that did not, and every shard is still what it was made of."""
    sets = {
        piece.name: piece.ranks
        for one in laws.values()
        for check in one.checks
        if check.count == 0
        for piece in check.pieces
        if piece.how == PART
    }
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    step = 0
    for name, ranks in sets.items():
        shards = {
            rank: laws[rank].shards.get(name) for rank in ranks if rank in laws and len(ranks) > 1
        }
        known = {rank: shard for rank, shard in shards.items() if shard is not None}
        if set(known) != set(ranks) or not all(shard.unchanged for shard in known.values()):
            continue
        loaded = tuple(rank for rank, shard in known.items() if shard.loaded)
        others = tuple(rank for rank in known if rank not in loaded)
        of_loaded = {known[rank].whole for rank in loaded}
        of_others = {known[rank].whole for rank in others}
        apart = of_loaded.isdisjoint(of_others) and None not in of_loaded | of_others
        if len(of_loaded) == 1 and of_others and apart:
            found.setdefault((loaded, others), []).append(name)
            step = max(shard.step for shard in known.values())
    if not found:
        return None
    (loaded, others), names = max(found.items(), key=lambda one: len(one[1]))
    line = next((load.line for load in laws[loaded[0]].loads if load.parameters), "")
    return PartLoaded(tuple(names), loaded, others, step, line)


def _forgotten(laws: RankLaws) -> Forgotten | None:
    """The optimizer keeps state, but began without, though a model loaded its parameters."""
    if not laws.optimizer_files or not any(load.parameters for load in laws.loads):
        return None
    fresh = {check.key: check for check in laws.checks if check.count == 0 and not check.state}
    later = {check.key for check in laws.checks if check.count and check.state}
    begun = next((check for key, check in fresh.items() if key in later), None)
    return Forgotten(begun.optimizer, laws.optimizer_files[0]) if begun is not None else None
