"""The model that is loaded: sharded by FSDP2 on the meta device, and the weights it must get.

Matrices and, one in eight, vectors of odd length, which no number of ranks divides evenly; names
and nesting as of a mixture of experts, whose every parameter has a module of its own.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, Tuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moediag.protocol import LoadCostSpec
from moediag.worker.not_applicable import NotApplicable

PER_LAYER = 100  # parameters of one decoder layer, an FSDP group


class _Leaf(nn.Module):
    def __init__(self, shape: Tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def shapes(count: int, numel: int) -> Iterator[Tuple[str, Tuple[int, ...]]]:
    """Name and shape of the first ``count`` parameters; a larger model begins with the same."""
    height = max(1, math.isqrt(numel))
    for number in range(count):
        layer, place = divmod(number, PER_LAYER)
        if place % 8 == 7:
            yield f"layers.{layer}.norms.{place}.weight", (height | 1,)
        else:
            yield f"layers.{layer}.experts.{place}.weight", (height, numel // height)


class Weights:
    """The truth: every rank has all of it, and hands it to a method only where that may have it.

    ``full``: name -> view into one buffer, (shape as of :func:`shapes`, dtype), on ``device``. All
    sizes of model take their parameters from it.
    """

    def __init__(self, spec: LoadCostSpec, device: torch.device) -> None:
        named = list(shapes(max(spec.parameters), spec.numel))
        total = sum(math.prod(shape) for _, shape in named)
        generator = torch.Generator().manual_seed(0)  # on the CPU: the same on every rank
        dtype: torch.dtype = getattr(torch, spec.dtype)
        self._flat = torch.randn(total, generator=generator, dtype=torch.float32)
        self._flat = self._flat.to(device=device, dtype=dtype)
        self._bits = self._flat.view(torch.int32 if dtype == torch.float32 else torch.int16)
        self._pattern = 0
        self.full: Dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in named:
            end = start + math.prod(shape)
            self.full[name] = self._flat[start:end].view(shape)
            start = end

    def renew(self) -> None:
        """Other weights, on all ranks alike: what memory still holds of an earlier load can then
        not pass for what this load delivered. Only the lowest bits change: no value becomes nan."""
        following = (self._pattern + 1) % 128
        self._bits.bitwise_xor_(self._pattern ^ following)
        self._pattern = following


def sharded(count: int, spec: LoadCostSpec, mesh: DeviceMesh) -> nn.Module:
    """``count`` parameters on the meta device, each layer and the root an FSDP2 group over
    ``mesh`` (1-D). Raises NotApplicable."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:  # torch < 2.6
        raise NotApplicable("FSDP2 needs torch >= 2.6") from error
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
    """This rank's part of ``full`` under Shard(0) over ``world_size`` ranks, as ``torch.chunk``
    splits; a view, empty where there are fewer rows than ranks."""
    rows = -(-full.shape[0] // world_size)
    start = min(rank * rows, full.shape[0])
    return full.narrow(0, start, min(rows, full.shape[0] - start))


def wrong(model: nn.Module, weights: Weights, rank: int, world_size: int) -> List[str]:
    """Names of the parameters whose local shard differs in any bit from its cut of the truth, has
    another type or shape, or was never loaded."""
    found: List[str] = []
    for name, parameter in model.named_parameters():
        sharded_parameter: Any = parameter
        local = sharded_parameter.to_local()
        expected = cut(weights.full[name], rank, world_size)
        same = not local.is_meta and local.dtype == expected.dtype and local.shape == expected.shape
        if not same or not torch.equal(_bits(local), _bits(expected)):
            found.append(name)
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: a float comparison would take -0 for 0, and no nan for itself."""
    kind = {4: torch.int32, 2: torch.int16}[tensor.element_size()]
    return tensor.detach().view(kind)
