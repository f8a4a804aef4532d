"""Answers what a model reads of fake tensors to route its tokens: which experts, and how many.

Values of fake tensors do not exist. Each expert is given the same number of tokens; with expert
parallelism this rank may instead receive the most that its peers can send.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Iterator, Tuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ATEN = torch.ops.aten
_GROUPED = getattr(getattr(_ATEN, "_grouped_mm", None), "default", None)


class UnrealRouting(TorchDispatchMode):
    """``fake``: the mode of the tensors; ``experts``: of a block; ``sent`` and ``received``: rows
    that this rank exchanges with each peer of expert parallelism."""

    def __init__(self, fake: Any, experts: int, sent: int, received: int) -> None:
        super().__init__()
        self._fake, self._experts = fake, max(experts, 1)
        self._sent, self._received = sent, received

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _ATEN.nonzero.default:
            return self._places(args[0])
        if func is _ATEN._local_scalar_dense.default:
            return self._value(args[0])
        if func is _GROUPED and args[0].dtype != torch.bfloat16:
            return _grouped(*args, **(kwargs or {}))
        if func is _ATEN.index.Tensor:
            args = (args[0], [index for given in args[1] for index in self._indices(given)])
        return func(*args, **(kwargs or {}))

    def _places(self, mask: Any) -> Any:
        """Which experts have tokens: all, as numbers. Which tokens an expert has: its share."""
        if mask.numel() == self._experts:
            with _disable_current_modes():
                known = torch.ones(mask.shape).nonzero()
            return self._fake.fake_tensor_converter.from_real_tensor(
                self._fake, known, make_constant=True
            )
        rows = max(mask.numel() // self._experts, 1)
        return mask.new_empty((rows, mask.dim()), dtype=torch.long)

    def _value(self, tensor: Any) -> Any:
        known = getattr(tensor, "constant", None)
        if known is not None:
            with _disable_current_modes():
                return known.item()
        if tensor.dtype == torch.bool:
            return True
        if tensor.is_floating_point():
            return 1.0
        # Counts of sent and of received rows are read together, those received second.
        held = tensor.untyped_storage().nbytes() // tensor.element_size()
        return self._received if 2 * tensor.storage_offset() >= held > 1 else self._sent

    def _indices(self, given: Any) -> Any:
        if given is None or given.dtype != torch.bool:
            return [given]
        return list(self._places(given).unbind(1))


def _grouped(first: Any, second: Any, ends: Any = None, *_: Any, **__: Any) -> Any:
    """Returns the product, which torch's shapes of fake tensors refuse for other dtypes than
    bfloat16 although its kernels have it."""
    size: Tuple[int, ...] = (first.shape[-2], second.shape[-1])
    if second.dim() == first.dim():  # of weights: one product for each expert
        size = (ends.numel() if first.dim() == 2 else first.shape[0], *size)
    return first.new_empty(size)


@contextlib.contextmanager
def not_traced() -> Iterator[None]:
    """Makes transformers treat fake tensors as real ones: for those of a compiler it makes masks
    that an ordinary step leaves out."""
    try:
        module: Any = importlib.import_module("transformers.utils.import_utils")
    except ImportError:
        module = None
    if not hasattr(module, "is_fake_tensor"):
        yield
        return
    with mock.patch.object(module, "is_fake_tensor", lambda _: False):
        yield
