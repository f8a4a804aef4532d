"""What roots broadcast: a rank that is simulated after its root receives the real data.

Each root writes what it sends beside its log, as long as it is real itself and small.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Callable, List

import torch

from moediag.lab.simulation.answers import group_of
from moediag.protocol import ROOT_FILES
from moediag.recorder.core import Recorder

_LARGEST = 64 << 20  # bytes of one broadcast
_MOST = 512 << 20  # bytes of all


class RootPayloads:
    """The broadcasts of one rank. ``real``: whether tensors and this rank's branches are real."""

    def __init__(
        self, folder: Path, recorder: Recorder, real: Callable[[List[torch.Tensor]], bool]
    ) -> None:
        self._folder = folder
        self._recorder = recorder
        self._real = real
        self._room = _MOST

    def known(self, func: Any, args: Any, tensors: List[torch.Tensor]) -> bool:
        """Whether ``tensors`` hold what the root of this call sends. Call it after the call."""
        name = func._schema.name.rpartition("::")[2]
        if name not in ("broadcast", "broadcast_"):
            return False
        group = group_of(func, args)
        root = args[2] if func.namespace == "c10d" else args[1]
        path = self._path(group)
        if group.rank() == root:
            size = sum(t.numel() * t.element_size() for t in tensors)
            if self._real(tensors) and size <= min(_LARGEST, self._room):
                self._room -= size
                torch.save([t.detach().cpu().clone() for t in tensors], path)
            # The own data of a root are as real as they were.
            return True
        return path.exists() and _filled(tensors, torch.load(path, weights_only=True))

    def _path(self, group: Any) -> Path:
        """The recorder has counted this call already, so all ranks of the group agree on it."""
        info = self._recorder.groups.info(group)
        call = f"{info.name} {info.ranks} {info.issued}"
        return self._folder / ROOT_FILES.replace(
            "*", hashlib.sha256(call.encode()).hexdigest()[:24]
        )


def _filled(tensors: List[torch.Tensor], sent: List[torch.Tensor]) -> bool:
    def kinds(those: List[torch.Tensor]) -> List[Any]:
        return [(t.numel(), t.dtype) for t in those]

    if kinds(tensors) != kinds(sent):
        return False  # the calls do not match
    for tensor, value in zip(tensors, sent):  # noqa: B905 - Python 3.9
        tensor.copy_(value.reshape(tensor.shape))
    return True
