"""Gradients are clipped by the norm of all of them, and without the loss scale."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import elements
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.law_splits import checks_of
from moediag.diagnosis.numbers.reduced_gradients import REDUCTIONS, own_gradients
from moediag.evidence.law_model import (
    NO_GRADIENT,
    PART,
    PLAIN,
    REDUCED,
    ZERO_GRADIENT,
    ClipNorm,
    LawCheck,
)
from moediag.evidence.model import Evidence
from moediag.result import Verdict
from moediag.result.wording import agreeing, at_line, counted, few, few_on_each

_ENOUGH = 2  # checked steps
_ROUNDING = 1e-3  # of a factor or norm
_FAR = 2e-3  # of a norm
_APART = 0.01  # of the factors of ranks
_EXACT = 1e-5  # of norms of equal tensors that were scaled


@law(Verdict.WRONG_GRADIENTS)
def local_norms(facts: Facts) -> Findings:
    """Ranks of a watched job clipped FSDP1 shards of the same gradients by different norms, or
    multiplied those of FSDP2 by different numbers."""
    laws = facts.of(recorded)
    parts = [p for own in laws.values() for p in own.pieces if p.part.startswith("shard ")]
    shards = {piece.name: piece.ranks for piece in reversed(parts) if piece.how == PART}
    calls: dict[tuple[int, tuple[str, ...], int], dict[int, ClipNorm]] = defaultdict(dict)
    for rank, own in laws.items():
        times: Counter[tuple[int, tuple[str, ...]]] = Counter()
        for norm in own.norms:
            place = norm.step, norm.names
            calls[norm.step, norm.names, times[place]][rank] = norm
            times[place] += 1
    for (step, names, _), norms in sorted(calls.items(), key=lambda one: one[0][0]):
        for ranks in {shards[name] for name in names if name in shards}:
            if set(ranks) <= norms.keys() and len({norms[r].factor for r in ranks}) > 1:
                yield Broken(
                    f"{_on_each(step, {rank: norms[rank] for rank in ranks})}: it computed the "
                    "norm of each rank's own shard, so the shards of one gradient were scaled by "
                    "different factors.",
                    pattern="local norms",
                    next_step="Call clip_grad_norm_ of the FSDP module: it sums over all shards.",
                    lasting=True,
                )
    yield from _rescaled(facts)


def _on_each(step: int, norms: Mapping[int, ClipNorm]) -> str:
    """The beginning of a sentence about norms that differ."""
    told = few_on_each({rank: one.norm for rank, one in norms.items()}, ".6g")
    line = next(iter(norms.values())).line
    return (
        f"In step {step} clip_grad_norm_{at_line(line)} returned a different norm on each rank "
        f"({told})"
    )


def _rescaled(facts: Facts) -> Findings:
    """Whether ranks multiplied the reduced gradients of FSDP2's shards by different numbers."""
    factors: dict[tuple[int, ...], dict[int, list[tuple[int, float]]]] = defaultdict(dict)
    for rank, own in facts.of(recorded).items():
        for step, ranks, factor in own.of("rescaled", _factor):
            if factor:
                factors[ranks].setdefault(rank, []).append((step, factor))
    for ranks, of_ranks in factors.items():
        rows = agreement.together(of_ranks) if of_ranks.keys() == set(ranks) else {}
        apart = [s for s, of in rows.items() if max(of.values()) > (1 + _APART) * min(of.values())]
        if len(apart) >= _ENOUGH:
            yield Suspicious(
                f"In steps {few(apart)} each rank multiplied the gradients of its shards by a "
                "number of its own between the last backward and the update "
                f"({few_on_each(rows[apart[0]], '.4g')} in step {apart[0]}), as a rank does that "
                "clips by the norm of its own shards: parts of one gradient are scaled by "
                "different factors. Add up the squared norms over the ranks, or use "
                "clip_grad_norm_ of torch."
            )
            return


def _factor(event: Mapping[str, Any]) -> tuple[int, tuple[int, ...], float]:
    """The number by which a rank multiplied all of its shards' gradients; 0.0 if there are
    several."""
    pairs = zip(event["made"], event["used"], strict=True)
    found = [float(used) / float(made) for made, used in pairs if made]
    alike = len(found) > 1 and max(found) <= (1 + _ROUNDING) * min(found)
    return int(event["step"]), tuple(event["ranks"]), found[0] if alike else 0.0


