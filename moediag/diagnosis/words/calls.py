"""Describes calls in words, and which ranks are in which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from moediag.diagnosis.schedules.align import POINT_TO_POINT
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.schedules.matching import wire_numel
from moediag.evidence.model import Collective
from moediag.result.wording import capital, compact, each_does, listed, plural, ranks

T = TypeVar("T")

FEW = 3  # parameter patterns, experts or ranks listed before "and N more"


def describe(call: Collective) -> str:
    """``all_gather of model.layers.0.mlp.experts.3.{gate,up}_proj.weight (1,536 elements)``."""
    of = ""
    if call.parameters and (not call.module or len(compact(call.parameters)) == 1):
        of = f" of {listed(call.parameters)}"
    elif call.module:
        of = f" of {call.module}"
    elif call.site:
        of = f" at {call.site}"
    if not call.op:
        return "a call"
    if call.members is not None:
        return f"{call.op} of {ranks(call.members)}{of}"
    details = [] if call.op == "barrier" else [plural(wire_numel(call), "element")]
    details += [call.dtype] if call.dtype else []
    details += [call.reduce] if call.reduce and call.op in ("all_reduce", "reduce") else []
    return f"{call.op}{of}" + (f" ({', '.join(details)})" if details else "")


def addressed(call: Collective, text: str = "") -> str:
    """``send at ring.py:55 pass (8 elements, float32) to rank 1``; without a peer
    :func:`describe`. ``text`` replaces that."""
    text = text or describe(call)
    if call.peer is None or call.op not in POINT_TO_POINT:
        return text
    tag = f" with tag {call.tag}" if call.tag else ""
    return f"{text} {'to' if call.op == 'send' else 'from'} rank {call.peer}{tag}"


def all_first(divergence: Divergence) -> str | None:
    """``send`` or ``receive``, if all ranks of a circle wait in that, in one line that makes no
    others; else None."""
    lines = {(call.op, call.site) for call in divergence.calls.values() if call is not None}
    if divergence.batched:
        return None
    return {"send": "send", "recv": "receive"}.get(min(lines)[0]) if len(lines) == 1 else None


def sides(calls: Mapping[int, Collective], with_group: Divergence | None = None) -> str:
    """``rank 0 is in all_gather of …, ranks 1, 2 are in reduce_scatter of …``."""
    told = {}
    for rank, call in calls.items():
        text = describe(call) if with_group is None else addressed(call)
        if with_group is not None and call.members is None:
            text += f" on {_label(call.group, with_group)}"
        told[rank] = f"is in {text}"
    pieces = each_does(told)
    more = len(pieces) - FEW
    rest = f"; and {plural(more, 'more side')}" if more > 0 else ""
    return "; ".join(first_few(pieces)) + rest


def _label(name: str, divergence: Divergence) -> str:
    """The label of one of several groups that may have the same ranks and no description."""
    labels = {group.name: group.label for group in divergence.groups}
    label = labels.get(name, name)
    alike = sum(other == label for other in labels.values()) > 1
    return f"{label} (group {name!r})" if alike else label


def first_few(items: Iterable[T]) -> list[T]:
    return list(items)[:FEW]


def sentence(text: str) -> str:
    return f"{capital(text)}."
