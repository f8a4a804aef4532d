"""What from_pretrained loads in a low precision can be sharded by FSDP2."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moediag.lab.relations.relation import Case, Relation, Tensors
from moediag.lab.relations.saved_bytes import loaded
from moediag.lab.step.shard import fsdp2_internals
from moediag.recorder.not_applicable import NotApplicable


class OneDtype(Relation):
    name = "one-dtype"
    says = "from_pretrained in bfloat16 gives the parameters of one layer one dtype"
    exact = True
    route = "fully_shard of the layers and the root: torch refuses the unit"

    def ways(self, case: Case) -> Sequence[str]:
        if not _layers(case.model()):
            raise NotApplicable("the family names no layers to wrap (_no_split_modules)")
        return ("bfloat16",)

    def plain(self, case: Case, way: str) -> Tensors:
        return {name: torch.ones(()) for name, _ in _low(case).named_parameters()}

    def other(self, case: Case, way: str) -> Tensors:
        """1 for each parameter that has the dtype of most parameters of its unit."""
        model = _low(case)
        units: Dict[str, Dict[str, Any]] = {}
        layers = [name for name, _ in _layers(model)]
        for name, parameter in model.named_parameters():
            unit = max((one for one in layers if name.startswith(f"{one}.")), key=len, default="")
            units.setdefault(unit, {})[name] = parameter.dtype
        found: Tensors = {}
        for of in units.values():
            ((most, _),) = Counter(of.values()).most_common(1)
            found.update((name, torch.tensor(float(dtype == most))) for name, dtype in of.items())
        return found

    def quantity(self, wrong: Sequence[str]) -> str:
        return "dtype"

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> Optional[bool]:
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:
            return None
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model, mesh = _low(case), init_device_mesh("cpu", (1,))
            for _, module in [*_layers(model)[::-1], ("", model)]:  # inner ones first
                fully_shard(module, mesh=mesh)
            for group in fsdp2_internals.parameter_groups(model):
                group._init_mp_dtypes()  # the first forward asks this
        except AssertionError:
            return True
        finally:
            dist.destroy_process_group()
        return False


def _low(case: Case) -> Any:
    model: Any = case.model()
    return loaded(model.bfloat16(), "bfloat16")


def _layers(model: Any) -> List[Any]:
    """(name, module) of the layers that the release says must not be split."""
    unsplit = set(getattr(model, "_no_split_modules", None) or ())
    return [
        (name, module) for name, module in model.named_modules() if type(module).__name__ in unsplit
    ]
