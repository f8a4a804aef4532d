"""Parameters that do not train: without a gradient, with one that changes nothing, or not finite;
and norms that scale the parts of one gradient differently."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from moediag.evidence.law_model import (
    NO_GRADIENT,
    PART,
    ZERO_GRADIENT,
    ClipNorm,
    LawCheck,
)
from moediag.evidence.model import Evidence
from moediag.records import dataclass

_ENOUGH = 3  # checked steps
_MOST_NAMES = 20  # that a check lists
_ADAPTER = re.compile(r"(^|\.)lora_(embedding_)?[AB](\.|$)")


@dataclass(frozen=True, slots=True)
class Starved:
    """Parameters of one optimizer without a gradient in any checked step on any rank."""

    optimizer: str
    names: tuple[str, ...]
    zero: bool
    """They had gradients, of zeros only."""
    steps: int
    adapters: bool = False
    """They are all of the optimizer's low-rank adapters."""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """Parameters that became nan or infinite."""

    step: int
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    before: int
    """The last checked step at which they were finite."""
    gradients: tuple[str, ...]
    """Gradients that were not finite then."""
    already: tuple[str, ...]
    """Other parameters that were not finite then."""
    line: str


@dataclass(frozen=True, slots=True)
class LocalNorms:
    """Ranks that hold parts of one gradient scaled them by different factors."""

    step: int
    norms: Mapping[int, ClipNorm]


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    starved: tuple[Starved, ...] = ()
    still: tuple[str, ...] = ()
    """Parameters that never changed although they had gradients and a learning rate."""
    at_rest: tuple[str, ...] = ()
    """Optimizers whose learning rates were 0 in all checked steps on all ranks."""
    not_finite: NotFinite | None = None
    unset: tuple[str, ...] = ()
    """Parameters that were not finite before the first update."""
    local_norms: LocalNorms | None = None

    @property
    def adapters(self) -> Starved | None:
        """Adapters that train nothing."""
        return next((one for one in self.starved if one.adapters), None)


def training_facts(evidence: Evidence) -> TrainingFacts:
    of_optimizer: dict[str, dict[int, list[LawCheck]]] = defaultdict(lambda: defaultdict(list))
    for rank, seen in sorted(evidence.ranks.items()):
        for check in seen.laws.checks if seen.laws is not None else ():
            of_optimizer[check.key][rank].append(check)
    starved: list[Starved] = []
    still: list[str] = []
    at_rest: list[str] = []
    broken: list[NotFinite] = []
    unset: dict[str, None] = {}
    for by_rank in of_optimizer.values():
        if all(len(checks) >= _ENOUGH for checks in by_rank.values()):
            starved += _starved(by_rank)
            still += _still(by_rank)
            at_rest += _at_rest(by_rank)
        broken += [found for found in [_not_finite(by_rank)] if found is not None]
        firsts = [checks[0] for checks in by_rank.values() if checks[0].count == 0]
        unset |= dict.fromkeys(name for first in firsts for name in first.nonfinite)
    return TrainingFacts(
        tuple(starved),
        tuple(dict.fromkeys(still)),
        tuple(dict.fromkeys(at_rest)),
        min(broken, key=lambda one: one.step, default=None),
        tuple(unset),
        _local_norms(evidence),
    )


Checks = Mapping[int, Sequence[LawCheck]]  # of one optimizer, by rank


def _gradients(by_rank: Checks) -> dict[str, set[str | None]]:
    """All gradients of each parameter; None among them where one is unknown. A shard that is on
    other ranks is unknown on all steps of a rank, and left out there."""
    found: dict[str, set[str | None]] = defaultdict(set)
    for checks in by_rank.values():
        for at, piece in enumerate(checks[0].pieces):
            own = {check.grads[at] for check in checks if at < len(check.grads)}
            found[piece.name] |= own if own != {None} else set()
    return found


def _starved(by_rank: Checks) -> list[Starved]:
    gradients = _gradients(by_rank)
    any_check = next(iter(by_rank.values()))[0]
    steps = min(map(len, by_rank.values()))
    without = [n for n, seen in gradients.items() if seen == {NO_GRADIENT}]
    zeros = [
        n for n, seen in gradients.items()
        if seen == {ZERO_GRADIENT} or seen == {ZERO_GRADIENT, NO_GRADIENT}
    ]  # fmt: skip
    adapters = {name for name in gradients if _ADAPTER.search(name)}
    dead = adapters if adapters and adapters <= {*without, *zeros} else set()
    found = []
    if dead:
        zero = not dead <= set(without)
        found.append(Starved(any_check.optimizer, tuple(sorted(dead)), zero, steps, True))
    for names, zero in ((without, False), (zeros, True)):
        left = tuple(name for name in names if name not in dead)
        if left:
            found.append(Starved(any_check.optimizer, left, zero, steps))
    return found