@law(Verdict.WRONG_GRADIENTS)
def scaled_gradients_clipped(facts: Facts) -> Findings:
    """A watched job clipped gradients that were still multiplied by the loss scale."""
    every = [norm for own in facts.of(recorded).values() for norm in own.norms]
    calls = [norm for norm in every if math.isfinite(norm.norm) and norm.factor < 1]
    # A bound as large as the scale was multiplied by it, too.
    wrong = [norm for norm in calls if norm.scale > max(1.0, norm.max_norm)]
    # A number that is the scale times a shorter one was multiplied by it.
    wrong = [one for one in wrong if _digits(one.max_norm) <= _digits(one.max_norm / one.scale)]
    if len({norm.step for norm in wrong}) < _ENOUGH:
        return
    first = min(wrong, key=lambda norm: norm.step)
    text = (
        f"In step {first.step} clip_grad_norm_{at_line(first.line)} clipped to a norm of "
        f"{first.max_norm:g} gradients that were still multiplied by the loss scale "
        f"{first.scale:g} (their norm was {first.norm:.6g}): after the scaler's division they are "
        f"{first.scale:g} times smaller than intended."
    )
    if len({norm.max_norm for norm in wrong}) > 1:
        yield Suspicious(f"{text} The norm changes, so it may follow that of scaled gradients.")
        return
    yield Broken(
        text,
        pattern="scaled",
        next_step="Call `scaler.unscale_(optimizer)` before clip_grad_norm_.",
    )


def _digits(value: float) -> int:
    """Significant digits that show a number exactly."""
    return len(repr(value).partition("e")[0].replace(".", "").strip("0"))


@law(suspects=True)
def clipped_before_backward(facts: Facts) -> Findings:
    """Gradients were clipped before the last backward that added to them (after the update that
    used them, say), and not again before the next update."""
    yield from _never_clipped(facts)
    for own in facts.of(recorded).values():
        rows = own.rows("unclipped", line=str, step=int)
        for line in dict.fromkeys(line for line, _ in rows):
            steps = {step for at, step in rows if at == line}
            calls = [one for one in own.norms if one.line == line]
            last = {one.step: one for one in calls if one.step <= max(steps)}
            clips = {s for s, one in last.items() if not one.norm or one.factor < 1 - _ROUNDING}
            if len(steps) < _ENOUGH or not clips <= steps:
                continue
            none = not any(last[step].norm for step in steps & last.keys())
            yield Suspicious(
                f"In steps {few(sorted(steps))} clip_grad_norm_{at_line(line)} "
                f"{'found no gradients' if none else 'clipped gradients'}, then a backward added "
                "to all of them, and the next update used them as they were: what that backward "
                "computed is not clipped. Call it between the last backward and step().",
                tuple(dict.fromkeys(n for one in calls if one.step in steps for n in one.names)),
            )
            return


def _never_clipped(facts: Facts) -> Findings:
    """Whether a call found no gradients in all checked steps, though its parameters train."""
    for own in facts.of(recorded).values():
        values, late = own.values(), {line for (line,) in own.rows("unclipped", line=str)}
        for line in dict.fromkeys(one.line for one in own.norms if one.line not in late):
            calls = [one for one in own.norms if one.line == line]
            none = len({one.step for one in calls}) > _ENOUGH and not any(c.norm for c in calls)
            if none and any(len({*values.get(n, ())}) > _ENOUGH for n in calls[0].names):
                yield Suspicious(
                    f"clip_grad_norm_{at_line(line)} found no gradients in all checked steps, "
                    "though the parameters train: the engine or wrapper may keep their gradients "
                    "elsewhere (DeepSpeed does), so nothing is clipped. Use the engine's own "
                    "`gradient_clipping`, or accelerate's clip_grad_norm_."
                )
                return


@law(suspects=True)
def clipped_before_reduction(facts: Facts) -> Findings:
    """Each rank of a watched job clipped its own gradients, and they were reduced afterwards."""
    # Some bound what each rank or micro-batch adds, as for differential privacy.
    found: dict[int, dict[int, ClipNorm]] = {}
    inside = False
    for step, by_rank, calls in _calls_of_all(facts):
        for norms in calls:
            each = norms.values()
            names = {name for one in each for name in one.names}
            clipped = min(one.factor for one in each) < 1
            if not (clipped and agreement.apart([one.norm for one in each], _ROUNDING)):
                continue
            within = _reduces_inside(facts.evidence, step, by_rank, names)
            if within or _all_equal(by_rank, names):
                found.setdefault(step, norms)
                inside = inside or within
    if len(found) >= _ENOUGH:
        when = "when the optimizer stepped the same gradients were equal on all ranks"
        if inside:
            when = "the optimizer reduces gradients inside its step()"
        yield Suspicious(
            f"{_on_each(*next(iter(found.items())))}, and {when}: each rank clipped its own "
            "gradients, and they were reduced afterwards. Reduce the gradients first, then clip "
            "them."
        )


