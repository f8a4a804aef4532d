"""The batches of all ranks as one batch."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import torch

from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import numbers

Collate = Callable[[List[Any]], Any]
_PLAIN = (bool, int, float, str, bytes, type(None))


def batch_file(rank: int) -> str:
    """torch.save: the batch of one rank."""
    return f"rank-{rank}.batch.pt"


def write(folder: Path, rank: int, batch: Any) -> str:
    """Writes the batch of one rank; returns its hash. Raises NotApplicable for a batch that is not
    made of tensors and plain values."""
    content = io.BytesIO()
    torch.save(plain(batch), content)
    (folder / batch_file(rank)).write_bytes(content.getvalue())
    return numbers.digest(plain(batch))


def read(folder: Path, hashes: Mapping[int, str], collate: Optional[Collate]) -> Any:
    """Returns one batch of all ranks' samples. Ranks that share a model have the same batch, which
    counts once. Raises NotApplicable."""
    counts = Counter(hashes.values())
    if len(set(counts.values())) > 1:
        groups = sorted([r for r in hashes if hashes[r] == one] for one in counts)
        raise NotApplicable(
            f"some ranks have the same batch and others do not ({'; '.join(map(str, groups))})"
        )
    first: Dict[str, int] = {}
    for rank in sorted(hashes):
        first.setdefault(hashes[rank], rank)
    found = [
        torch.load(folder / batch_file(rank), map_location="cpu", weights_only=True)
        for rank in first.values()
    ]
    if len(found) == 1:
        return found[0]
    return collate(found) if collate is not None else together(found)


def moved(value: Any, device: torch.device) -> Any:
    """Returns ``value`` with its tensors on ``device``."""
    return _mapped(value, lambda tensor: tensor.to(device))


def plain(value: Any) -> Any:
    """Returns ``value`` made of copies of its tensors on the CPU, and of plain values. Raises
    NotApplicable if it has others."""
    return _mapped(value, lambda tensor: tensor.detach().cpu().clone())


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    inside = getattr(value, "data", None)  # transformers' BatchEncoding
    named = inside if isinstance(inside, dict) else value
    if isinstance(named, Mapping):
        return {key: _mapped(one, change) for key, one in named.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, change) for one in value)
    if isinstance(value, _PLAIN):
        return value
    raise NotApplicable(
        f"the batch has a {type(value).__name__}; give tensors and plain values in lists, tuples "
        "and dictionaries"
    )


def together(values: Sequence[Any]) -> Any:
    """Returns one batch of the rows of several. Raises NotApplicable if they have other forms."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        return _rows(values)
    if isinstance(first, dict):
        if any(set(one) != set(first) for one in values):
            raise NotApplicable("the batches of ranks have different keys; give collate=")
        return {key: together([one[key] for one in values]) for key in first}
    if isinstance(first, (list, tuple)):
        if any(len(one) != len(first) for one in values):
            raise NotApplicable("the batches of ranks have different lengths; give collate=")
        return type(first)(
            together(list(each))
            for each in zip(*values)  # noqa: B905 - Python 3.9
        )
    if any(one != first for one in values):
        raise NotApplicable(
            f"the batches of ranks have different values ({first!r} and others) that are no "
            "tensors; give collate="
        )
    return first


def _rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    if first.dim() == 0:
        if any(not torch.equal(one, first) for one in tensors):
            raise NotApplicable(
                "the batches of ranks have different numbers (tensors without a dimension); give "
                "collate="
            )
        return first
    if any(one.shape[1:] != first.shape[1:] for one in tensors):
        shapes = ", ".join(sorted({str(list(one.shape)) for one in tensors}))
        raise NotApplicable(
            f"the batches of ranks cannot be put together, their shapes are {shapes}; give collate="
        )
    return torch.cat(list(tensors))
