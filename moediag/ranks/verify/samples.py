"""The samples that a model is called with, one hash a row of its inputs, and whether two runs saw
the same samples."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, Iterator, List, Mapping, Sequence

import torch

from moediag.protocol import MeasuredStep
from moediag.protocol.measured import split_alike
from moediag.recorder.step import numbers

_MASK = "attention_mask"


def hashes(args: Any, kwargs: Any) -> List[str]:
    """Returns one hash for each row (index of dim 0) of the tensors in a call's arguments. Rows of
    an attention mask's padding are cut, because other batches are padded to other lengths. Tensors
    with a gradient (another stage's activations) are no samples."""
    mask = kwargs.get(_MASK) if isinstance(kwargs, dict) else None
    every = [t for t in tensors([args, kwargs]) if t.dim() > 0 and not t.requires_grad]
    if not every:
        return []
    rows = every[0].shape[0]
    same = [t.detach() for t in every if t.shape[0] == rows]
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
    found = 0
    for own in _counted(args, kwargs):
        whole = own.float().contiguous().view(torch.int32) if own.is_floating_point() else own
        mixed = whole.to(torch.int64) * -7046029254386353131
        mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
        found += int((mixed ^ (mixed >> 29)).sum())
    return found % (1 << 64)


def elements(args: Any, kwargs: Any) -> int:
    """Returns the number of elements that :func:`total` adds up."""
    return sum(own.numel() for own in _counted(args, kwargs))


def first(args: Any, kwargs: Any) -> Any:
    """Returns the tensor whose rows :func:`hashes` counts; None without one."""
    every = (t for t in tensors([args, kwargs]) if t.dim() > 0 and not t.requires_grad)
    return next(every, None)


def _counted(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yields the samples of a call, without what an attention mask leaves out."""
    mask = kwargs.get(_MASK) if isinstance(kwargs, dict) else None
    for tensor in tensors([args, kwargs]):
        if tensor.dim() == 0 or tensor.requires_grad or tensor is mask or tensor.is_complex():
            continue
        own = tensor.detach().cpu()
        if isinstance(mask, torch.Tensor) and own.shape[:2] == mask.shape:
            own = own[mask.detach().cpu() != 0]
        yield own


def _kept(mask: Any, rows: int) -> Any:
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[0] == rows:
        return mask.detach() != 0
    return None


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in lists, tuples and dictionaries, those of dictionaries by key."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors(value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
    elif hasattr(value, "data") and isinstance(getattr(value, "data", None), dict):
        yield from tensors(value.data)  # transformers' BatchEncoding


def steps_alike(ranks: Mapping[int, Sequence[MeasuredStep]], alone: Sequence[MeasuredStep]) -> int:
    """Returns the number of first steps in which the ranks together saw the samples of ``alone``.

    Ranks that share a model (tensor parallelism) see the same rows, so each row may be seen by
    several ranks, but all rows by equally many.
    """
    count = 0
    for step, single in enumerate(alone):
        if any(step >= len(steps) for steps in ranks.values()):
            return count
        of_ranks = [steps[step] for steps in ranks.values()]
        split = split_alike([one.total for one in of_ranks], single.total)
        if not split and not _alike([one.samples for one in of_ranks], single.samples):
            return count
        count += 1
    return count


def _alike(ranks: Sequence[List[str]], single: Sequence[str]) -> bool:
    seen, expected = Counter(row for rows in ranks for row in rows), Counter(single)
    if set(seen) != set(expected) or not expected:
        return False
    return len({seen[row] / expected[row] for row in expected}) == 1


def repeated(ranks: Mapping[int, List[str]], single: Sequence[str], over: Sequence[int]) -> str:
    """Says that the ranks ``over`` which gradients are averaged saw the same part of one process's
    samples; "" if they did not."""
    own = [Counter(ranks.get(rank, [])) for rank in over]
    if len(own) < 2 or any(one != own[0] for one in own) or not own[0]:
        return ""
    alone = set(single)
    if not set(own[0]) < alone:
        return ""
    return (
        f"ranks {', '.join(map(str, over))} average their gradients and saw the same "
        f"{len(own[0])} samples in step 1, while one process saw {len(alone)} different ones: each "
        "rank repeats the work of the others"
    )


def sentence(ranks: Mapping[int, List[str]], single: Sequence[str], step: int) -> str:
    """Says how the samples of one step (from 1) differ."""
    seen = {row for rows in ranks.values() for row in rows}
    common = len(seen & set(single))
    text = f"the two runs saw different samples in step {step}: {common} of the reference's "
    text += f"{len(single)} samples are among the {len(seen)} different ones that the "
    text += "distributed run saw"
    same = _equal_ranks(ranks)
    if len(same) > 1 and common < len(single):
        listed = ", ".join(map(str, same))
        text += f"; ranks {listed} saw the same samples"
    return text


def _equal_ranks(ranks: Mapping[int, List[str]]) -> List[int]:
    """Returns the largest set of ranks that saw the same samples."""
    groups: Dict[str, List[int]] = {}
    for rank, rows in ranks.items():
        groups.setdefault(" ".join(sorted(rows)), []).append(rank)
    return max(groups.values(), key=len, default=[])
