"""The numbers of a failure that a view may draw: tokens, gradient errors, and when ranks called."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.numbers import by_part
from moediag.diagnosis.numbers.gradients import number
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.schedules.starvation import layer_name, tokens_of
from moediag.diagnosis.words.calls import describe
from moediag.diagnosis.words.schedule_view import AFTER, BEFORE
from moediag.evidence.model import Evidence, RankEvidence
from moediag.result import ExpertTokens, LayerError, SideBySide, TimedCall, TimedRank

MOST_ROWS = 32  # of tokens; more ranks share rows
MOST_RANKS = 16  # with a timeline of their own; else one rank of each lane


def tokens(
    evidence: Evidence, blame: Blame, step: int | None, culprits: Sequence[int]
) -> ExpertTokens | None:
    """Tokens of the block where a rank starves an expert in ``step``, else of the first block.
    ``step``: None for the last one."""
    found = tokens_of(evidence)
    steps = {of for of, _ in found.counts}
    if not steps:
        return None
    step = step if step in steps else max(steps)
    blocks = [block for of, block in found.counts if of == step]
    starved = found.block(blame.starved[0].layer) if blame.starved else ""
    uneven = [
        block
        for block in blocks
        if any(min(n) == 0 < max(n) for n in zip(*found.counts[step, block].values(), strict=False))
    ]
    block = starved if starved in blocks else min(uneven or blocks)
    counts = found.counts[step, block]
    width = max(map(len, counts.values()))
    by_rank = {rank: of for rank, of in sorted(counts.items()) if len(of) == width}
    rows = _rows(list(by_rank), culprits)
    fewest = (map(min, zip(*(by_rank[rank] for rank in row), strict=True)) for row in rows)
    return ExpertTokens(block, step, tuple(rows), tuple(map(tuple, fewest)))


def _rows(ranks: Sequence[int], culprits: Sequence[int]) -> list[tuple[int, ...]]:
    """Each rank has a row of its own; among many only culprits, and others share equal parts."""
    if len(ranks) <= MOST_ROWS:
        return [(rank,) for rank in ranks]
    alone = [rank for rank in ranks if rank in culprits][: MOST_ROWS // 2]
    rest = [rank for rank in ranks if rank not in alone]
    size = -(-len(rest) // (MOST_ROWS - len(alone)))
    parts = [tuple(rest[i : i + size]) for i in range(0, len(rest), size)]
    return sorted([*((rank,) for rank in alone), *parts])


def layer_errors(evidence: Evidence, step: int | None) -> tuple[LayerError, ...]:
    """Gradients of ``step`` by layer and part, in the model's order; none without a step."""
    found: dict[tuple[str, str], dict[str, list[tuple[float, float, bool]]]] = {}
    for part, name, error in by_part.errors(evidence, step) if step is not None else ():
        layer = layer_name(name)
        tensors = found.setdefault(("" if layer == name else layer, part), {})
        size = number(error.max_abs), number(error.scale), error.wrong
        tensors.setdefault(name, []).append(size)
    errors = []
    for (layer, part), tensors in found.items():
        sizes, scales, _ = zip(*(one for of in tensors.values() for one in of), strict=True)
        wrong = sum(any(bad for _, _, bad in of) for of in tensors.values())
        worst = next((size for size in sizes if size != size), max(sizes))  # nan is the worst
        errors.append(LayerError(layer, part, len(tensors), wrong, worst, max(scales)))
    return tuple(errors)


def timeline(
    divergence: Divergence | None, schedules: SideBySide | None, evidence: Evidence
) -> tuple[TimedRank, ...]:
    """The calls of ranks around ``divergence``; none where nobody waits or the clock is unknown."""
    if divergence is None or schedules is None:
        return ()
    waits = any(call is None or not call.completed for call in divergence.calls.values())
    every = sum(len(lane.ranks) for lane in schedules.lanes) <= MOST_RANKS
    rows = [
        row
        for lane in schedules.lanes
        for row in ([(rank,) for rank in lane.ranks] if every else [lane.ranks])
        if row[0] in evidence.ranks
    ]
    if not waits or len(rows) < 2:
        return ()
    timed = [_timed(evidence.ranks[row[0]], row, divergence) for row in rows]
    times = [call.begin for row in timed for call in row.calls]
    if not times or min(times) <= 0:
        return ()
    first = min(times)
    return tuple(
        TimedRank(
            row.ranks,
            tuple(TimedCall(c.text, round(c.begin - first, 6), c.state) for c in row.calls),
            row.at,
        )
        for row in sorted(timed, key=lambda row: row.ranks)
    )


def _timed(seen: RankEvidence, ranks: tuple[int, ...], divergence: Divergence) -> TimedRank:
    """With the clock's own times."""
    here = divergence.calls.get(seen.rank)
    calls = seen.collectives
    at = next((i for i, c in enumerate(calls) if here and c.index == here.index), len(calls))
    begin = max(at - BEFORE, 0)
    shown = calls[begin : at + AFTER + 1]
    timed = (TimedCall(describe(c), c.time, "done" if c.completed else "open") for c in shown)
    return TimedRank(ranks, tuple(timed), at - begin if at < len(calls) else None)
