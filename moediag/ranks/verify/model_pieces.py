"""Which part of which parameter or buffer this process holds, and how to read it.

A plain tensor is taken as the whole parameter; the comparison checks that. A DTensor's placements
and an FSDP1 handle say which part they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional

import torch

from moediag.protocol.names import plain_name
from moediag.ranks.verify import zero_pieces
from moediag.recorder.step.pieces import (
    FLAT,
    Where,
    axes_of,
    distributed,
    flat_parameters,
    local,
    placement,
    where,
)

# Wrappers that only forward to their module.
OUTER = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")
_FSDP1 = "FullyShardedDataParallel"


@dataclass(frozen=True)
class Piece:
    """One parameter or buffer, as far as this process holds it."""

    name: str
    where: Where
    read: Callable[[], torch.Tensor]  # the local tensor itself, not a copy
    gradient: Callable[[], Optional[torch.Tensor]]  # local; None: there is none
    owner: Any = None  # the tensor that an optimizer has; None: a buffer
    placement: str = ""  # on the mesh, in words; "": a plain tensor
    trainable: bool = False
    mesh: Dict[str, int] = field(default_factory=dict)
    # Other tensors with the same elements, which are written with it.
    copies: Callable[[], Iterable[torch.Tensor]] = tuple


class NotReduced(Exception):
    """A gradient is still a sum that was not reduced over ranks."""


def pieces(root: Any, prefix: str = "") -> List[Piece]:
    """Returns the pieces of all parameters and buffers of ``root``, by name in its own model, each
    with ``prefix``. No communication. Raises NotApplicable if torch does not tell where one is."""
    found: Dict[str, Piece] = {}
    wrappers = [name for name, module in root.named_modules() if type(module).__name__ in OUTER]

    def named(name: str) -> str:
        return prefix + plain_name(name, wrappers)

    flat: List[int] = []  # ids of parameters of which this rank holds a run of elements
    for name, parameter in root.named_parameters() if zero_pieces.holds(root) else ():
        run = zero_pieces.run_of(root.optimizer, parameter)
        if run is not None:
            flat.append(id(parameter))
            if run.size:
                found.setdefault(named(name), _of_zero(named(name), parameter, run))
    for name, module in root.named_modules():
        handle = getattr(module, "_handle", None)
        if type(module).__name__ == _FSDP1 and handle is not None:
            for piece in _of_handle(handle, named(name + "." if name else "")):
                found.setdefault(piece.name, piece)
            flat += map(id, flat_parameters(handle))
    for name, parameter in root.named_parameters():
        if id(parameter) not in flat:
            full = named(name)
            found.setdefault(full, _of_tensor(full, parameter, parameter.requires_grad))
    for name, buffer in root.named_buffers():
        full = named(name)
        found.setdefault(full, _of_tensor(full, buffer, None))
    return list(found.values())


def part_of(module: Any, models: Iterable[Any]) -> bool:
    """Whether the module is one of these models or a part of one, as an output layer that a chunked
    loss calls by itself."""
    return any(module is one for model in models for one in model.modules())


def shells(model: Any) -> List[Any]:
    """Returns a model and, if it is a wrapper that only forwards, what is in it."""
    found = [model]
    while type(found[-1]).__name__ in OUTER:
        found.append(found[-1].module)
    return found


def owners(root: Any, prefix: str = "") -> Dict[str, Any]:
    """Returns the parameters of ``root`` under all their names."""
    outer = [name for name, module in root.named_modules() if type(module).__name__ in OUTER]
    return {
        prefix + plain_name(name, outer): parameter
        for name, parameter in root.named_parameters(remove_duplicate=False)
    }


def shard_again(root: Any) -> None:
    """FSDP2 keeps parameters of the outermost unit whole after a validation. The next forward makes
    them again, of the shards, which the optimizer has and which are read and written here."""
    for module in root.modules():
        if hasattr(module, "_get_fsdp_state"):
            module.reshard()


def tied(root: Any, prefix: str = "") -> Dict[str, str]:
    """Returns the other names of parameters that have several, with the name in :func:`pieces`."""
    first: Dict[int, str] = {}
    found: Dict[str, str] = {}
    for name, parameter in owners(root, prefix).items():
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found


def _of_tensor(name: str, tensor: Any, trainable: Optional[bool]) -> Piece:
    return Piece(
        name,
        where(tensor),
        lambda: local(tensor),
        lambda: _gradient(tensor),
        tensor if trainable is not None else None,
        placement(tensor),
        bool(trainable),
        {axis.name: axis.size for axis in axes_of(tensor) if axis.name},
    )


def _gradient(tensor: Any) -> Optional[torch.Tensor]:
    gradient = tensor.grad
    if gradient is None:
        return None
    if any(axis.placed.is_partial() for axis in axes_of(gradient)):
        raise NotReduced
    if distributed(gradient) and distributed(tensor) and gradient.placements != tensor.placements:
        raise NotReduced
    return local(gradient)


def _of_zero(name: str, parameter: Any, run: zero_pieces.Run) -> Piece:
    def read() -> torch.Tensor:
        return run.of(run.flat) if run.flat is not None else next(copies())

    def gradient() -> Optional[torch.Tensor]:
        return None if run.flat is None or run.flat.grad is None else run.of(run.flat.grad)

    def copies() -> Iterator[torch.Tensor]:
        return zero_pieces.copies(parameter, run)

    trains, where = run.flat is not None, Where(FLAT, run.shape, run.at)
    owner = run.flat if trains else parameter
    return Piece(name, where, read, gradient, owner, run.words, trains, copies=copies)


# ------------------------------------------------------------------------ FSDP1


def _of_handle(handle: Any, prefix: str) -> Iterator[Piece]:
    """Yields what this rank's shard of a flat parameter holds. FSDP1 cuts the flat parameter, with
    its padding, into equal parts by rank."""
    flat = handle.flat_param
    sharded = handle.uses_sharded_strategy
    size = flat._sharded_size.numel() if sharded else flat.numel()
    begin = handle.rank * size if sharded else 0
    starts = _starts(flat)
    originals = flat._params if handle._use_orig_params else None
    numbered = enumerate(zip(flat._fqns, flat._shapes))  # noqa: B905 - Python 3.9
    for number, (fqn, shape) in numbered:
        first = starts[number]
        last = first + torch.Size(shape).numel()
        low, high = max(first, begin), min(last, begin + size)
        if low >= high and last > first:
            continue  # it lies on other ranks
        own = originals[number] if originals is not None else flat
        yield Piece(
            prefix + plain_name(fqn),
            Where(FLAT, tuple(shape), low - first),
            _reader(flat, low - begin, high - begin),
            _flat_gradient(own, originals is not None, low - begin, high - begin),
            own,
            f"FSDP1 shard {handle.rank} of {handle.world_size}" if sharded else "",
            bool(own.requires_grad),
        )


def _starts(flat: Any) -> List[int]:
    """Returns where each parameter begins in the flat one; padding lies between parameters."""
    starts, at, number = [], 0, 0
    mask = getattr(flat, "_is_padding_mask", None) or [False] * len(flat._numels_with_padding)
    for size, padding in zip(flat._numels_with_padding, mask):  # noqa: B905 - Python 3.9
        if not padding:
            starts.append(at)
            number += 1
        at += size
    return starts


def _reader(flat: Any, low: int, high: int) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        return local(flat).reshape(-1)[low:high]

    return read


def _flat_gradient(
    own: Any, original: bool, low: int, high: int
) -> Callable[[], Optional[torch.Tensor]]:
    def read() -> Optional[torch.Tensor]:
        if own.grad is None:
            return None
        gradient = local(own.grad).reshape(-1)
        return gradient if original else gradient[low:high]

    return read
