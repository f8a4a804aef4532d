"""What ranks share in a forward gets the gradients of all; a sum over ranks has each part once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.diagnosis.numbers import agreement
from moediag.evidence.model import Evidence
from moediag.protocol import build
from moediag.protocol.tolerance import LARGE
from moediag.records import dataclass
from moediag.result.wording import agreeing, at_line, few, listed, ranks

_ENOUGH = 2  # steps


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
