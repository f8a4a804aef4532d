"""A job that was started without moediag, as looks at its processes and what listened in them left
it: the evidence of other tools, and a stall that the looks decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from moediag.evidence import foreign, looks, rank_stacks, sources
from moediag.evidence.line_conditions import Sources
from moediag.evidence.looks import Looks
from moediag.evidence.model import UNTOLD, Evidence, ExitStatus, RankEvidence, Stall

# Files of the capture that are evidence of their own; the others belong to these.
_PATTERNS = ("rank-*.pyspy.json", "rank-*.flight")


def read(
    folder: Path,
    capture: Path,
    kept: Sources,
    attached: Mapping[str, str],
    lost: Iterable[str] = (),
) -> Evidence:
    """The evidence in an attempt's ``folder``."""
    seen = looks.read(folder)
    if seen is None:
        return Evidence(0, {}, foreign=True, not_seen=(f"what the looks saw ({folder})",))
    files = [path for pattern in _PATTERNS for path in sorted(capture.glob(pattern))]
    own = sorted(folder.glob("rank-*.stacks.txt"))  # where py-spy could not read the rank
    files += [p for p in own if not (capture / f"{p.name.split('.')[0]}.pyspy.json").exists()]
    found = foreign.evidence(sources.read(files))
    ranks = {
        rank: _rank(rank, found.ranks.get(rank), seen, capture, kept)
        for rank in sorted({*found.ranks, *seen.ranks, *seen.missing})
    }
    stall = stall_of(seen)
    for rank in failed_ranks(seen):
        ranks[rank] = replace(ranks[rank], exit=ExitStatus(signal=UNTOLD))
    recorded = any(one.collectives for one in ranks.values())
    if stall is not None and recorded and found.stall is not None:
        stall = found.stall
    return replace(
        found,
        sources=kept.files,
        world_size=max(found.world_size, seen.world_size),
        ranks=ranks,
        stall=stall,
        not_seen=tuple(
            text
            for text in (*lost, *found.not_seen)
            if not text.endswith("no evidence found") and text != foreign.NO_WORLD_SIZE
        ),
        attached=attached,
        looks=seen,
    )


def failed_ranks(seen: Looks) -> tuple[int, ...]:
    """Ranks that ended and that others wait for. One that nobody waits for may have finished."""
    stall = stall_of(seen)
    return seen.ended if stall is not None and stall.waiting else ()


def stall_of(seen: Looks) -> Stall | None:
    """The stall that looks show; None if the job progresses, or may."""
    if not seen.stands:
        return None
    still = min(look.still for look in seen.ranks.values() if look.at_rest)
    outside = seen.doing(looks.IDLE, looks.STOPPED)
    waiting = seen.doing(looks.WAITS, looks.ON_DEVICE)
    return Stall(0.0, round(still, 1), waiting, outside)


def _rank(
    rank: int, found: RankEvidence | None, seen: Looks, capture: Path, kept: Sources
) -> RankEvidence:
    made = found or RankEvidence(rank)
    look = seen.ranks.get(rank)
    conditions, _ = kept.conditions((f for stack in made.stacks for f in stack.frames), rank)
    return replace(
        made,
        conditions=conditions,
        workers=rank_stacks.read_workers(capture, rank),
        os_state=look.state if look is not None else "",
    )
