"""Turns a tensor into a few numbers that show whether, or how much, tensors differ.

- :class:`Fingerprints`: exact, and computed where the tensor is. A fingerprint is a sum of the
  tensor's bytes, read as integers of 64 bits, times a weight for each position, modulo 2**64.
  Integer sums have no rounding and no order, so it is the same on every rank and device. The
  fingerprints of many tensors are copied to the host together. Its sketches are two numbers.
- :func:`digest`: exact, computed on the host, of nested values too.
- :func:`projected`: a sketch that estimates the distance of two tensors.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch

from moediag.recorder.step.pieces import held

_CHUNK = 1 << 16  # positions with a weight of their own; rows of a chunk are weighted again
_ROWS = 32  # chunks that are multiplied at once: 16 MiB of temporary memory
_WORD = 8  # bytes of an integer
_LAST = -4417276706812531889  # weight of the bytes after the last whole word; odd, as all weights
_MOST_SKETCHED = 1 << 24  # elements
_MASK = (1 << 64) - 1
PROJECTIONS = 16
_SEED = 20_240_613  # any number, but the same on all ranks
_BLOCK = 65_536  # elements per projection step

_KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes

_weights: Dict[Any, Any] = {}  # device -> weights of the positions in a chunk
_signs_by_device: Dict[Any, Any] = {}  # device -> +1 and -1 for the positions in a chunk


class Fingerprints:
    """Collects tensors with :meth:`add`; :meth:`read` copies all results to the host."""

    def __init__(self) -> None:
        self._sketches: Dict[int, Any] = {}  # position given to add_sketch -> two numbers
        self._by_kind: Dict[Any, List[Any]] = {}  # device and dtype -> results
        self._places: List[Optional[Tuple[Any, int]]] = []

    def add(self, tensor: Any) -> int:
        """Returns the number of the fingerprint in :meth:`read`."""
        return self._place(_fingerprint(tensor))

    def add_all(self, tensors: Iterable[Any], finite: bool = False) -> slice:
        """Adds the local parts of tensors; None has the result None. Returns where the results are
        in :meth:`read`. ``finite``: as :meth:`add_finite`."""
        add, first = self.add_finite if finite else self.add, len(self._places)
        for tensor in tensors:
            if tensor is None:
                self._place(None)
            else:
                add(held(tensor))
        return slice(first, len(self._places))

    def add_finite(self, tensor: Any) -> int:
        """Like :meth:`add`; the result is "0" if the tensor has an element that is not finite."""
        if not _readable(tensor) or tensor.element_size() == 1:
            return self._place(None)
        plain = tensor.detach()
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        if not plain.is_floating_point() or not plain.numel():
            return self._place(None)
        # A nan is the least and the largest. One pass without temporary memory.
        return self._place(torch.stack(torch.aminmax(plain)))

    def add_sketch(self, at: int, tensor: Any) -> None:
        """Adds under ``at`` what shows how much two tensors differ: the norm, and the sum with
        pseudo-random signs. The difference of two such sums is about the norm of the difference.
        Floats: only for values that each rank computes itself, so that rounding may differ."""
        if _readable(tensor) and tensor.is_floating_point() and tensor.numel() <= _MOST_SKETCHED:
            flat = tensor.detach().reshape(-1)
            signs = _signs_on(flat.device)
            found = torch.zeros(2, dtype=torch.float64, device=flat.device)
            for part in flat.split(_CHUNK):
                values = part.to(torch.float64)
                found = found + torch.stack((values @ signs[: values.numel()], values @ values))
            self._sketches[at] = torch.stack((found[0], found[1].sqrt()))

    def sketches(self) -> Dict[int, List[float]]:
        """Copies the sketches to the host."""
        if not self._sketches:
            return {}
        found = torch.stack([s.to("cpu") for s in self._sketches.values()]).tolist()
        return dict(zip(self._sketches, found))  # noqa: B905 - Python 3.9

    def _place(self, computed: Any) -> int:
        if computed is None:
            self._places.append(None)
        else:
            kind = computed.device, computed.dtype
            values = self._by_kind.setdefault(kind, [])
            self._places.append((kind, len(values)))
            values.append(computed)
        return len(self._places) - 1

    def by_name(self, tensors: Iterable[Tuple[str, Any]]) -> Callable[[Any], Dict[str, Any]]:
        """Adds the local parts of tensors with names; returns what finds their fingerprints in the
        result of :meth:`read`."""
        of = dict(tensors)
        names, places = list(of), self.add_all(of.values())
        return lambda read: dict(zip(names, read[places]))  # noqa: B905 - Python 3.9

    def read(self) -> List[Optional[str]]:
        """Returns each result as hexadecimal text; None where the tensor cannot be read."""
        read = {kind: _read(torch.stack(all)) for kind, all in self._by_kind.items()}
        return [
            None if place is None else f"{read[place[0]][place[1]] & _MASK:x}"
            for place in self._places
        ]


def _read(results: Any) -> List[int]:
    """The results as integers: of the ends of tensors, whether they are finite."""
    if results.is_floating_point():
        results = torch.isfinite(results).all(1).to(torch.int64)
    found: List[int] = results.tolist()
    return found


def _readable(tensor: Any) -> bool:
    """Whether the tensor has bytes of its own that are its elements in order."""
    return not (
        tensor.is_meta
        or tensor.is_quantized
        or tensor.layout != torch.strided
        or getattr(tensor, "is_nested", False)
        # FSDP2 frees the storage of a gathered parameter.
        or (tensor.numel() > 0 and not tensor.untyped_storage().nbytes())
    )


def _fingerprint(tensor: Any) -> Any:
    """The fingerprint as a tensor without dimensions on the same device; None if unreadable."""
    if not _readable(tensor):
        return None
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    size = plain.element_size()
    if _WORD % size:
        return None
    flat = plain.resolve_neg().contiguous().reshape(-1)
    if flat.storage_offset() * size % _WORD:
        flat = flat.clone()  # words begin at a multiple of their size
    per_word = _WORD // size
    whole = flat.numel() // per_word * per_word
    found = _weighted(flat[:whole].view(torch.int64), _weights_on(flat.device)) + flat.numel()
    if whole < flat.numel():
        rest = flat.new_zeros(per_word)
        rest[: flat.numel() - whole] = flat[whole:]
        found = found + rest.view(torch.int64)[0] * _LAST
    return found


def _weighted(words: Any, weights: Any) -> Any:
    size = words.numel()
    if size <= _CHUNK:
        return (words * weights[:size]).sum()
    rows = size // _CHUNK
    whole = words[: rows * _CHUNK].view(rows, _CHUNK)
    sums = [(whole[at : at + _ROWS] * weights).sum(1) for at in range(0, rows, _ROWS)]
    if size > rows * _CHUNK:
        sums.append(_weighted(words[rows * _CHUNK :], weights).reshape(1))
    return _weighted(torch.cat(sums), weights)


def _weights_on(device: Any) -> Any:
    known = _weights.get(device)
    if known is None:
        positions = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device)
        known = _weights[device] = _mixed(positions)
    return known


def _signs_on(device: Any) -> Any:
    known = _signs_by_device.get(device)
    if known is None:
        signs = (_weights_on(device) >> 33 & 1) * 2 - 1
        known = _signs_by_device[device] = signs.to(torch.float64)
    return known


def _mixed(positions: Any) -> Any:
    """A weight for each position: odd, so that no single difference is multiplied to zero; mixed,
    so that differences at several positions do not cancel by a pattern."""
    for factor in (-7046029254386353131, -4658895280553007687):
        positions = positions * factor
        positions = positions ^ (positions >> 31)
    return positions | 1


def part_fingerprint(part: Any, positions: Any) -> Tuple[str, str]:
    """Returns a fingerprint of a part whose elements are at ``positions`` of a whole tensor, and
    one of these positions. The sum of those of all parts, modulo 2**64, is that of the whole,
    however it is cut. ("", "") if the part cannot be read."""
    words = _KINDS.get(part.element_size())
    if not _readable(part) or words is None or part.is_complex():
        return "", ""
    flat = part.detach().contiguous().reshape(-1).view(words).to(torch.int64)
    weights = _mixed(positions.reshape(-1).to(flat.device) + 1)
    # Of a value 0 as well: a part is more than a tensor without elements.
    sums = torch.stack(((_mixed(flat) * weights).sum(), weights.sum())).tolist()
    return f"{sums[0] & _MASK:x}", f"{sums[1] & _MASK:x}"


def row_fingerprints(tensor: Any, most: int) -> List[str]:
    """Returns a short fingerprint of each row (index of dim 0) of a tensor of two or more
    dims and at most ``most`` rows; [] of any other."""
    if not _readable(tensor) or tensor.dim() < 2 or not 1 <= tensor.shape[0] <= most:
        return []
    plain = tensor.detach()
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    rows = plain.contiguous().reshape(plain.shape[0], -1)
    kind = _KINDS.get(rows.element_size())
    if not 0 < rows.numel() <= _MOST_SKETCHED or kind is None:
        return []
    words = rows.view(kind).to(torch.int64)
    weights = _weights_on(words.device)
    found: Any = sum((part * weights[: part.shape[1]]).sum(1) for part in words.split(_CHUNK, 1))
    return [f"{value >> 32 & 0xFFFFFFFF:x}" for value in found.tolist()]


def traced() -> bool:
    """Whether torch.compile or torch.jit.trace records what runs: what is computed now becomes a
    part of the user's program."""
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def in_a_mode() -> bool:
    """Whether a TorchDispatchMode, as that of make_fx or of selective checkpointing, sees each
    operation."""
    return torch._C._len_torch_dispatch_stack() > 0


