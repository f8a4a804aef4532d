"""Facts about a model that decide whether two runs of it can be compared, and how exactly;
whether DistributedDataParallel reduces the gradients of what the program trains."""

from __future__ import annotations

import functools
import gc
from typing import Any, Dict, List, Set, Tuple

import torch
import torch.distributed as dist
from torch.nn.modules.dropout import _DropoutNd

from moediag.protocol.names import plain_name
from moediag.protocol.outcome import BARE, NO_SYNC, REPLACED
from moediag.recorder.step.hooks import StepHooks

_WRAPPER = "DistributedDataParallel"

# Functions with dropout: the argument that turns it off, and its place.
_DROPOUTS = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
                     "feature_alpha_dropout"), (2, "training", False)),
    "scaled_dot_product_attention": (4, "dropout_p", 0.0),
}  # fmt: skip
_LOSS_CALLS = ("allreduce", "allgather", "_allgather_base")


def turn_dropout_off(hooks: StepHooks) -> None:
    """Makes functions with dropout return what they return in evaluation."""

    def make(place: int, name: str, value: Any, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > place:
                args = (*args[:place], value, *args[place + 1 :])
            else:
                kwargs[name] = value
            return original(*args, **kwargs)

        return call

    for function, how in _DROPOUTS.items():
        hooks.replace(torch.nn.functional, function, functools.partial(make, *how))


def has_dropout(module: Any) -> bool:
    return any(getattr(one, "p", 0) and isinstance(one, _DropoutNd) for one in module.modules())


class LossCalls:
    """With which ranks this one exchanges values between the begin of a forward and its backward,
    as a loss over the samples of several ranks does."""

    def __init__(self) -> None:
        self.open = False  # between the begin of a forward and its backward
        self.made: Set[Tuple[int, ...]] = set()  # the ranks of each group

    def install(self, hooks: StepHooks) -> None:
        for name in _LOSS_CALLS:
            hooks.replace(dist.ProcessGroup, name, self._wrapped)

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self.open:
                self.made.add(tuple(sorted(dist.get_process_group_ranks(group))))
            return original(group, *args, **kwargs)

        return call


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def computes_in(module: Any) -> Set[str]:
    """Returns the dtypes of autocast, of FSDP's mixed precision, and of products in less."""
    found = set()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            found.add(dtype_name(torch.get_autocast_dtype(device)))
    if torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest":
        found.add("float16")  # TF32 has as many digits
    for one in module.modules():
        state = getattr(one, "_get_fsdp_state", None)
        policies = [getattr(one, "mixed_precision", None)]
        if state is not None:
            policies.append(getattr(state(), "_mp_policy", None))
        dtypes = (getattr(policy, "param_dtype", None) for policy in policies)
        found |= {dtype_name(dtype) for dtype in dtypes if isinstance(dtype, torch.dtype)}
    return found


def across_samples(module: Any) -> str:
    """Returns the class of a module that normalises over the samples of one rank, or ""."""
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    for one in module.modules():
        own = isinstance(one, batch_norm) and not isinstance(one, torch.nn.SyncBatchNorm)
        if own and (one.training or not one.track_running_stats):
            return type(one).__name__
    return ""


def averages_over(module: Any) -> List[int]:
    """Returns the ranks over which the wrapper of a whole model averages its gradients; empty if it
    is not known to."""
    kind = type(module).__name__
    if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
        return sorted(dist.get_process_group_ranks(module.process_group))
    if getattr(module, "_get_fsdp_state", None) is None:
        return []
    # FSDP2 over all ranks: no other axis is left.
    meshes = {p.device_mesh for p in module.parameters() if hasattr(p, "device_mesh")}
    mesh: Any = meshes.pop() if len(meshes) == 1 else None
    whole = mesh is not None and mesh.ndim == 1 and mesh.size() == dist.get_world_size()
    return sorted(mesh.mesh.tolist()) if whole else []


def random_state() -> List[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


class Reduction:
    """Watches the forwards of one step."""

    def __init__(self) -> None:
        self._called: Set[int] = set()
        self._synced: Set[int] = set()

    def forward(self, module: Any) -> None:
        """``module`` is called by the program."""
        self._called.add(id(module))
        if type(module).__name__ == _WRAPPER and module.require_backward_grad_sync:
            self._synced.add(id(module))

    def found(self) -> Dict[str, List[str]]:
        """Returns what is not reduced, by reason: classes of modules, or names of parameters."""
        found: Dict[str, List[str]] = {}
        for wrapper in [one for one in gc.get_objects() if type(one).__name__ == _WRAPPER]:
            inner = wrapper.module
            if id(inner) in self._called:
                found.setdefault(BARE, []).append(type(inner).__name__)
            if id(wrapper) not in self._called:
                continue
            if id(wrapper) not in self._synced:
                found.setdefault(NO_SYNC, []).append(type(inner).__name__)
            known = {id(p) for p in getattr(wrapper, "_module_parameters", [])}
            ignored = getattr(wrapper, "parameters_to_ignore", ())
            for name, parameter in inner.named_parameters():
                unknown = known and parameter.requires_grad and id(parameter) not in known
                if unknown and name not in ignored:
                    found.setdefault(REPLACED, []).append(plain_name(name))
        return found
