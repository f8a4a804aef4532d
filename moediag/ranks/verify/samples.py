"""The samples that a model is called with: one hash a row of its inputs."""

from __future__ import annotations

from typing import Any, Iterator, List

import torch

from moediag.recorder.step import numbers

_MASK = "attention_mask"


def hashes(args: Any, kwargs: Any) -> List[str]:
    """Returns one hash for each row (index of dim 0) of the tensors in a call's arguments. Rows of
    an attention mask's padding are cut, because other batches are padded to other lengths. Tensors
    with a gradient (another stage's activations) are no samples."""
    mask = kwargs.get(_MASK) if isinstance(kwargs, dict) else None
    tensors = [t for t in _tensors([args, kwargs]) if t.dim() > 0 and not t.requires_grad]
    if not tensors:
        return []
    rows = tensors[0].shape[0]
    same = [t.detach() for t in tensors if t.shape[0] == rows]
    kept = _kept(mask, rows)
    found = []
    for row in range(rows):
        cut = []
        for tensor in same:
            one = tensor[row]
            if kept is not None and one.dim() and tensor.shape[:2] == kept.shape:
                one = one[kept[row]]
            cut.append(one)
        found.append(numbers.digest(*cut, size=8))
    return found


def total(args: Any, kwargs: Any) -> int:
    """Returns a sum over all elements of a call's samples, modulo 2**64: it does not depend on how
    they are split or arranged."""
    mask = kwargs.get(_MASK) if isinstance(kwargs, dict) else None
    found = 0
    for tensor in _tensors([args, kwargs]):
        if tensor.dim() == 0 or tensor.requires_grad or tensor is mask or tensor.is_complex():
            continue
        own = tensor.detach().cpu()
        if isinstance(mask, torch.Tensor) and own.shape[:2] == mask.shape:
            own = own[mask.detach().cpu() != 0]
        whole = own.float().contiguous().view(torch.int32) if own.is_floating_point() else own
        mixed = whole.to(torch.int64) * -7046029254386353131
        mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
        found += int((mixed ^ (mixed >> 29)).sum())
    return found % (1 << 64)


def _kept(mask: Any, rows: int) -> Any:
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[0] == rows:
        return mask.detach() != 0
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "data") and isinstance(getattr(value, "data", None), dict):
        yield from _tensors(value.data)  # transformers' BatchEncoding
