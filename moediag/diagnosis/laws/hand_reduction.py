"""The update uses the gradients of its own backward, on parameters that begin equal."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import elements, exchanges
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.diagnosis.laws.parameters_apart import wraps_a_part
from moediag.diagnosis.numbers.law_splits import checks_of
from moediag.diagnosis.numbers.reduced_gradients import (
    OwnGradients,
    is_multiple,
    own_gradients,
    reductions,
)
from moediag.evidence.law_model import PART, PLAIN, REDUCED, trains
from moediag.evidence.model import Evidence
from moediag.protocol.names import is_router, plain_name
from moediag.result import Verdict
from moediag.result.wording import at_line, counted, few, listed, plural

_ENOUGH = 3  # steps
_FEW = 3  # matrices


@law(Verdict.WRONG_GRADIENTS)
def gradients_stale(facts: Facts) -> Findings:
    """A watched job that reduces its gradients itself updates with those of an earlier step."""
    steps = facts.of(own_gradients)
    factors = {one.step: one.factor for one in facts.of(reductions)}
    names = {name for ranks in steps.values() for one in ranks.values() for name in one.made}
    found = [name for name in sorted(names) if _stale(name, steps, factors)]
    if found and len(factors) >= _ENOUGH:
        text = (
            f"In all checked steps the update used gradients of {counted(found)} that the "
            "backward of the step before had made, or that had not changed since the first step; "
            "those of the other parameters were reduced after their own backward."
        )
        every = [one for ranks in steps.values() for one in ranks.values()]
        if all(len({one.used[name] for one in every if name in one.used}) > 1 for name in found):
            yield Suspicious(text, tuple(found))  # some reduce a part while the next step runs
            return
        yield Broken(
            text,
            pattern="stale",
            next_step="Wait for the reduction of these gradients before they are read, and copy "
            "its result into .grad.",
            names=tuple(found),
        )


@law(suspects=True)
def reduced_again(facts: Facts) -> Findings:
    """A job whose wrapper averages the gradients also adds up tensors of their sizes itself, in
    every step."""
    every = (piece for own in facts.of(recorded).values() for piece in own.pieces)
    pieces = {(piece.name, piece.how, piece.ranks, piece.shape) for piece in every}
    world = tuple(sorted(facts.evidence.ranks))
    if not pieces or any(how != REDUCED or ranks != world for _, how, ranks, _ in pieces):
        return
    sizes = Counter(elements(shape) for _, _, _, shape in pieces if "x" in shape)
    of: dict[tuple[int, int, str], Counter[int]] = defaultdict(Counter)
    for rank, seen in facts.evidence.ranks.items():
        for call in seen.collectives:
            mine = call.phase == "other" and call.op == "all_reduce" and "float" in call.dtype
            if mine and call.step > 1 and call.numel_in in sizes:
                of[rank, call.step, call.site][call.numel_in] += 1
    whole = {place for place, counts in of.items() if not sizes - counts}
    for site in dict.fromkeys(site for _, _, site in whole):
        steps = [{s for r, s, at in whole if r == rank and at == site} for rank in world]
        common = sorted(set.intersection(*steps))
        if len(common) >= _ENOUGH and sizes.total() >= _FEW:
            yield Suspicious(
                f"In steps {few(common)} the program adds up tensors of the sizes of "
                f"{plural(sizes.total(), 'parameter')} over all ranks{at_line(site)}, though "
                "DistributedDataParallel averages their gradients: these are added up twice, and "
                "multiplied by the number of ranks if nothing divides them."
            )
            return


@law(suspects=True)
def divisors_apart(facts: Facts) -> Findings:
    """The program chose by what FSDP2 divides the gradients of some units of a model, and those of
    others are divided by another number."""
    every = facts.of(recorded).values()
    rows = [one for own in every for one in own.rows("divisors", units=_divisors)]
    for (units,) in rows[:1]:
        of: dict[float, list[str]] = defaultdict(list)
        for name, divisor, _ in units:
            of[divisor].append(name)
        if len(of) > 1 and any(chosen for _, _, chosen in units):
            told = "; ".join(f"by {n:g} those of the units with {listed(of[n])}" for n in of)
            yield Suspicious(
                f"FSDP2 divides the gradients of its units by different numbers: {told}. Some of "
                "them count more than others: call set_gradient_divide_factor for every unit, or "
                "for none.",
                tuple(name for name, _, chosen in units if chosen),
            )


def _divisors(units: Iterable[Any]) -> list[tuple[str, float, bool]]:
    return [(plain_name(name), float(by), bool(chosen)) for name, by, chosen in units]


@law(Verdict.REPLICA_DIVERGENCE)
def starts_apart(facts: Facts) -> Findings:
    """Parameters whose gradients a job adds up over its ranks, or that its first update makes
    equal, begin with other values on each rank. So do routers that its wrapper ignores, and
    parameters that are made after FSDP sharded others of their names. Or a wrapper averages
    gradients of experts of different numbers."""
    laws = facts.of(recorded).values()
    if experts := facts.of(_other_experts):
        told = " and ".join(f"{listed(names)} on rank {rank}" for rank, names in experts.items())
        yield Suspicious(
            "The wrapper averages gradients by position, and has experts of different "
            f"numbers there ({told}): each rank trains its experts with the gradients of others. "
            "Tell the wrapper to ignore experts, by the names that they have in what it wraps.",
            tuple(name for names in experts.values() for name in names),
        )
    often = Counter(name for one in facts.of(reductions) for name in one.names)
    reduced = {name for name, steps in often.items() if steps >= _ENOUGH}
    found: dict[tuple[str, str], list[set[str | None]]] = defaultdict(list)
    grads: dict[str, list[set[str | None]]] = defaultdict(list)  # where values differ
    for (key, _), by_rank in facts.of(checks_of).items():
        first, *others = by_rank.values()
        alike = len(by_rank) == facts.evidence.world_size and {o.key for o in others} == {first.key}
        for at, piece in enumerate(first.pieces if alike else ()):
            rows = found[key, piece.name]
            if piece.how == PLAIN and "x" in piece.shape and (rows or not first.count):
                rows.append({check.params[at] for check in by_rank.values()})
                if len(rows[-1]) > 1:
                    grads[piece.name].append({check.grads[at] for check in by_rank.values()})
    sends = facts.of(exchanges)
    if sends:
        one = {n for n, of in grads.items() if all(len(row) == 1 and trains(row) for row in of)}
        reduced |= {name for name in one if len(grads[name]) >= _ENOUGH}
    began = {n: rows for (_, n), rows in found.items() if rows and len(rows[0] - {None}) > 1}
    unlike = {n: sum(len(row) > 1 for row in grads[n] if trains(row)) for n in began}
    made = tuple(n for n in began if unlike[n] >= _ENOUGH and all(n in own.shards for own in laws))
    if made and {piece.how for own in laws for piece in own.pieces} == {PART, PLAIN}:
        yield Broken(
            f"FSDP sharded {counted(made)}, and the optimizer has others of the same names that "
            "were made later: no wrapper has them, and values and gradients differ between ranks.",
            pattern="made after sharding",
            next_step="Replace layers before the model is wrapped.",
            names=made,
        )
    apart, why = tuple(filter(reduced.__contains__, began)), "their gradients are added up"
    what = "compute gradients of different models. Broadcast the parameters from one rank first"
    if apart and sends:
        what = (
            "exchange samples (all_to_all), and add up gradients of different experts. Leave "
            "experts out of the reduction, and broadcast other parameters first"
        )
    if not apart:
        apart = tuple(name for name, rows in began.items() if _equal_later(rows[1:]))
        why = "after the first update they are equal"
    if sends and facts.of(wraps_a_part) and not apart:
        parts = [name for name in began if "expert" in name.lower()]
        apart = tuple(n for n in began if parts and n not in parts and is_router(n))
        why = "they are routers, and the wrapper keeps other layers outside the experts equal"
        what = (
            "send equal samples to different experts. Do not tell the wrapper to ignore routers, "
            "or broadcast their first values and reduce their gradients"
        )
    if apart:
        yield Suspicious(
            f"{counted(apart)} began with different values on each rank, though {why}: the ranks "
            f"{what}.",
            apart,
        )


def _other_experts(evidence: Evidence) -> dict[int, list[str]]:
    """By rank, experts that a wrapper averages over all ranks, and that are called the same but
    for their numbers; empty if all ranks have the same ones."""
    world = tuple(sorted(evidence.ranks))
    averaged = {
        rank: {
            p.name  # also of whole models
            for p in own.pieces
            if p.how == REDUCED and p.ranks == world and "expert" in p.name
        }
        for rank, own in recorded(evidence).items()
    }
    common = set.intersection(*averaged.values()) if averaged else set()
    own = {rank: sorted(names - common) for rank, names in averaged.items()}
    kinds = {tuple(sorted(re.sub(r"\d+", "", name) for name in names)) for names in own.values()}
    many = len(own) == evidence.world_size > 1 and all(own.values())
    return own if many and len(kinds) == 1 else {}


def _equal_later(rows: list[set[str | None]]) -> bool:
    """Whether all ranks have the same values from then on, which change."""
    same = len(rows) >= _ENOUGH and all(len(row) == 1 and None not in row for row in rows)
    return same and len(set.union(*rows)) > 1


def _stale(name: str, steps: dict[int, dict[int, OwnGradients]], factors: dict[int, float]) -> bool:
    """Whether a gradient is never that of its own step: it is the reduced one of the step before in
    all steps of which that was recorded, or the same in all steps while the backward's changed."""
    rows = {
        step: (
            [one.made[name] for one in ranks.values()],
            [one.used[name] for one in ranks.values()],
        )
        for step, ranks in steps.items()
        if step in factors and all(name in one.made for one in ranks.values())
    }
    if len(rows) < _ENOUGH or any(
        len(set(used)) > 1 or not used[0][1] for _, used in rows.values()
    ):
        return False
    if any(is_multiple(made, used[0], factors[step]) for step, (made, used) in rows.items()):
        return False
    if len({used[0] for _, used in rows.values()}) == 1:
        return len({made[0] for made, _ in rows.values()}) == len(rows)
    after = [step for step in rows if step - 1 in rows]
    return len(after) > 1 and all(
        is_multiple(rows[step - 1][0], rows[step][1][0], factors[step - 1]) for step in after
    )
