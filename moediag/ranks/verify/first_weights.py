"""Puts the weights of the distributed run into the reference before its first forward."""

from __future__ import annotations

from pathlib import Path
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from moediag.protocol import MeasureRequest
from moediag.protocol.measured import read_measured, start_tensors
from moediag.ranks.verify import slices, tensor_files
from moediag.ranks.verify.model_pieces import Piece
from moediag.ranks.verify.tensor_files import Stored
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step.pieces import WHOLE

SHOWN = 3  # names in a message
_SEED = 20_240_613
_SAME_START = "slices as plain tensors need the same checkpoint or seed in both commands"


class FirstWeights:
    """The whole tensors at the start of another run; nothing for a run that starts by itself."""

    def __init__(self, request: MeasureRequest) -> None:
        self._from = request.start_from
        self._rounding = request.rounding
        self._parts: Optional[Dict[str, Dict[int, Stored]]] = None
        self.absent: List[str] = []  # parameters that no rank of the other run holds
        self.by_bytes: List[str] = []  # parameters whose parts only their bytes locate
        self.renamed: Dict[str, Dict[str, int]] = {}  # by rank, see slices.shifts

    def give(self, found: Sequence[Piece], tied: Iterable[str] = ()) -> None:
        """Overwrites ``found``; ``tied``: its other names. Raises NotApplicable if a name or a
        shape does not fit, and changes nothing then. A model that has all that the ranks hold, and
        more, keeps its own values of what is more: the ranks have lost it."""
        if self._from is None:
            return
        if self._parts is None:
            self._parts = parts_at_start(Path(self._from))
            self._rename(found)
        names = {piece.name for piece in found if piece.owner is not None}
        lost = sorted(names - set(self._parts))
        buffers = {piece.name for piece in found if piece.owner is None}
        if set(self._parts) <= names | buffers | set(tied) and len(lost) < len(names):
            self.absent += lost
        wholes: Dict[str, torch.Tensor] = {}
        unknown: Dict[str, List[str]] = {}  # reason -> names
        for piece in found:
            one, reason = self._whole(piece)
            if one is not None:
                wholes[piece.name] = one
            elif (
                piece.owner is not None and piece.name not in self.absent
            ):  # a buffer that differs is computed by each run itself
                unknown.setdefault(reason, []).append(piece.name)
        if unknown:
            raise NotApplicable("; ".join(_said(names, why) for why, names in unknown.items()))
        generator = torch.Generator().manual_seed(_SEED)
        with torch.no_grad():
            for piece in found:
                if piece.name not in wholes:
                    continue
                local, full = piece.read(), wholes[piece.name]
                if self._rounding is not None and piece.owner is not None:
                    full = rounded(full, getattr(torch, self._rounding), generator)
                for one in (local, *piece.copies()):
                    one.copy_(piece.where.cut(full, tuple(one.shape)))

    def _rename(self, found: Sequence[Piece]) -> None:
        """Gives the ranks' parts the names of the reference, if a rank numbers them by itself: then
        ranks have different values under one name, and the reference has more names."""
        parts, own = self._parts or {}, {p.name: p for p in found if p.owner is not None}
        if not set(own) - set(parts) or any(p.where.kind != WHOLE for p in own.values()):
            return
        wholes = {name: piece.read().detach().cpu() for name, piece in own.items()}
        renamed: Dict[str, Dict[int, Stored]] = {}
        for rank in sorted({rank for of_ranks in parts.values() for rank in of_ranks}):
            of_rank = {name: by[rank] for name, by in parts.items() if rank in by}
            shifts = slices.shifts({n: p for n, p in of_rank.items() if not p.buffer}, wholes)
            self.renamed.update({str(rank): shifts} if shifts else {})
            for name, part in of_rank.items():
                renamed.setdefault(slices.shifted(name, shifts), {})[rank] = part
        self._parts = renamed

    def _whole(self, piece: Piece) -> Tuple[Optional[torch.Tensor], str]:
        """Returns the whole tensor, or None and why there is none that fits."""
        parts = (self._parts or {}).get(piece.name)
        if parts is None:
            return None, "the distributed run has no such tensor"
        one, reason = tensor_files.whole(parts.values())
        if one is not None and tuple(one.shape) != piece.where.shape:
            here = list(piece.where.shape)
            reason = f"it has shape {list(one.shape)} there and {here} in one process"
            one = None
        if one is None and piece.owner is not None and piece.where.kind == WHOLE:
            own = piece.read().detach().cpu().clone()
            found, why = slices.located(parts, own)
            if found is not None or not why:
                self.by_bytes.append(piece.name)
                return own, ""
            reason = f"{reason}, and {why}: {_SAME_START}"
        return one, reason


def parts_at_start(folder: Path) -> Dict[str, Dict[int, Stored]]:
    """Returns by name and rank the parts of all ranks of a run."""
    found: Dict[str, Dict[int, Stored]] = {}
    for rank in sorted(read_measured(folder)):
        for name, stored in tensor_files.load(folder / start_tensors(rank))["start"].items():
            found.setdefault(name, {})[rank] = stored
    return found


def rounded(
    tensor: torch.Tensor, computes_in: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Returns ``tensor`` with each element changed by about one rounding error, up or down at
    random, of the coarser of its own dtype and the one that the model computes in."""
    if not tensor.is_floating_point():
        return tensor
    own = torch.finfo(tensor.dtype).eps
    step = max(own, torch.finfo(computes_in).eps / 2)
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return (tensor.double() * (1 + step * signs)).to(tensor.dtype)


def _said(names: Sequence[str], why: str) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}: {why}"
