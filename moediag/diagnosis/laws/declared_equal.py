"""Tensors that a program declares to be equal on several ranks are equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, law, recorded
from moediag.diagnosis.numbers import agreement
from moediag.evidence.law_model import DeclaredTensor
from moediag.evidence.model import Evidence
from moediag.protocol.tolerance import LARGE
from moediag.result import Verdict
from moediag.result.wording import at_line, few, ranks

_ENOUGH = 2  # steps

# The tensors of all ranks at one place of the program.
_Row = tuple[DeclaredTensor, ...]


@law(Verdict.WRONG_GRADIENTS)
def declared_inputs_apart(facts: Facts) -> Findings:
    """Ranks of one tensor-parallel group of a watched job called their model with different
    samples, which the program declares to be the same."""
    given = _given(facts.evidence)
    for who, steps in _declared(facts.evidence):
        compared: list[int] = []
        apart: dict[int, DeclaredTensor] = {}
        for step, rows in steps.items():
            for row in rows:
                digests = [one.digest for one in row]
                if all(
                    digest is not None and digest in given.get((rank, step), ())
                    for rank, digest in zip(who, digests, strict=True)
                ):
                    compared.append(step)
                    if len(set(digests)) > 1:
                        apart.setdefault(step, row[0])
        if len(apart) < _ENOUGH or set(compared) != set(apart):
            continue
        first = next(iter(apart.values()))
        yield Broken(
            _sentence(first, who, list(apart), "the model's own input, a tensor of integers"),
            pattern="declared inputs",
            next_step=f"Give all ranks of one {', '.join(first.axes)} group the same samples: "
            "choose them by the data-parallel rank, not by the global rank.",
            lasting=True,
        )


@law()
def declared_tensors_apart(facts: Facts) -> Findings:
    """Floats that a watched job declares to be equal on several ranks differ by more than
    rounding."""
    for who, steps in _declared(facts.evidence):
        apart: dict[int, tuple[DeclaredTensor, float]] = {}  # the first one of each step
        for step, rows in steps.items():
            for row in rows:
                sketches = [one.sketch for one in row if one.sketch is not None]
                if len(sketches) == len(row) and (size := agreement.far(sketches)) > LARGE:
                    apart.setdefault(step, (row[0], size))
        if len(apart) >= _ENOUGH and set(apart) == set(steps):
            first, size = next(iter(apart.values()))
            much = f" by up to {100 * min(size, 1):.0f} % of its norm"
            yield _sentence(first, who, list(apart), "a tensor of floats", much)
            return


def _given(evidence: Evidence) -> dict[tuple[int, int], set[str]]:
    """(rank, step) -> fingerprints of the tensors that models were called with."""
    found: dict[tuple[int, int], set[str]] = defaultdict(set)
    for rank, own in recorded(evidence).items():
        for one in own.inputs:
            found[rank, one.step] |= set(one.digest.split("-"))
    return found


def _declared(evidence: Evidence) -> Iterator[tuple[tuple[int, ...], Mapping[int, list[_Row]]]]:
    """Ranks that no axis of data parallelism connects, and what they declared in each step in
    which all of them declared the same tensors in the same order."""
    found: dict[tuple[int, ...], dict[int, dict[int, list[DeclaredTensor]]]] = {}
    for rank, own in recorded(evidence).items():
        for one in own.declared:
            if not one.data and rank in one.ranks:
                steps = found.setdefault(one.ranks, {}).setdefault(rank, defaultdict(list))
                steps[one.step].append(one)
    for who, of in found.items():
        every = agreement.together({rank: steps.items() for rank, steps in of.items()})
        rows = {s: [by_rank[r] for r in who] for s, by_rank in every.items() if {*of} == {*who}}
        yield (
            who,
            {s: [*zip(*of_rank, strict=True)] for s, of_rank in rows.items() if _alike(of_rank)},
        )


def _alike(rows: Sequence[Sequence[DeclaredTensor]]) -> bool:
    """Whether the ranks declared the same tensors in the same order."""
    return len({tuple((one.part, one.shape, one.axes) for one in row) for row in rows}) == 1


def _sentence(
    first: DeclaredTensor, who: tuple[int, ...], steps: list[int], what: str, much: str = ""
) -> str:
    return (
        f"In all compared steps ({few(steps)}) {what} "
        f"({first.shape}){at_line(first.line)} differs between {ranks(who)}{much}, though the "
        f"program declares it to be the same on all ranks of {', '.join(first.axes)} "
        "(DTensor.from_local with Replicate)."
    )
