"""Determines which experts a rank holds by matching every local row with the checkpoint's bytes.

Declared sharding is not trusted. For each expert parameter (3-D, experts first, as in transformers
>= 5.0) each local row is compared, bit by bit, with the same elements of every expert of that layer
in the checkpoint. All other parameters, and buffers, are compared at their declared place.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import nn

from moediag.axes import EP
from moediag.lab.step.measure import row_map
from moediag.lab.step.models.tiny import Anatomy
from moediag.lab.step.shard.wrapped import expert_parameters
from moediag.protocol import ExpertRows, Trial
from moediag.protocol.names import clean_fqn
from moediag.recorder.step import pieces

Rows = Tuple[List[ExpertRows], Dict[str, str], int]


def examine(
    model: nn.Module,
    anatomy: Anatomy,
    truth: Mapping[str, torch.Tensor],
    ep_rank: Optional[int],
) -> Rows:
    """Returns rows of every expert parameter; FQN -> what it holds, of other parameters and buffers
    that differ from ``truth`` (the checkpoint's tensors, by FQN), and of experts that have their
    own rows in another order; how many others were compared. ``ep_rank``: this rank's place on the
    ep axis, which declares plain tensors; None without an ep axis. No communication."""
    experts = expert_parameters(model, anatomy)
    unequal: Dict[str, str] = {}
    rows = [_rows(f, p, truth[f], ep_rank, unequal) for f, p in experts.items() if f in truth]
    compared = 0
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        fqn = clean_fqn(name)
        if fqn in experts or fqn not in truth:
            continue
        compared += 1
        different = _different(tensor, truth[fqn], ep_rank)
        if different is not None:
            unequal[fqn] = different
    return rows, unequal, compared


def _different(tensor: Any, whole: torch.Tensor, ep_rank: Optional[int]) -> Optional[str]:
    """Returns what the local part holds if that is not its part of ``whole``, else None."""
    if tensor.is_meta:
        return "is on the meta device"
    own = pieces.local(tensor).cpu()
    where = pieces.index(tensor)
    if where is None:  # some families' plans also divide plain attention weights
        whole = pieces.plain_piece(whole, own.shape, ep_rank)
        expected = whole
    elif tensor.numel() == whole.numel():
        expected = whole.reshape(-1)[where.reshape(-1)]
    else:
        return f"has shape {tuple(tensor.shape)} instead of {tuple(whole.shape)}"
    if torch.equal(own.reshape(-1), expected.reshape(-1).to(own.dtype)):
        return None
    return row_map.describe(own, where, whole)


def _rows(
    fqn: str,
    parameter: Any,
    whole: torch.Tensor,
    ep_rank: Optional[int],
    unequal: Dict[str, str],
) -> ExpertRows:
    """``whole``: shape (experts, ...). Adds an expert whose rows have another order to
    ``unequal``."""
    own = pieces.local(parameter).cpu()
    where = pieces.index(parameter)
    experts, size = whole.shape[0], whole[0].numel()
    flat = whole.reshape(experts, size).to(own.dtype)
    total = int(parameter.shape[0])
    declared = _declared(own.shape[0], where, size, total, experts, ep_rank)
    held = []
    for number in range(len(declared)):
        row = own[number].reshape(-1)
        # The local part of an expert's row, if another dimension is cut too.
        columns = None if where is None else where[number].reshape(-1) % size
        same_size = columns is not None or row.numel() == size
        parts = flat if columns is None else flat[:, columns]
        equal = (parts == row).all(dim=1).nonzero().reshape(-1).tolist() if same_size else []
        expert = declared[number]
        if not equal and expert >= 0:
            places = None if where is None else where[number] % size
            if row_map.permuted(own[number], places, whole[expert]):
                equal = [expert]
                unequal.setdefault(
                    fqn, row_map.describe(own[number], places, whole[expert], f"expert {expert}")
                )
        # Among equal experts (all zeros, say) prefer the declared one.
        held.append(expert if expert in equal else (equal or [-1])[0])
    lies = pieces.placement(parameter) or "plain"
    should = _belongs(declared, total, experts, ep_rank)
    return ExpertRows(
        fqn,
        held,
        declared,
        total,
        lies,
        first=_first(own),
        should=None if should is None else _first(whole[should]),
        experts=experts,
    )


def _belongs(
    declared: List[int], total: int, experts: int, ep_rank: Optional[int]
) -> Optional[int]:
    """Returns the expert of the first row if nothing had been lost; None if unknown."""
    if total == experts:
        return declared[0] if declared and declared[0] >= 0 else None
    first = -1 if ep_rank is None else ep_rank * total
    return first if 0 <= first < experts else None


def _first(tensor: torch.Tensor) -> Optional[float]:
    value = float(tensor.reshape(-1)[0]) if tensor.numel() else None
    return value if value is not None and math.isfinite(value) else None


def _declared(
    count: int,
    where: Optional[torch.Tensor],
    size: int,
    total: int,
    experts: int,
    ep_rank: Optional[int],
) -> List[int]:
    if where is not None:
        # If another dimension is cut into too many pieces, no part of any row is local.
        return [int(row.reshape(-1)[0]) // size for row in where if row.numel()]
    first = 0 if count == experts or ep_rank is None else ep_rank * count
    return [first + i if first + i < experts else -1 for i in range(count)]


def watch_use(anatomy: Anatomy, report: Callable[[Dict[str, int]], None]) -> None:
    """Calls ``report`` once per MoE block, at its first forward, with the number of experts that it
    uses, FQN -> rows: the rows of its expert parameters at that time (gathered, if FSDP does so),
    or its experts that are modules with weights."""
    for block in anatomy.blocks:
        experts: Any = getattr(block.module, "experts", None)
        if isinstance(experts, nn.Module):
            # A ModuleList is not called; its block is called before it.
            called = block.module if block.experts else experts
            _watch(called, experts, f"{block.fqn}.experts", report)


def _watch(
    called: nn.Module, experts: nn.Module, fqn: str, report: Callable[[Dict[str, int]], None]
) -> None:
    def first(module: nn.Module, args: Any) -> None:
        handle.remove()
        rows = {
            f"{fqn}.{name}": int(pieces.local(p).shape[0])
            for name, p in experts.named_parameters(recurse=False)
            if p.ndim == 3
        }
        whole = sum(any(True for _ in one.parameters()) for one in experts.children())
        if rows or whole:
            report(rows or {fqn: whole})

    handle = called.register_forward_pre_hook(first)


def event(when: str, rows: Rows, trial: Trial) -> Dict[str, Any]:
    """Returns the fields of a ``weights`` event, see protocol."""
    experts, unequal, compared = rows
    return {
        "when": when,
        "experts": [dataclasses.asdict(row) for row in experts],
        "unequal": unequal,
        "compared": compared,
        "asked": trial.layout.get(EP, 1),
        "whole": trial.model.experts,
        "left_out": trial.wrapper.ignore_experts,
    }
