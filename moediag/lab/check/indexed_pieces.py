"""FSDP2 keeps one piece of each parameter; torch makes those of all ranks first."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any, Iterator
from unittest import mock

import torch

from moediag.lab.check import placed


class Pieces(Sequence):  # type: ignore[type-arg] # Python 3.9
    """The pieces of a tensor for ``ranks`` ranks, each made when it is asked for: the same as
    those of ``torch.chunk``, and empty ones for ranks beyond them."""

    def __init__(self, tensor: torch.Tensor, ranks: int, dim: int) -> None:
        self.tensor, self.ranks, self.dim = tensor, ranks, dim

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, at: Any) -> Any:
        if not 0 <= at < self.ranks:
            raise IndexError(at)
        rows = placed.part(self.tensor.size(self.dim), [self.ranks], [(0, self.dim, False)], [at])
        if not rows:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, rows.start, len(rows))


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Makes the time to shard a model independent of the number of ranks, where this torch has the
    function that makes the pieces."""
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    original: Any = getattr(module, "_chunk_with_empty", None)
    if original is None:
        yield
        return

    def pieces(tensor: torch.Tensor, num_chunks: int, dim: int) -> Any:
        if tensor.size(dim) == 0:  # torch keeps the other dims of a tensor without rows
            return original(tensor, num_chunks, dim)
        return Pieces(tensor, num_chunks, dim)

    with mock.patch.object(module, "_chunk_with_empty", pieces):
        yield
