"""Ranks that average their gradients draw the same samples in the same order, and compute alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.evidence.law_model import ModelInputs
from moediag.evidence.model import Evidence
from moediag.result.wording import ranks

_ENOUGH = 2  # steps


@law(suspects=True)
def samplers_apart(facts: Facts) -> Findings:
    """The DistributedSamplers of ranks that average their gradients do not divide one order of the
    samples: they shuffle with different seeds or epochs, or one belongs to another dataset."""
    for steps in facts.of(_steps).values():
        single = {s: of for s, of in steps.items() if all(one.replicas for one in of.values())}
        for what, read in (("seed", _seed), ("epoch", _epoch)):
            found = [step for step, of in single.items() if len(set(map(read, of.values()))) > 1]
            if len(found) >= _ENOUGH:
                first = single[found[0]]
                yield Suspicious(
                    f"In step {found[0]} the {_named(first)} shuffled with a different {what} on "
                    f"each of these ranks ({_told(first, read)}): their parts belong to different "
                    "orders, so some samples come twice in a pass and others never."
                    + (" Call set_epoch on every rank." if what == "epoch" else "")
                )
                return
        other = [s for s, of in single.items() if any(_foreign(one) for one in of.values())]
        if len(other) >= _ENOUGH:
            one = next(one for one in single[other[0]].values() if _foreign(one))
            yield Suspicious(
                f"The {_named(single[other[0]])} was made for a dataset of {one.drawn} samples, "
                f"and its loader has another one of {one.given}: it draws the wrong samples."
            )
            return


@law(suspects=True)
def autocast_apart(facts: Facts) -> Findings:
    """Ranks that average their gradients call their model with autocast on some of them only, or
    with another dtype."""
    for steps in facts.of(_steps).values():
        found = [s for s, of in steps.items() if len({one.autocast for one in of.values()}) > 1]
        if len(found) >= _ENOUGH and len(found) == len(steps):
            of = steps[found[0]]
            told = ", ".join(f"{one.autocast or 'off'} on rank {r}" for r, one in of.items())
            yield Suspicious(
                f"In all compared steps ({', '.join(map(str, found[:6]))}) ranks called their "
                f"model under different autocast settings ({told}): the gradients that they "
                "average were computed in different precision."
            )


def _steps(evidence: Evidence) -> dict[tuple[int, ...], dict[int, dict[int, ModelInputs]]]:
    """By set of ranks, step and rank; only steps that all ranks of the set recorded."""
    found: dict[tuple[int, ...], dict[int, dict[int, ModelInputs]]] = defaultdict(dict)
    for rank, own in recorded(evidence).items():
        for one in own.inputs:
            if not one.forward:
                found[one.over].setdefault(one.step, {})[rank] = one
    return {
        over: {step: of for step, of in sorted(steps.items()) if of.keys() == set(over)}
        for over, steps in found.items()
        if len(over) > 1
    }


def _seed(one: ModelInputs) -> int:
    return one.seed


def _epoch(one: ModelInputs) -> int:
    return one.epoch


def _foreign(one: ModelInputs) -> bool:
    return one.drawn > 0 and one.given > 0 and one.drawn != one.given


def _named(of: Mapping[int, ModelInputs]) -> str:
    first = next(iter(of.values()))
    line = first.made or first.line
    return first.sampler + (f" of the loader at {line}" if line else "")


def _told(of: Mapping[int, ModelInputs], read: Callable[[ModelInputs], int]) -> str:
    return ", ".join(f"{read(one)} on {ranks((rank,))}" for rank, one in list(of.items())[:4])
