"""What loading did not restore, and for experts: which ones it restored instead.

Loaded tensors are compared bit by bit with those that were saved, so this needs no tolerance and
no control.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from moediag.diagnosis.numbers.expert_holders import numbers
from moediag.protocol import natural
from moediag.result.wording import error_size, listed, plural, ranks

if TYPE_CHECKING:
    from moediag.protocol import ExpertRows, ResumeOutcome

ONE_RANK = "one-rank-everywhere"
GLUED = "ranks-glued-together"
MOVED = "experts-moved"
APART = "copies-were-apart"
WEIGHTS = "weights"
OPTIMIZER = "optimizer"

_FEW = 3
_BY = {
    "dcp": "torch.distributed.checkpoint",
    "dcp-model": "torch.distributed.checkpoint",
    "accelerate": "accelerate's save_state",
    "save-pretrained": "save_pretrained",
}
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def what_is_lost(found: Mapping[int, ResumeOutcome]) -> tuple[str, str]:
    """(pattern, sentence) of what loading did not restore; ("", "") when it restored everything."""
    outcomes = found.values()
    moved = {
        fqn: rows
        for fqn, rows in by_parameter(found).items()
        if any(row.held != row.declared for row in rows.values())
    }
    if moved:
        pattern, text = _moved(moved, next(iter(outcomes)))
        return pattern, f"{text}{_optimizer_too(found)}"
    weights = dict.fromkeys(fqn for one in outcomes for fqn in one.at_load.weights)
    where = ranks(r for r, one in found.items() if one.at_load.weights)
    far = by(max(most(one.at_load.weights.values()) for one in outcomes))
    apart = dict.fromkeys(fqn for one in outcomes for fqn in one.apart)
    if weights and weights.keys() <= apart.keys():
        text = (
            f"Before anything was saved, {plural(len(apart), 'parameter')} of which every rank has "
            f"a copy had drifted apart between the ranks ({listed(apart)}). A checkpoint keeps one "
            f"copy, so after loading {where} "
            f"{'continues' if where.startswith('rank ') else 'continue'} with another's, which "
            f"differs {far}."
        )
        return APART, text
    if weights:
        text = f"After loading, {plural(len(weights), 'parameter')} on {where} "
        text += f"{'differs' if len(weights) == 1 else 'differ'} from those at the save {far}: "
        return WEIGHTS, f"{text}{listed(weights)}.{_optimizer_too(found)}"
    optimizer = dict.fromkeys(name for one in outcomes for name in one.at_load.optimizer)
    settings = dict.fromkeys(text for one in outcomes for text in one.at_load.settings)
    if optimizer:
        far = by(max(most(one.at_load.optimizer.values()) for one in outcomes))
        text = "After loading every weight equals that at the save; the optimizer does not: "
        verb = "differs" if len(optimizer) == 1 else "differ"
        text += f"{plural(len(optimizer), 'tensor')} of it {verb} {far}: {listed(optimizer)}."
        return OPTIMIZER, text
    if settings:
        text = "After loading every tensor equals that at the save; the optimizer's settings do not"
        return OPTIMIZER, f"{text}: {'; '.join(list(settings)[:_FEW])}."
    return "", ""


def by_parameter(found: Mapping[int, ResumeOutcome]) -> dict[str, dict[int, ExpertRows]]:
    rows: dict[str, dict[int, ExpertRows]] = {}
    for rank, outcome in found.items():
        for row in outcome.loaded:
            rows.setdefault(row.fqn, {})[rank] = row
    return rows


def _moved(
    moved: Mapping[str, Mapping[int, ExpertRows]], outcome: ResumeOutcome
) -> tuple[str, str]:
    sources = {fqn: _source(rows) for fqn, rows in moved.items()}
    known = [source for source in sources.values() if source is not None]
    if len(known) < len(sources):
        fqn, rows = next((f, r) for f, r in moved.items() if sources[f] is None)
        pieces = [
            f"rank {rank} holds {numbers(row.held)} where it had {numbers(row.declared)}"
            for rank, row in rows.items()
            if row.held != row.declared
        ]
        more = f"; and {len(pieces) - _FEW} more ranks" if len(pieces) > _FEW else ""
        text = f"After loading, experts of {plural(len(moved), 'parameter')} are not those of the "
        return MOVED, f"{text}save. In {fqn} {'; '.join(pieces[:_FEW])}{more}."
    plain = all(row.placement == "plain" for rows in moved.values() for row in rows.values())
    why = ""
    if plain:
        why = (
            " They are plain tensors of one name on every rank, so "
            f"{_BY.get(outcome.through, outcome.through)} took them for copies of one another and "
            "kept one rank's."
        )
    if len(set(known)) == 1:
        rows = next(iter(moved.values()))
        held = numbers(rows[known[0]].declared)
        absent = sorted(
            {e for row in rows.values() for e in row.declared} - set(rows[known[0]].held)
        )
        text = f"After loading, every rank holds rank {known[0]}'s experts {held} of "
        text += f"{_layers(moved)}, and {'expert' if len(absent) == 1 else 'experts'} "
        text += f"{numbers(absent)} {'is' if len(absent) == 1 else 'are'} on no rank.{why}"
        return ONE_RANK, text
    pieces = []
    for rank in sorted(set(known)):
        own = [fqn for fqn, source in sources.items() if source == rank]
        held = numbers(moved[own[0]][rank].declared)
        pieces.append(f"rank {rank}'s ({held}) in {listed(own)}")
    text = "After loading, every rank holds the same experts, glued together from several ranks': "
    return GLUED, f"{text}{'; '.join(pieces)}.{why}"


def _source(rows: Mapping[int, ExpertRows]) -> int | None:
    """The rank whose experts all ranks hold now, if there is one."""
    held = {tuple(row.held) for row in rows.values()}
    if len(held) != 1 or len(rows) < 2:
        return None
    (same,) = held
    return next((rank for rank, row in rows.items() if tuple(row.declared) == same), None)


def _layers(fqns: Iterable[str]) -> str:
    """``layers 0 and 1``; the parameters' names where they contain no layer."""
    names = list(fqns)
    found = [match[1] for name in names if (match := _LAYER.search(name))]
    if len(found) < len(names):
        return listed(names)
    layers = sorted(set(found), key=lambda layer: (natural(layer) or 0, layer))
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > _FEW:
        return f"{len(layers)} layers"
    return f"layers {', '.join(layers[:-1])} and {layers[-1]}"


def _optimizer_too(found: Mapping[int, ResumeOutcome]) -> str:
    lost = {name for one in found.values() for name in one.at_load.optimizer}
    return f" {plural(len(lost), 'tensor')} of the optimizer went with them." if lost else ""


def most(differences: Iterable[float | None]) -> float:
    """The largest difference. None (nothing to compare with) and nan count as infinite."""
    sizes = (math.inf if d is None or math.isnan(float(d)) else float(d) for d in differences)
    return max(sizes, default=0.0)


def by(difference: float) -> str:
    """``by up to 1.2e-03``; words where a nan or a missing tensor has no size."""
    if math.isinf(difference):
        return "beyond measure (nan, or a tensor that one of them lacks)"
    return f"by up to {error_size(difference)}"
