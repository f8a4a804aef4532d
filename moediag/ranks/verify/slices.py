"""Where parts lie of which nothing but their bytes says it: each rank's experts as plain tensors,
perhaps sharded further by a wrapper that knows only these.

The reference's own tensor, before it gets other weights, is the whole that they are a part of, if
both programs begin with the same checkpoint or seed. A part must lie at one place only.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Dict, List, Mapping, Optional, Tuple

import torch

from moediag.ranks.verify.tensor_files import Stored
from moediag.recorder.step.pieces import BOX, ELEMENTS, FLAT, Where

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NUMBERS = 2  # of a name that are tried: its layer and its expert
_ANY = 2  # more places than these are not looked for: the part is constant


def places(part: Stored, whole: torch.Tensor) -> List[Where]:
    """Returns where the bytes of ``part`` occur in ``whole``, at most ``_ANY`` places."""
    where, tensor = part.where, part.tensor
    shape = tuple(whole.shape)
    if tensor is not None and not tensor.numel():
        return [Where(FLAT, shape, 0)]
    other = [d for d, size in enumerate(where.shape) if shape[d : d + 1] != (size,)]
    if tensor is None or where.kind == ELEMENTS or len(where.shape) != len(shape):
        return []
    if where.kind == FLAT:
        row = whole[0].numel() if other == [0] else 0
        found = _runs(tensor, whole.reshape(-1)) if row else []
        return [Where(FLAT, shape, at) for at in found if (at - where.at) % row == 0][:_ANY]
    if len(other) != 1:
        return []
    dim = other[0]
    first = list(where.at) if where.kind == BOX else [0] * len(shape)
    near = whole
    for d in range(len(shape)):
        if d != dim:
            near = near.narrow(d, first[d], tensor.shape[d])
    rows = near.movedim(dim, 0).reshape(shape[dim], -1)
    own = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
    return [
        Where(BOX, shape, tuple(at if d == dim else first[d] for d in range(len(shape))))
        for at in _rows(own, rows)
    ]


def rows_of_part(part: torch.Tensor, whole: torch.Tensor) -> Optional[torch.Tensor]:
    """Returns which rows of ``whole`` those of ``part`` are: one run of them, two of equal length
    or every k-th one; None if they are none, or may be several."""
    if not 0 < len(part) <= len(whole) or part.shape[1:] != whole.shape[1:]:
        return None
    own, rows = part.reshape(len(part), -1), whole.reshape(len(whole), -1)
    for runs in (own.chunk(1), own.chunk(2)):
        begins = [_rows(run, rows) for run in runs]
        if len({len(run) for run in runs}) == 1 and all(begins):
            several = any(len(begin) > 1 for begin in begins)
            found = [torch.arange(len(run)) + at[0] for run, at in zip(runs, begins)]  # noqa: B905
            return None if several else torch.cat(found)
    every, rest = divmod(len(rows), len(own))
    numbers = torch.arange(len(rows))
    fits = [at for at in range(every) if not rest and torch.equal(rows[at::every], own)]
    return numbers[fits[0] :: every] if len(fits) == 1 else None


def _rows(own: torch.Tensor, rows: torch.Tensor) -> List[int]:
    """Returns the rows at which the rows of ``own`` begin."""
    last = len(rows) - len(own) + 1
    if last < 1 or not own.numel():
        return [0]
    fits = (rows[:last] == own[0]).all(1).nonzero().reshape(-1).tolist()
    found = (at for at in fits if torch.equal(rows[at : at + len(own)].to(own.dtype), own))
    return [at for at, _ in zip(found, range(_ANY))]  # noqa: B905 - Python 3.9


def _runs(own: torch.Tensor, flat: torch.Tensor) -> List[int]:
    """Returns the elements at which a run equal to ``own`` begins; several if there are many."""
    last = len(flat) - len(own) + 1
    if last < 1 or not len(own):
        return [0]
    fits = torch.arange(last)
    for at in range(min(len(own), 16)):
        fits = fits[flat[fits + at] == own[at]]
    found = (at for at in fits.tolist() if torch.equal(flat[at : at + len(own)].to(own.dtype), own))
    return [at for at, _ in zip(found, range(_ANY))]  # noqa: B905 - Python 3.9


def shifts(parts: Mapping[str, Stored], wholes: Mapping[str, torch.Tensor]) -> Dict[str, int]:
    """Returns what to add to numbers in the names of a rank's parts so that they are parts of
    ``wholes``, by the text before the number: a stage of a pipeline may count its layers from 0, a
    rank its experts. {} if nothing fits, several numbers do, or none is to be changed."""
    for place in range(_NUMBERS):
        lists: Dict[str, List[Tuple[int, str, Stored]]] = {}
        for name, part in parts.items():
            for at in list(_NUMBER.finditer(name))[place : place + 1]:
                own = int(at.group()), name[at.end() :], part
                lists.setdefault(name[: at.start()], []).append(own)
        found = {}
        for before, named in lists.items():
            fits, add = [], 0
            while f"{before}{named[0][0] + add}{named[0][1]}" in wholes:
                tensors = [wholes.get(f"{before}{number + add}{rest}") for number, rest, _ in named]
                both = zip(named, tensors)  # noqa: B905 - Python 3.9
                fits += [add] if all(t is not None and _part(one[2], t) for one, t in both) else []
                add += 1
            found[before] = fits[0] if len(fits) == 1 else -1
        if any(found.values()) and min(found.values()) >= 0:
            return found
    return {}


def shifted(name: str, by: Mapping[str, int]) -> str:
    """Returns the name of the reference; ``by``: see :func:`shifts`."""
    for at in _NUMBER.finditer(name):
        before = name[: at.start()]
        if before in by:
            return f"{before}{int(at.group()) + by[before]}{name[at.end() :]}"
    return name


def _part(part: Stored, whole: torch.Tensor) -> bool:
    if part.tensor is None or part.where.shape != tuple(whole.shape):
        return bool(places(part, whole))
    return torch.equal(part.where.cut(whole, tuple(part.tensor.shape)), part.tensor)


def located(
    parts: Mapping[int, Stored], whole: torch.Tensor
) -> Tuple[Optional[Dict[int, Stored]], str]:
    """Returns the parts of all ranks with their places in ``whole``, or None and why they have
    none. The reason "" says that they lie in it, at more than one place."""
    found: Dict[int, Stored] = {}
    covered = torch.zeros(whole.shape, dtype=torch.bool)
    several = False
    for rank, part in parts.items():
        own = places(part, whole)
        if not own:
            return None, "no part of the reference's own tensor is what the ranks hold of it"
        several |= len(own) > 1
        found[rank] = dataclasses.replace(part, where=own[0])
        if part.tensor is not None:
            own[0].put(covered, torch.ones(part.tensor.shape, dtype=torch.bool))
    if several:
        return None, ""
    if not bool(covered.all()):
        return None, "a part of the reference's tensor is on no rank"
    return found, ""
