"""Exact fingerprints of tensors: equal for equal bytes, whatever the device computes in parallel.

A fingerprint is a sum of the tensor's bits, read as integers, times a weight for each position,
modulo 2**64. Integer sums have no rounding and no order, so it is the same on every rank and
device. It is computed where the tensor is; the fingerprints of many tensors are copied to the host
together.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch

_CHUNK = 1 << 16  # positions with a weight of their own; rows of a chunk are weighted again
_ROWS = 32  # chunks that are multiplied at once: 16 MiB of temporary memory
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_SKETCHED = 1 << 24  # elements
_MASK = (1 << 64) - 1

_weights: Dict[Any, Any] = {}  # device -> weights of the positions in a chunk


class Fingerprints:
    """Collects tensors with :meth:`add`; :meth:`read` copies all results to the host."""

    def __init__(self) -> None:
        self._sketches: Dict[int, Any] = {}  # position given to add_sketch -> two numbers
        self._by_device: Dict[Any, List[Any]] = {}
        self._places: List[Optional[Tuple[Any, int]]] = []

    def add(self, tensor: Any) -> int:
        """Returns the number of the fingerprint in :meth:`read`."""
        computed = _fingerprint(tensor)
        if computed is None:
            return self._place(None)
        return self._place(computed)

    def add_finite(self, tensor: Any) -> int:
        """Like :meth:`add`; the result is "0" if the tensor has an element that is not finite."""
        if not (tensor.is_floating_point() or tensor.is_complex()) or not _readable(tensor):
            return self._place(None)
        return self._place(torch.isfinite(tensor.detach()).all().to(torch.int64))

    def add_sketch(self, at: int, tensor: Any) -> None:
        """Adds under ``at`` what shows how much two tensors differ: the norm, and the sum with
        pseudo-random signs. The difference of two such sums is about the norm of the difference.
        Floats: only for values that each rank computes itself, so that rounding may differ."""
        if _readable(tensor) and tensor.is_floating_point() and tensor.numel() <= _MOST_SKETCHED:
            flat = tensor.detach().reshape(-1).to(torch.float64)
            signs = (_weights_on(flat.device) >> 33 & 1) * 2 - 1
            whole = flat.numel() // _CHUNK * _CHUNK
            total = (flat[whole:] * signs[: flat.numel() - whole]).sum()
            total = total + (flat[:whole].view(-1, _CHUNK) * signs).sum()
            self._sketches[at] = torch.stack((total, flat.norm()))

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
            values = self._by_device.setdefault(computed.device, [])
            self._places.append((computed.device, len(values)))
            values.append(computed)
        return len(self._places) - 1

    def read(self) -> List[Optional[str]]:
        """Returns each result as hexadecimal text; None where the tensor cannot be read."""
        read = {device: torch.stack(all).tolist() for device, all in self._by_device.items()}
        return [
            None if place is None else f"{read[place[0]][place[1]] & _MASK:x}"
            for place in self._places
        ]


def _readable(tensor: Any) -> bool:
    """Whether the tensor has bytes of its own that are its elements in order."""
    return not (
        tensor.is_meta
        or tensor.is_quantized
        or tensor.layout != torch.strided
        or getattr(tensor, "is_nested", False)
    )


def _fingerprint(tensor: Any) -> Any:
    """The fingerprint as a tensor without dimensions on the same device; None if unreadable."""
    if not _readable(tensor):
        return None
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    bits = _BITS.get(plain.element_size())
    if bits is None:
        return None
    flat = plain.resolve_neg().contiguous().view(bits).reshape(-1)
    return _weighted(flat, _weights_on(flat.device)) + flat.numel()


def _weighted(flat: Any, weights: Any) -> Any:
    size = flat.numel()
    if size <= _CHUNK:
        return (flat.to(torch.int64) * weights[:size]).sum()
    rows = size // _CHUNK
    whole = flat[: rows * _CHUNK].view(rows, _CHUNK)
    sums = [
        (whole[at : at + _ROWS].to(torch.int64) * weights).sum(1) for at in range(0, rows, _ROWS)
    ]
    if size > rows * _CHUNK:
        sums.append(_weighted(flat[rows * _CHUNK :], weights).reshape(1))
    return _weighted(torch.cat(sums), weights)


def _weights_on(device: Any) -> Any:
    known = _weights.get(device)
    if known is None:
        # Odd, so that no single difference is multiplied to zero; mixed, so that differences at
        # several positions do not cancel by a pattern.
        mixed = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device)
        for factor in (-7046029254386353131, -4658895280553007687):
            mixed = mixed * factor
            mixed = mixed ^ (mixed >> 31)
        known = _weights[device] = mixed | 1
    return known


def capturing() -> bool:
    """Whether this thread records a CUDA graph: copying to the host would break it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
