"""Records, at checked steps, which samples data loaders gave since the check before.

drawn       step batches[[line(that asked for the first batch of the pass) pass(counts those of the
            line) batch updates(so far) [fingerprint of each row of the first matrix]]]
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext, several_ranks
from moediag.recorder.step.numbers import row_fingerprints

WATCHER = "laws of drawn samples"
_MOST_ROWS = 64  # of a batch
_MOST_ELEMENTS = 64  # of a row
_MOST_BATCHES = 512
_MOST_DEPTH = 3


class DrawnSamples:
    """Keeps a part of each batch until the next check."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._passes = ByObject()  # iterator -> its line, the number of its pass
        self._lines: Dict[str, int] = {}  # line -> passes so far
        self._new: List[Tuple[str, int, int, int, Any]] = []
        self._seen = 0  # batches
        context.recorder.on_batch.append(self._given)
        context.on_step.append(self._write)

    def _given(self, iterator: Any, frame: Any, batch: Any) -> None:
        if self._seen < _MOST_BATCHES and several_ranks():
            self._context.guarded(WATCHER, self._keep, iterator, frame, batch)

    def _keep(self, iterator: Any, frame: Any, batch: Any) -> None:
        self._seen += 1
        matrix = _matrix(batch, 0)
        known = self._passes.get(iterator)
        if known is None:
            line = self._context.line(frame)
            self._lines[line] = self._lines.get(line, 0) + 1
            known = self._passes.set(iterator, (line, self._lines[line]))
        if matrix is not None:
            rows = matrix.detach()[:_MOST_ROWS].flatten(1)
            part = rows[:, :: max(1, rows.shape[1] // _MOST_ELEMENTS)][:, :_MOST_ELEMENTS].clone()
            self._new.append((*known, iterator._num_yielded, self._context.steps, part))

    def _write(self, step: int) -> None:
        new, self._new = self._new, []
        rows = [[*of, row_fingerprints(part, _MOST_ROWS)] for *of, part in new]
        if rows:
            self._context.log.event("drawn", step=step, batches=rows)


def _matrix(value: Any, depth: int) -> Optional[Any]:
    """The first tensor with several dimensions in a batch, if it is on the host."""
    if isinstance(value, torch.Tensor):
        plain = type(value) is torch.Tensor and value.device.type == "cpu" and value.dim() > 1
        return value if plain and value.layout is torch.strided and value.numel() else None
    inner = value.values() if isinstance(value, Mapping) else value
    if depth >= _MOST_DEPTH or not isinstance(value, (Mapping, list, tuple)):
        return None
    found = (_matrix(one, depth + 1) for one in inner)
    return next((one for one in found if one is not None), None)