@law(Verdict.WRONG_GRADIENTS)
def norm_incomplete(facts: Facts) -> Findings:
    """All ranks of a watched job clipped by one norm that is not that of all their gradients."""
    found: dict[int, tuple[float, list[str], ClipNorm]] = {}
    for step, _, calls in _calls_of_all(facts):
        if len(calls) != 1:
            continue
        each = list(calls[0].values())
        names = each[0].names
        if any(one.names != names or len(one.squares) != len(names) for one in each):
            continue
        rows = list(zip(*(one.squares for one in each), strict=True))
        # A replica that each rank computes itself is not equal to the last bit.
        norms = [_owned(rows, tolerance) for tolerance in (0.0, _ROUNDING)]
        used = [one.norm for one in each]
        clips = min(one.factor for one in each) < 1 and not agreement.apart(used, _ROUNDING)
        if clips and all(agreement.apart((*used, norm), _FAR) for norm in norms):
            parts = [n for n, row in zip(names, rows, strict=True) if agreement.apart(row, _FAR)]
            found[step] = norms[0], parts, each[0]
    if len(found) >= _ENOUGH:
        step, (owned, parts, one) = next(iter(found.items()))
        yield Broken(
            f"In step {step} DeepSpeed{at_line(one.line)} clipped by the norm {one.norm:.6g}, and "
            f"the norm of all gradients is {owned:.6g}: {counted(parts)} "
            f"{agreeing('has', parts)} different gradients on other ranks, and each rank's norm "
            "includes only its own.",
            pattern="norm incomplete",
            next_step="Set `gradient_clipping` to 0 and clip in the program, by a norm that adds "
            "up the squared norms of these parameters over the ranks (DeepSpeed issue 8475).",
        )


def _owned(rows: Iterable[Iterable[float]], tolerance: float) -> float:
    """The norm of all gradients. Rows: one's squared norm on each rank; equal ones count once."""
    total = 0.0
    for row in rows:
        found: list[float] = []
        for square in sorted(row):
            if not found or agreement.apart((found[-1], square), tolerance):
                found.append(square)
        total += math.fsum(found)
    return math.sqrt(total)


def _calls_of_all(
    facts: Facts,
) -> Iterator[tuple[int, Mapping[int, LawCheck], list[dict[int, ClipNorm]]]]:
    """Each checked step of all ranks, and its calls that clipped if all ranks made as many. A
    second update of the same parameters in a step (DiLoCo's outer one) has other gradients."""
    laws, updated = facts.of(recorded), set[tuple[int, str]]()
    for (_, step), by_rank in facts.of(checks_of).items():
        own = {(step, piece.name) for check in by_rank.values() for piece in check.pieces}
        again, updated = bool(updated & own), updated | own
        if again:
            continue
        calls = [[one for one in laws[rank].norms if one.step == step] for rank in by_rank]
        if len(by_rank) >= max(facts.evidence.world_size, 2) and len(set(map(len, calls))) == 1:
            each = (dict(zip(by_rank, one, strict=True)) for one in zip(*calls, strict=True))
            yield step, by_rank, list(each)


def norms_told(facts: Facts, names: Sequence[str]) -> str:
    """Which norms clip_grad_norm_ returned, if they alone make the gradients of these parameters
    differ between ranks in the first step that was recorded; else ""."""
    laws = facts.of(recorded)
    for step, ranks in facts.of(own_gradients).items():
        norms = {rank: n for rank in ranks for n in reversed(laws[rank].norms) if n.step == step}
        factors = [one.factor for one in norms.values()]
        shared = (name for name in names if all(name in of.used for of in ranks.values()))
        used = [[of.used[name] for of in ranks.values()] for name in shared]
        if len(factors) < len(ranks) or not used or not agreement.apart(factors, _EXACT):
            return ""
        whole = ([n / by for (_, n), by in zip(row, factors, strict=True)] for row in used)
        if any(agreement.apart(row, _EXACT) for row in whole):
            return ""
        return (
            f"{_on_each(step, norms)}, and before it these gradients were equal: each rank took "
            "the norm of its own part of the model. Add up the squares over the ranks that hold "
            "parts."
        )
    return ""


def _all_equal(
    by_rank: Mapping[int, LawCheck], names: set[str], with_gradients: bool = True
) -> bool:
    """Whether all matrices that were clipped are equal on all ranks, and their gradients, too:
    some may have none on every rank."""
    rows: dict[str, set[tuple[str | None, str | None]]] = defaultdict(set)
    for check in by_rank.values():
        for piece, value, gradient in zip(check.pieces, check.params, check.grads, strict=False):
            if piece.name in names and piece.how in (PLAIN, REDUCED) and "x" in piece.shape:
                none = gradient in (NO_GRADIENT, ZERO_GRADIENT)
                told = gradient if with_gradients or gradient is None else "its own"
                rows[piece.name].add((value, NO_GRADIENT if none else told))
    every = [next(iter(row)) for row in rows.values() if len(row) == 1]
    known = len(every) == len(rows) and not any(None in one for one in every)
    return known and any(gradient != NO_GRADIENT for _, gradient in every)


def _reduces_inside(
    evidence: Evidence, step: int, by_rank: Mapping[int, LawCheck], names: set[str]
) -> bool:
    """Whether ranks with equal matrices reduce as many elements as these have inside the
    optimizer's step."""
    shapes = {p.name: p.shape for c in by_rank.values() for p in c.pieces if p.name in names}
    needed = sum(elements(shape) for shape in shapes.values() if "x" in shape)
    reduced = [
        sum(
            call.numel_in
            for call in evidence.ranks[rank].collectives
            if call.step == step and call.phase == "optimizer" and call.op in REDUCTIONS
        )
        for rank in by_rank
    ]
    return min(reduced) >= needed > 0 and _all_equal(by_rank, names, with_gradients=False)
