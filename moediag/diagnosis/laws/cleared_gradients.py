"""Gradients are cleared between two updates of an optimizer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, Suspicious, law, recorded
from moediag.evidence.law_model import Cleared, RankLaws
from moediag.evidence.model import Evidence
from moediag.result import Verdict
from moediag.result.wording import at_line, few, listed, ranks

_ENOUGH = 2  # checked steps


@law(Verdict.WRONG_GRADIENTS)
def gradients_kept(facts: Facts) -> Findings:
    """The gradients of a watched job were never cleared between two updates, or after some updates
    only."""
    for (optimizer, names), by_rank in facts.of(_optimizers).items():
        who = [rank for rank, records in by_rank.items() if _never(records)]
        records = by_rank[who[0]] if who else next(iter(by_rank.values()))
        kept = sorted({one.step for one in records if one.kept})
        told = f"({few(kept)}) nothing cleared the gradients of {listed(names)}"
        told += f" before {optimizer}.step(){at_line(records[0].line)} was called again"
        if who and not any(one.kept for r, of in by_rank.items() if r not in who for one in of):
            where = "After" if len(who) == len(by_rank) else f"On {ranks(who)}, after"
            yield Broken(
                f"{where} the checked steps {told}: each update also used the gradients of all "
                "updates before it.",
                pattern="kept",
                next_step="Call `optimizer.zero_grad()` once for each update, before the backward.",
            )
        # If a rank sometimes clears them, the program may accumulate over steps on purpose.
        elif not who and len(kept) >= _ENOUGH:
            yield Suspicious(
                f"After some of the checked steps {told}, and after others they were cleared: "
                "several updates used the same gradients. Call zero_grad() once for each update, "
                "or step() once for all backwards.",
                names,
            )


@law(suspects=True)
def gradients_used_twice(facts: Facts) -> Findings:
    """An optimizer makes two updates with one gradient: no backward comes between them."""
    for (optimizer, names), by_rank in facts.of(_optimizers).items():
        steps = [sorted({one.step for one in of if one.again}) for of in by_rank.values()]
        if min(map(len, steps)) < _ENOUGH:
            continue
        line = next(one.line for of in by_rank.values() for one in of if one.again)
        yield Suspicious(
            f"After checked steps ({few(steps[0])}) {optimizer}.step(){at_line(line)} was called "
            "again before any backward: two updates used the same gradient of "
            f"{listed(names)}. Call step() once for each backward.",
            names,
        )


@law(suspects=True)
def gradients_mixed(facts: Facts) -> Findings:
    """An optimizer's update also uses gradients of a backward that came before the update of
    another optimizer, as those that a generator's loss leaves in a discriminator."""
    each_other = facts.of(_each_other)
    for (optimizer, names), by_rank in facts.of(_optimizers).items():
        records = [one for of in by_rank.values() for one in of]
        steps = sorted({one.step for one in records})
        mixed = each_other or all(one.mixed for one in records)
        if len(steps) < _ENOUGH or not mixed or any(one.kept for one in records):
            continue
        yield Suspicious(
            f"After the checked steps ({few(steps)}) the next "
            f"{optimizer}.step(){at_line(records[0].line)} used gradients of {listed(names)} from "
            "two backwards, between which another optimizer stepped and nothing cleared them: its "
            "update has a part of the other optimizer's loss. Call zero_grad() of this optimizer "
            "right before its own backward.",
            names,
        )


@law(suspects=True)
def micro_batches_dropped(facts: Facts) -> Findings:
    """An update has several micro-batches, and something clears the gradients of each before the
    backward of the next one."""
    found = [_dropped(own) for own in facts.of(recorded).values()]
    if found and all(len(steps) > _ENOUGH for steps, *_ in found) and len({*found}) == 1:
        steps, number, line = found[0]
        yield Suspicious(
            f"In steps {few(steps)} each update{at_line(line)} comes after {number} forwards of "
            "different samples, each with a backward, and something clears the gradients before "
            "each backward: the update uses those of the last micro-batch only. Call zero_grad() "
            "once for each update, after step()."
        )


def _dropped(own: RankLaws) -> tuple[tuple[int, ...], int, str]:
    """The checked steps, how many micro-batches each has, if all have as many and the gradients of
    the last one only, and the line of the update. A perturbed input has a gradient, a task may move
    parameters before the next one, and gradients that are combined are written by the program."""
    rows = own.of("losses", _backwards)
    clips = Counter(norm.step for norm in own.norms)
    # FSDP1 clips a flat gradient in as many operations as it has parameters.
    flat = any(piece.part.startswith("shard ") for piece in own.pieces)
    many = {number for _, number, *_ in rows}
    steps: list[int] = []
    for step, number, alone, changed in rows:
        inputs = [one for one in own.inputs if one.step == step]
        apart = len({one.digest for one in inputs}) == len(inputs) == number > 1
        clipped = changed >= 0 and (flat or changed <= clips[step])
        if alone and apart and clipped and not any(i.graded for i in inputs):
            steps.append(step)
    whole = len(steps) == len(rows) and len(many) == 1 and len({c.key for c in own.checks}) == 1
    return (tuple(steps), many.pop(), own.checks[0].line) if whole else ((), 0, "")


def _backwards(event: Mapping[str, Any]) -> tuple[int, int, bool, int]:
    """The step, how many backwards it has, whether each has the only gradients, which no hook takes
    away, and how often a gradient was changed after the last one."""
    every = event["backwards"]
    alone = all(one["left"] for one in every)
    alone = alone and not any(one["added"] or one["moved"] for one in every[1:])
    return int(event["step"]), len(every), alone, int(event["changed"])


def _each_other(evidence: Evidence) -> bool:
    """Whether each of several optimizers always uses gradients of before another one's update. One
    that steps less often than the others accumulates on purpose; all of them cannot."""
    every = (one for own in recorded(evidence).values() for one in own.cleared)
    records = [one for one in every if one.crossed is not None]
    names = {name for one in records for name in one.names}
    held = {
        check.key: names.isdisjoint(piece.name for piece in check.pieces)
        for own in recorded(evidence).values()
        for check in own.checks
        if check.optimizer
    }
    return len(held) > 1 and not any(held.values()) and all(one.crossed for one in records)


def _optimizers(evidence: Evidence) -> dict[tuple[str, tuple[str, ...]], dict[int, list[Cleared]]]:
    """What each rank recorded, by the optimizer's class and the parameters that were followed."""
    of: dict[tuple[str, tuple[str, ...]], dict[int, list[Cleared]]] = defaultdict(dict)
    for rank, own in recorded(evidence).items():
        for one in own.cleared:
            of[one.optimizer, one.names].setdefault(rank, []).append(one)
    return of


def _never(records: list[Cleared]) -> bool:
    """Whether a rank's gradients were kept after all of at least two checked steps."""
    return len({one.step for one in records}) >= _ENOUGH and all(one.kept for one in records)
