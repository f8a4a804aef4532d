"""Gradients are clipped by the norm of all of them, and without the loss scale."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isfinite

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.law_splits import checks_of
from moediag.diagnosis.numbers.reduced_gradients import OwnGradients, own_gradients
from moediag.evidence.law_model import (
    NO_GRADIENT,
    PART,
    PLAIN,
    REDUCED,
    ZERO_GRADIENT,
    ClipNorm,
    LawCheck,
)
from moediag.result import Verdict
from moediag.result.wording import at_line

_ENOUGH = 2  # checked steps
_ROUNDING = 1e-3  # of a factor
_EXACT = 1e-5  # of norms of equal tensors that were scaled


@law(Verdict.WRONG_GRADIENTS)
def local_norms(facts: Facts) -> Findings:
    """Ranks of a watched job clipped their FSDP1 shards of the same gradients by different
    norms."""
    shards: dict[str, tuple[int, ...]] = {}
    calls: dict[tuple[int, tuple[str, ...], int], dict[int, ClipNorm]] = defaultdict(dict)
    for rank, own in facts.of(recorded).items():
        for check in own.checks:
            for piece in check.pieces:
                if piece.how == PART and piece.part.startswith("shard "):
                    shards.setdefault(piece.name, piece.ranks)
        times: dict[tuple[int, tuple[str, ...]], int] = defaultdict(int)
        for norm in own.norms:
            place = norm.step, norm.names
            calls[norm.step, norm.names, times[place]][rank] = norm
            times[place] += 1
    for (step, names, _), norms in sorted(calls.items(), key=lambda one: one[0][0]):
        for ranks in {shards[name] for name in names if name in shards}:
            if set(ranks) <= norms.keys() and len({norms[r].factor for r in ranks}) > 1:
                yield _of_shards(step, {rank: norms[rank] for rank in ranks})


def _of_shards(step: int, norms: dict[int, ClipNorm]) -> Broken:
    first = next(iter(norms.values()))
    told = ", ".join(f"{one.norm:.6g} on rank {rank}" for rank, one in list(norms.items())[:4])
    return Broken(
        f"In step {step} clip_grad_norm_{at_line(first.line)} returned another norm on each rank "
        f"({told}): it computed the norm of each rank's own shard, so the shards of one gradient "
        "were scaled by different factors.",
        pattern="local norms",
        next_step="Call clip_grad_norm_ of the FSDP module: it sums over all shards.",
        lasting=True,
    )


@law(Verdict.WRONG_GRADIENTS)
def scaled_gradients_clipped(facts: Facts) -> Findings:
    """A watched job clipped gradients that were still multiplied by the loss scale."""
    every = [norm for own in facts.of(recorded).values() for norm in own.norms]
    calls = [norm for norm in every if isfinite(norm.norm) and norm.factor < 1]
    # A bound as large as the scale was multiplied by it, too.
    wrong = [norm for norm in calls if norm.scale > max(1.0, norm.max_norm)]
    if len({norm.step for norm in wrong}) < _ENOUGH:
        return
    first = min(wrong, key=lambda norm: norm.step)
    yield Broken(
        f"In step {first.step} clip_grad_norm_{at_line(first.line)} clipped to a norm of "
        f"{first.max_norm:g} gradients that were still multiplied by the loss scale "
        f"{first.scale:g} (their norm was {first.norm:.6g}): after the scaler's division they are "
        f"{first.scale:g} times smaller than intended.",
        pattern="scaled",
        next_step="Call `scaler.unscale_(optimizer)` before clip_grad_norm_.",
    )


@law(Verdict.WRONG_GRADIENTS)
def clipped_before_reduction(facts: Facts) -> Findings:
    """Each rank of a watched job clipped its own gradients, and they were reduced afterwards."""
    laws = facts.of(recorded)
    found: dict[int, dict[int, ClipNorm]] = {}
    several = False
    for (_, step), by_rank in facts.of(checks_of).items():
        if len(by_rank) < max(facts.evidence.world_size, 2):
            continue
        calls = {rank: [one for one in laws[rank].norms if one.step == step] for rank in by_rank}
        if len({len(of) for of in calls.values()}) != 1:
            continue
        several = several or any(len(of) > 1 for of in calls.values())
        for each in zip(*calls.values(), strict=True):
            names = {name for one in each for name in one.names}
            clipped = min(one.factor for one in each) < 1
            apart = agreement.apart([one.norm for one in each], _ROUNDING)
            if clipped and apart and _all_equal(by_rank, names):
                found.setdefault(step, dict(zip(calls, each, strict=True)))
    if len(found) >= _ENOUGH:
        step, norms = next(iter(found.items()))
        first = next(iter(norms.values()))
        told = ", ".join(f"{one.norm:.6g} on rank {rank}" for rank, one in list(norms.items())[:4])
        text = (
            f"In step {step} clip_grad_norm_{at_line(first.line)} returned another norm on each "
            f"rank ({told}), and when the optimizer stepped the same gradients were equal on all "
            "ranks: each rank clipped its own gradients, and they were reduced afterwards."
        )
        if several:  # some bound what each micro-batch adds
            yield Suspicious(text)
            return
        yield Broken(
            text,
            pattern="clipped first",
            next_step="Reduce the gradients first, then clip them: the norm is then the same on "
            "all ranks.",
        )


def norms_told(facts: Facts, names: Sequence[str]) -> str:
    """Which norms clip_grad_norm_ returned, if they alone make the gradients of these parameters
    differ between ranks in the first step that was recorded; else ""."""
    laws = facts.of(recorded)
    for step, ranks in facts.of(own_gradients).items():
        norms = {
            rank: next((n for n in laws[rank].norms if n.step == step), None) for rank in ranks
        }
        factors = [one.factor for one in norms.values() if one is not None]
        used = [[of.used[name] for of in ranks.values()] for name in names if _in(name, ranks)]
        if len(factors) < len(ranks) or not used or not agreement.apart(factors, _EXACT):
            return ""
        whole = (
            [norm / factor for (_, norm), factor in zip(r, factors, strict=True)] for r in used
        )
        if any(agreement.apart(row, _EXACT) for row in whole):
            return ""
        told = ", ".join(f"{one.norm:.6g} on rank {r}" for r, one in norms.items() if one)
        first = next(one for one in norms.values() if one)
        return (
            f"In step {step} clip_grad_norm_{at_line(first.line)} returned another norm on each "
            f"rank ({told}), and before it these gradients were equal: each rank took the norm of "
            "its own part of the model. Add up the squares over the ranks that hold parts."
        )
    return ""


def _in(name: str, ranks: Mapping[int, OwnGradients]) -> bool:
    return all(name in of.used for of in ranks.values())


def _all_equal(by_rank: Mapping[int, LawCheck], names: set[str]) -> bool:
    """Whether all matrices that were clipped are equal on all ranks, and their gradients, too."""
    rows: dict[str, set[tuple[str | None, str | None]]] = defaultdict(set)
    for check in by_rank.values():
        for piece, value, gradient in zip(check.pieces, check.params, check.grads, strict=False):
            if piece.name in names and piece.how in (PLAIN, REDUCED) and "x" in piece.shape:
                trains = gradient not in (None, NO_GRADIENT, ZERO_GRADIENT)
                rows[piece.name].add((value, gradient if trains else None))
    return bool(rows) and all(
        len(row) == 1 and None not in next(iter(row)) for row in rows.values()
    )
