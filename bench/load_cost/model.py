"""The model to load, sharded by FSDP2 on the meta device, and the weights that it must receive.

Its parameters are matrices and, every eighth, a vector of odd length, which does not divide evenly
over ranks. Each has its own module, as the experts of a mixture-of-experts model often do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from bench.load_cost.timing import Spec

PER_LAYER = 100  # parameters of one decoder layer, an FSDP group


class _Leaf(nn.Module):
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def shapes(count: int, numel: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of the first ``count`` parameters; a larger model begins with the same."""
    height = max(1, math.isqrt(numel))
    for number in range(count):
        layer, place = divmod(number, PER_LAYER)
        if place % 8 == 7:
            yield f"layers.{layer}.norms.{place}.weight", (height | 1,)
        else:
            yield f"layers.{layer}.experts.{place}.weight", (height, numel // height)


class Weights:
    """The weights that loads deliver, on every rank, to compare with.

    ``full`` maps each name to a view into one buffer on ``device``, with the shape of
    :func:`shapes`. Models of all sizes take their parameters from it.
    """

    def __init__(self, spec: Spec, device: torch.device) -> None:
        named = list(shapes(max(spec.parameters), spec.numel))
        total = sum(math.prod(shape) for _, shape in named)
        generator = torch.Generator().manual_seed(0)  # on the CPU: the same on every rank
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._flat = torch.randn(total, generator=generator, dtype=torch.float32)
        self._flat = self._flat.to(device=device, dtype=dtype)
        self._bits = self._flat.view(torch.int32 if dtype == torch.float32 else torch.int16)
        self._pattern = 0
        self.full: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in named:
            end = start + math.prod(shape)
            self.full[name] = self._flat[start:end].view(shape)
            start = end

    def renew(self) -> None:
        """Changes the weights, equally on all ranks.

        Memory that still holds an earlier load then differs from what this load must deliver. Only
        the lowest bits change, so no value becomes nan.
        """
        following = (self._pattern + 1) % 128
        self._bits.bitwise_xor_(self._pattern ^ following)
        self._pattern = following


def sharded(count: int, spec: Spec, mesh: DeviceMesh) -> nn.Module:
    """A model of ``count`` parameters on the meta device.

    Each layer and the root are an FSDP2 group over ``mesh``, which has one dimension.
    """
    root = nn.Module()
    dtype: torch.dtype = getattr(torch, spec.dtype)
    for name, shape in shapes(count, spec.numel):
        at: Any = root
        parents = name.split(".")[:-2]
        for part in parents:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        at.add_module(name.split(".")[-2], _Leaf(shape, dtype))
    layers: Any = root._modules["layers"]
    for layer in layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    return root


def cut(full: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """A view of this rank's part of ``full`` under Shard(0), split as by ``torch.chunk``.

    It is empty on the last ranks where there are fewer rows than ranks.
    """
    rows = -(-full.shape[0] // world_size)
    start = min(rank * rows, full.shape[0])
    return full.narrow(0, start, min(rows, full.shape[0] - start))


def wrong(model: nn.Module, weights: Weights, rank: int, world_size: int) -> list[str]:
    """Names of the parameters whose local shard is not, bit by bit, its cut of the true tensor.

    A shard of another dtype or shape, or one that was never loaded, counts too.
    """
    found: list[str] = []
    for name, parameter in model.named_parameters():
        sharded_parameter: Any = parameter
        local = sharded_parameter.to_local()
        expected = cut(weights.full[name], rank, world_size)
        same = not local.is_meta and local.dtype == expected.dtype and local.shape == expected.shape
        if not same or not torch.equal(_bits(local), _bits(expected)):
            found.append(name)
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as integers: compared as floats, -0 equals 0 and nan differs from itself."""
    kind = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.detach().view(kind)
