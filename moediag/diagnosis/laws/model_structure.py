"""Together the ranks hold every layer of a model, and its embedding knows every token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.records import dataclass
from moediag.result.wording import listed, plural

_ENOUGH = 3  # steps
_MOST_ZEROS = 4  # of which one of so many tokens may get zeros
_ABSENT = "", False

# position -> class, and whether it has parameters
_List = dict[int, tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class Embedded:
    """What an embedding gave in one step."""

    step: int
    module: str
    tokens: int
    """How many different ones."""
    zeros: frozenset[int]
    """Those that got zeros only."""


@law(suspects=True)
def layers_missing(facts: Facts) -> Findings:
    """Stages of a pipeline hold different layers of a list, and no rank holds one of them."""
    lists: dict[str, list[_List]] = defaultdict(list)
    for own in facts.of(recorded).values():
        for one in own.of("layers", _layers):
            for name, rows in one.items():
                lists[name].append(rows)
    for name, ranks in lists.items():
        if len(ranks) < max(facts.evidence.world_size, 2):
            continue
        missing = _missing(ranks)
        if missing:
            names = [f"{name}.{at}".lstrip(".") for at in missing]
            kinds = {kind for rows in ranks for kind, holds in rows.values() if holds}
            yield Suspicious(
                f"No rank holds {listed(names)}: every rank has there the placeholder "
                f"that it has for other ranks' layers ({', '.join(sorted(kinds))}).",
                tuple(names),
            )


def _missing(ranks: list[_List]) -> list[int]:
    """Positions at which all ranks have what some have in place of a layer of another rank."""
    held = [{at for at, (_, holds) in rows.items() if holds} for rows in ranks]
    every = set().union(*held)
    kinds = {kind for rows in ranks for kind, holds in rows.values() if holds}
    instead = {
        rows.get(at, _ABSENT) for rows, own in zip(ranks, held, strict=True) for at in every - own
    }
    if len(kinds) != 1 or not instead or not all(held):
        return []
    return [
        at
        for at in range(max(every))
        if at not in every and all(rows.get(at, _ABSENT) in instead for rows in ranks)
    ]


@law(suspects=True)
def tokens_embedded_as_zeros(facts: Facts) -> Findings:
    """An embedding always gives zeros for some tokens."""
    found: dict[str, list[list[Embedded]]] = defaultdict(list)
    for own in facts.of(recorded).values():
        by_module: dict[str, list[Embedded]] = defaultdict(list)
        for one in own.of("embedding", _embedded):
            by_module[one.module].append(one)
        for module, rows in by_module.items():
            found[module].append(rows)
    for module, ranks in found.items():
        if any(_MOST_ZEROS * len(one.zeros) > one.tokens for rows in ranks for one in rows):
            continue  # it gives a part of the vocabulary, or it begins with zeros
        often = [
            token
            for token in sorted(set().union(*(one.zeros for rows in ranks for one in rows)))
            if len({one.step for rows in ranks for one in rows if token in one.zeros}) >= _ENOUGH
        ]
        # A single one may be the padding.
        if len(often) > 1:
            yield Suspicious(
                f"{module} gave zeros for {plural(len(often), 'token')} "
                f"({', '.join(map(str, often[:8]))}) in all checked steps, and numbers for the "
                "others: if ranks hold parts of the vocabulary, the bounds of the parts may be "
                "wrong."
            )


def _layers(event: Mapping[str, Any]) -> dict[str, _List]:
    return {
        str(name): {int(at): (str(kind), bool(holds)) for at, kind, holds in rows}
        for name, rows in event["lists"].items()
    }


def _embedded(event: Mapping[str, Any]) -> Embedded:
    return Embedded(
        int(event["step"]), str(event["module"]), int(event["tokens"]),
        frozenset(map(int, event["zeros"])),
    )  # fmt: skip
