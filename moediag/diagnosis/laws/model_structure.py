"""Together the ranks hold every layer of a model, and its embedding knows every token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.result.wording import listed, plural

_ENOUGH = 3  # steps
_MOST_ZEROS = 4  # of which one of so many tokens may get zeros
_ABSENT = "", False

# position -> class, and whether it has parameters
_List = dict[int, tuple[str, bool]]


@law(suspects=True)
def layers_missing(facts: Facts) -> Findings:
    """Stages of a pipeline hold different layers of a list, and no rank holds one of them."""
    lists: dict[str, list[_List]] = defaultdict(list)
    for own in facts.of(recorded).values():
        for (one,) in own.rows("layers", lists=_layers):
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
    steps: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    parts = set()  # of the vocabulary, or they begin with zeros
    for own in facts.of(recorded).values():
        for module, step, tokens, zeros in own.rows(
            "embedding", module=str, step=int, tokens=int, zeros=lambda of: set(map(int, of))
        ):
            parts |= {module} if _MOST_ZEROS * len(zeros) > tokens else set()
            for token in zeros:
                steps[module][token].add(step)
    for module, of in steps.items():
        often = [token for token in sorted(of) if len(of[token]) >= _ENOUGH]
        # A single one may be the padding.
        if len(often) > 1 and module not in parts:
            yield Suspicious(
                f"{module} gave zeros for {plural(len(often), 'token')} "
                f"({', '.join(map(str, often[:8]))}) in all checked steps, and numbers for the "
                "others: if ranks hold parts of the vocabulary, the bounds of the parts may be "
                "wrong."
            )


def _layers(lists: Mapping[str, Iterable[Any]]) -> dict[str, _List]:
    return {
        str(name): {int(at): (str(kind), bool(holds)) for at, kind, holds in rows}
        for name, rows in lists.items()
    }