def _still(by_rank: Checks) -> list[str]:
    """Parameters that kept their bytes over all checked steps, on every rank that holds them."""
    moved: set[str] = set()
    held: dict[str, bool] = {}
    for checks in by_rank.values():
        for at, piece in enumerate(checks[0].pieces):
            rows = [(check.params[at], check.grads[at], _rate(check, at)) for check in checks]
            if any(grad is None for _, grad, _ in rows):
                continue
            trained = all(
                grad not in (NO_GRADIENT, ZERO_GRADIENT) and rate for _, grad, rate in rows[:-1]
            )
            held.setdefault(piece.name, True)
            if not trained or len({param for param, _, _ in rows}) != 1 or rows[0][0] is None:
                moved.add(piece.name)
    return [name for name in held if name not in moved]


def _at_rest(by_rank: Checks) -> list[str]:
    groups = [group for checks in by_rank.values() for check in checks for group in check.hyper]
    still = bool(groups) and all(group.get("lr") in ("0", "0.0") for group in groups)
    return [next(iter(by_rank.values()))[0].optimizer] if still else []


def _rate(check: LawCheck, at: int) -> float:
    """The learning rate of a piece; 0 if it is unknown."""
    group = check.pieces[at].group
    text = check.hyper[group].get("lr", "0") if group < len(check.hyper) else "0"
    try:
        return float(text)
    except ValueError:
        return 0.0


def _not_finite(by_rank: Checks) -> NotFinite | None:
    """Parameters that were finite at an earlier check. Before that they may be meant so."""
    found: dict[int, tuple[LawCheck, LawCheck]] = {}
    for rank, checks in by_rank.items():
        for earlier, check in pairwise(checks):
            known = len(earlier.nonfinite) < _MOST_NAMES  # else some may be left out
            if known and set(check.nonfinite) - set(earlier.nonfinite):
                found[rank] = earlier, check
                break
    if not found:
        return None
    step = min(check.step for _, check in found.values())
    first = {rank: pair for rank, pair in found.items() if pair[1].step == step}
    return NotFinite(
        step=step,
        names=tuple(
            dict.fromkeys(
                name
                for earlier, check in first.values()
                for name in check.nonfinite
                if name not in earlier.nonfinite
            )
        ),
        ranks=tuple(sorted(first)),
        before=max(earlier.step for earlier, _ in first.values()),
        gradients=tuple(
            dict.fromkeys(n for earlier, _ in first.values() for n in earlier.nonfinite_grads)
        ),
        already=tuple(
            dict.fromkeys(name for earlier, _ in first.values() for name in earlier.nonfinite)
        ),
        line=next(iter(first.values()))[1].line,
    )


def _local_norms(evidence: Evidence) -> LocalNorms | None:
    """The first step in which FSDP1's shards of the same parameters were scaled differently."""
    shards: dict[str, tuple[int, ...]] = {}
    calls: dict[tuple[int, tuple[str, ...], int], dict[int, ClipNorm]] = defaultdict(dict)
    for rank, seen in sorted(evidence.ranks.items()):
        if seen.laws is None:
            continue
        for check in seen.laws.checks:
            for piece in check.pieces:
                if piece.how == PART and piece.part.startswith("shard "):
                    shards.setdefault(piece.name, piece.ranks)
        times: dict[tuple[int, tuple[str, ...]], int] = defaultdict(int)
        for norm in seen.laws.norms:
            place = norm.step, norm.names
            calls[norm.step, norm.names, times[place]][rank] = norm
            times[place] += 1
    for (step, names, _), norms in sorted(calls.items(), key=lambda one: one[0][0]):
        sets = {shards[name] for name in names if name in shards}
        for ranks in sets:
            if set(ranks) <= norms.keys() and len({norms[r].factor for r in ranks}) > 1:
                return LocalNorms(step, {rank: norms[rank] for rank in ranks})
    return None
