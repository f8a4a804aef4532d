"""What ranks share in a forward gets the gradients of all; a sum over ranks has each part once."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.large_calls import averaged
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.diagnosis.laws.mean_losses import clip_factors
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.reduced_gradients import is_multiple, own_gradients
from moediag.evidence.law_model import PLAIN
from moediag.evidence.model import Evidence
from moediag.protocol import build
from moediag.protocol.tolerance import LARGE
from moediag.records import dataclass
from moediag.result.wording import agreeing, at_line, few, listed, ranks

_ENOUGH = 2  # steps
_SAME = 1e-4  # of the norm, by which rounding may tell gradients apart
_NEAR = 0.02  # of factors


@dataclass(frozen=True, slots=True)
class Shared:
    """The backward of a Function whose forward added or gathered over ranks."""

    function: str
    line: str
    op: str
    ranks: tuple[int, ...]
    calls: int
    """That its backward made."""
    gradient: tuple[float, float] | None = None
    """Sketch of what its backward got."""
    made: tuple[float, float] | None = None
    """That of what it returned."""
    bias: str = ""
    matrix: str = ""
    """The parameters of the linear layer that made the value, or ""."""

    @property
    def place(self) -> str:
        return f"{self.function.removesuffix('Backward')}{at_line(self.line)}"


@law(suspects=True)
def shared_gradients_lost(facts: Facts) -> Findings:
    """A program's own function gathers or adds over ranks in the forward, its backward gets
    different gradients on the ranks and does not add them; or what ranks gather has a graph and
    never gets a gradient."""
    yield from _cut(facts)
    steps: dict[tuple[str, str], list[tuple[int, Shared, float]]] = defaultdict(list)
    for step, rows in facts.of(_rows):
        first = rows[0]
        sketches = [one.gradient for one in rows if one.gradient is not None]
        silent = len(sketches) == len(rows) and not any(one.calls for one in rows)
        if silent and (size := agreement.far(sketches)) > LARGE:
            steps[first.function, first.line].append((step, first, size))
    for found in steps.values():
        _, one, size = found[0]
        if len({step for step, _, _ in found}) >= _ENOUGH:
            why = "each rank keeps the part of its own loss only."
            if _called_apart(facts, one.ranks):
                why = (
                    "their models were called with different values. Ranks that hold parts of one "
                    "model need the same samples; ranks with samples of their own must add these "
                    "gradients."
                )
            yield Suspicious(
                f"{one.place} calls {one.op} in its forward, so {ranks(one.ranks)} share "
                "the result; in the backward its gradient differs between them by up to "
                f"{100 * min(size, 1):.0f} % of its norm, and nothing adds the gradients: {why}"
            )
            return


def _cut(facts: Facts) -> Findings:
    """What all ranks gathered at one line in several steps, and what no backward reached."""
    rows = {
        rank: [((line, step), True) for step, of in own.of("gathered", _unreached) for line in of]
        for rank, own in facts.of(recorded).items()
    }
    steps: dict[str, list[int]] = defaultdict(list)
    for line, step in agreement.together(rows):
        steps[line].append(step)
    for line, common in steps.items():
        if len(common) >= _ENOUGH:
            yield Suspicious(
                f"In steps {few(common)} the ranks gather what they computed with gradients"
                f"{at_line(line)}, and no backward reaches it: the all_gather of "
                "torch.distributed has no backward, so what computed it is not trained by this "
                "part of the loss. Put the rank's own tensor back into its place in the gathered "
                "list, or use torch.distributed.nn.functional.all_gather; gather it under no_grad "
                "if that is intended."
            )
            return


def _unreached(event: Mapping[str, Any]) -> tuple[int, set[str]]:
    """The step, and the lines of which nothing got a gradient."""
    rows = [(str(row["line"]), bool(row["reached"])) for row in event["rows"]]
    return int(event["step"]), {line for line, _ in rows} - {line for line, got in rows if got}


def _called_apart(facts: Facts, who: Sequence[int]) -> bool:
    """Whether the whole models of these ranks were called with other values in all steps."""
    steps: dict[int, list[str]] = defaultdict(list)
    for rank in who:
        for one in facts.of(recorded)[rank].inputs:
            steps[one.step] += [one.digest] if not one.forward else []
    return bool(steps) and all(len(set(of)) == len(of) == len(who) for of in steps.values())


@law(suspects=True)
def shared_gradients_repeated(facts: Facts) -> Findings:
    """The backward of a program's own function, or of torch's, adds up gradients over ranks that
    hold parts of one model, where all of these have the same gradient already."""
    steps: dict[tuple[str, str], list[tuple[int, Shared]]] = defaultdict(list)
    for step, rows in facts.of(_rows):
        if _repeated(rows) and not _divided(facts, step, rows[0].ranks):
            steps[rows[0].function, rows[0].line].append((step, rows[0]))
    for found in steps.values():
        _, one = found[0]
        number, common = len(one.ranks), sorted({step for step, _ in found})
        # The gradient of a mean of outputs is the same for all samples.
        if len(common) >= _ENOUGH and len({row.gradient for _, row in found}) >= _ENOUGH:
            yield Suspicious(
                f"{one.place} calls {one.op} in its forward, and its backward adds up the "
                f"gradients of {ranks(one.ranks)}. In steps {few(common)} these were equal "
                "already, as the ranks compute the same loss: everything before it gets "
                f"{number} times its gradient, and nothing divides it. Where each rank has the "
                "whole gradient, return it as it is (of a gather: the rank's own part)."
            )
            return


def _repeated(rows: Sequence[Shared]) -> bool:
    """Whether the backwards of all ranks got the same gradient, and returned it as often as there
    are ranks; each its part of what was gathered."""
    norms = [one.gradient[1] for one in rows if one.gradient]
    made = [one.made[1] for one in rows if one.made]
    if not all(one.calls for one in rows) or not len(norms) == len(made) == len(rows):
        return False
    whole = made[0] if rows[0].op == "all_reduce" else math.hypot(*made)
    same = agreement.far([one.gradient for one in rows if one.gradient]) <= _SAME
    return same and norms[0] > 0 and abs(whole / (len(rows) * norms[0]) - 1) <= _NEAR


def _divided(facts: Facts, step: int, who: Sequence[int]) -> bool:
    """Whether something may divide the gradients of these ranks: a wrapper, the loss, or the
    program after the backward, unless all that it changes are sums of them as they are."""
    own = facts.of(recorded)
    wrapped = {one.over for rank in who for one in own[rank].inputs}
    pieces = {piece.ranks for rank in who for piece in own[rank].pieces if piece.how != PLAIN}
    if any(len({*who}.intersection(over)) > 1 for over in wrapped | pieces):
        return True
    losses = (of for rank in who for at, of in own[rank].of("losses", _weights) if at == step)
    if any(abs(weight * len(who) - 1) <= _NEAR for of in losses for weight in of):
        return True
    ranks, clip = facts.of(own_gradients).get(step, {}), facts.of(clip_factors).get(step, 1.0)
    sums = False
    for name, used in ranks[who[0]].used.items() if ranks else ():
        made = [one.made[name] for one in ranks.values() if name in one.made]
        kept = math.isclose(ranks[who[0]].made[name][1] * clip, used[1], rel_tol=_NEAR)
        added = len(made) == len(ranks) and is_multiple(made, used, clip)
        if not kept and not added:
            return True
        sums = sums or not kept
    return not sums and facts.of(averaged)


def _weights(event: Mapping[str, Any]) -> tuple[int, list[float]]:
    """The step, and the weights of means in the loss, and of all tokens of each cross entropy."""
    every = [(of["means"], [one[3] for one in of["of"]]) for of in event["backwards"]]
    return int(event["step"]), [float(one) for of in every for each in of for one in each]


@law(suspects=True)
def biases_added_again(facts: Facts) -> Findings:
    """Each rank adds the same bias to its part of a product, and the parts are added up."""
    found: dict[str, tuple[set[int], Shared]] = {}
    values = {rank: own.values() for rank, own in facts.of(recorded).items()}
    for step, rows in facts.of(_rows):
        one = rows[0]
        same = len({(row.bias, row.matrix) for row in rows}) == 1 and one.op == "all_reduce"
        biases, matrices = (
            [tuple(values[rank].get(name, ())) for rank in one.ranks]
            for name in (one.bias, one.matrix)
        )
        trains = biases[0] and len(set(biases)) == 1 and len(set(biases[0])) > 1
        if same and one.bias and trains and () not in matrices and len(set(matrices)) > 1:
            found.setdefault(one.bias, (set(), one))[0].add(step)
    names = tuple(name for name, (steps, _) in found.items() if len(steps) >= _ENOUGH)
    if names:
        one = found[names[0]][1]
        yield Suspicious(
            f"{listed(names)} {agreeing('is', names)} the same on {ranks(one.ranks)}, "
            f"which hold different parts of {one.matrix}, and each rank adds it before the sum "
            f"over them ({one.place}): it counts {len(one.ranks)} times. Add it after the "
            "sum.",
            names,
        )


def _rows(evidence: Evidence) -> tuple[tuple[int, tuple[Shared, ...]], ...]:
    """Steps, and what all ranks of a group recorded of one place of the program."""
    found: dict[tuple[int, tuple[int, ...]], dict[int, list[Shared]]] = defaultdict(dict)
    for rank, own in recorded(evidence).items():
        for step, rows in own.rows(
            "shared", step=int, rows=lambda rows: [build(Shared, row) for row in rows]
        ):
            for row in rows:
                found[step, row.ranks].setdefault(rank, []).append(row)
    places: list[tuple[int, tuple[Shared, ...]]] = []
    for (step, who), by_rank in sorted(found.items()):
        alike = {tuple((one.function, one.op) for one in rows) for rows in by_rank.values()}
        if set(by_rank) == set(who) and len(who) > 1 and len(alike) == 1:
            every = zip(*(by_rank[rank] for rank in who), strict=True)
            places += [(step, place) for place in every]
    return tuple(places)