def capturing() -> bool:
    """Whether nothing may be computed now: a mode would see it, or this thread records a CUDA
    graph, which a copy to the host would break."""
    graph = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return graph or in_a_mode()


def digest(*values: Any, size: int = 16) -> str:
    """Returns a hash of ``size`` bytes, in hexadecimal: of tensors the dtype, the shape and the
    bytes; of other values their text. Copies tensors to the host."""
    found = hashlib.blake2b(digest_size=size)
    for value in values:
        _fold(value, found)
    return found.hexdigest()


def _fold(value: Any, found: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype}{tuple(value.shape)}".encode())
        found.update(_as_bytes(value))
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            found.update(str(key).encode())
            _fold(value[key], found)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _fold(one, found)
    else:
        found.update(repr(value).encode())


def _as_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    if not flat.numel():
        return b""
    raw = flat.view(torch.uint8)
    try:
        return bytes(raw.numpy())
    except RuntimeError:  # torch works without numpy
        return bytes(raw.tolist())


def projected(tensor: torch.Tensor) -> Tuple[Any, List[float]]:
    """Returns the norm of ``tensor`` (any shape and floating dtype) and its projections on 16
    random vectors of +-1, the same on every rank, computed in float64 on the CPU. A tensor that is
    not finite has no projections, and its norm is text, for JSON."""
    flat = tensor.detach().reshape(-1).to("cpu", torch.float64)
    norm = float(torch.linalg.vector_norm(flat))
    if not math.isfinite(norm):
        return for_json(norm), []
    total = torch.zeros(PROJECTIONS, dtype=torch.float64)
    for block, part in enumerate(flat.split(_BLOCK) if flat.numel() else ()):
        total += _signs(block)[:, : part.numel()].to(torch.float64) @ part
    return for_json(norm), [_round(v) for v in total.tolist()]


@functools.lru_cache(maxsize=8)
def _signs(block: int) -> torch.Tensor:
    """+1 and -1, int8, shape (PROJECTIONS, _BLOCK)."""
    generator = torch.Generator().manual_seed(_SEED + block)
    bits = torch.randint(0, 2, (PROJECTIONS, _BLOCK), generator=generator, dtype=torch.int8)
    return bits * 2 - 1


def for_json(value: float) -> Any:
    """Returns ``value``, as text if it is not finite: JSON has no nan."""
    return _round(value) if math.isfinite(value) else str(value)


def _round(value: float) -> float:
    # Nine digits: equal tensors stay equal, and the distance is accurate to 1e-8 of the norm.
    return float(f"{value:.9g}")
