"""Records what was loaded: into modules and optimizers, from files, and whether a parameter that
FSDP2 shards was loaded before; and what nothing was written into since `to_empty` made it.

unwritten   line(of to_empty) names[of parameters and buffers] zeros[parameters of zeros]
"""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Set, Tuple

import torch
from torch.optim import optimizer as torch_optimizer

from moediag.protocol.names import plain_name
from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext
from moediag.recorder.modules import unwrapped
from moediag.recorder.step.numbers import Fingerprints
from moediag.recorder.step.pieces import distributed, local

WATCHER = "laws of loading"
_FSDP_PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param"
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_APART = ("sync_module_states", "ignored_modules", "ignored_states")  # of FSDP1: ranks may differ
_PLANNER = "torch.distributed.checkpoint.default_planner"
_GROUPS, _STATE = "param_groups", "state."  # in the keys of a checkpoint, of an optimizer
_MOST_LOADS = 64
_MOST_NAMES = 20
_FIRST_ELEMENTS = 64  # of a tensor that may be empty
_MOST_DEPTH = 3  # of a checkpoint, where an optimizer's state is looked for
_SAMPLE = 1 << 16  # elements of a parameter that are compared


class Loading:
    """Wraps the functions that load."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._loads = 0  # of modules
        self._told: Set[Tuple[str, str]] = set()  # events that were written, by kind and line
        self._loaded = ByObject()  # parameter -> True
        # Sharded parameter -> whether it was loaded before, numbers of the fingerprints of a sample
        # of the whole parameter and of the shard.
        self._sharded = ByObject()
        self._prints = Fingerprints()
        self._written = False
        # Tensor that `to_empty` made -> the version and place of its storage, its first elements.
        self._empty = ByObject()
        self._line = ""  # of to_empty
        self._wrapping = False  # FSDP1 wraps the parts of a model
        for owner, name, tell in (
            (torch, "load", self._file), (torch, "save", self._saved),
            (torch.nn.Module, "load_state_dict", self._module),
            (torch.nn.Module, "to_empty", self._emptied),
            (torch_optimizer.Optimizer, "load_state_dict", self._optimizer),
        ):  # fmt: skip
            make = self._context.around(WATCHER, after=tell)
            self._context.recorder.patches.replace(owner, name, make)
        self._context.on_check.append(self._write)
        later = self._context.replace_late
        later(_FSDP1, "FullyShardedDataParallel", "__init__", self._flattening)
        later(_FSDP_PARAMETER, "FSDPParam", "_init_sharded_param", self._sharding)
        # What a load asks for: torch.distributed.checkpoint reads nothing else.
        planned = self._context.around(WATCHER, after=self._planned)
        later(_PLANNER, "DefaultLoadPlanner", "set_up_planner", planned)

    def _once(self, kind: str, frame: Any, **fields: Any) -> None:
        line = self._context.line(frame)
        if (kind, line) not in self._told:
            self._told.add((kind, line))
            self._context.log.event(kind, keep=True, line=line, **fields)

    def _saved(
        self, frame: Any, _result: Any, obj: Any = None, f: Any = None, *_: Any, **__: Any
    ) -> None:
        self._context.saves += 1
        if isinstance(f, (str, os.PathLike)) and _has_matrix(obj, _MOST_DEPTH):
            digest = hashlib.sha256(str(Path(f).absolute()).encode()).hexdigest()
            self._once("saved", frame, file=digest[:16])

    def _file(self, frame: Any, content: Any, *_: Any, **__: Any) -> None:
        if _has_optimizer(content, _MOST_DEPTH):
            self._once("optimizer_file", frame)

    def _optimizer(self, frame: Any, *_: Any, **__: Any) -> None:
        self._once("optimizer_load", frame)

    def _module(self, frame: Any, result: Any, module: Any, *_: Any, **__: Any) -> None:
        self._loads += 1
        if self._loads > _MOST_LOADS:
            return
        missing: List[str] = list(getattr(result, "missing_keys", ()))
        unexpected: List[str] = list(getattr(result, "unexpected_keys", ()))
        left_out = set(missing)
        loaded = [p for name, p in module.named_parameters() if name not in left_out]
        for parameter in loaded:
            self._loaded.set(parameter, True)
        self._context.event(
            "load", keep=True, line=self._context.line(frame), parameters=len(loaded),
            missing=missing[:_MOST_NAMES], unexpected=unexpected[:_MOST_NAMES],
            counts=[len(missing), len(unexpected)],
        )  # fmt: skip

    # ------------------------------------------------------------------ torch's checkpoints

    def _planned(self, frame: Any, _result: Any, planner: Any, *_: Any, **__: Any) -> None:
        asked, held = planner.state_dict, getattr(planner.metadata, "state_dict_metadata", {})
        owners = {key.rpartition(_GROUPS)[0] for key in asked if _GROUPS in key}
        for owner in sorted(owners):
            left = [key for key in held if key.startswith(owner + _STATE)]
            if left and not any(key.startswith(owner + _STATE) for key in asked):
                self._once("states_left", frame, names=left[:_MOST_NAMES], count=len(left))

    # ------------------------------------------------------------------ shards of FSDP2

    def _sharding(self, original: Any) -> Any:
        @functools.wraps(original)
        def _init_sharded_param(of: Any, param: Any, *args: Any, **kwargs: Any) -> Any:
            whole: List[Tuple[int, bool]] = []
            self._context.guarded(WATCHER, self._before_sharding, param, whole)
            result = original(of, param, *args, **kwargs)
            self._context.guarded(WATCHER, self._after_sharding, of.sharded_param, whole)
            return result

        return _init_sharded_param

    def _before_sharding(self, parameter: Any, whole: List[Tuple[int, bool]]) -> None:
        if distributed(parameter) or parameter.is_meta or self._written:
            return
        place = self._prints.add(_sample(parameter))
        whole.append((place, bool(self._loaded.get(parameter))))

    def _after_sharding(self, sharded: Any, whole: List[Tuple[int, bool]]) -> None:
        if whole:
            shard = self._prints.add(_sample(sharded))
            self._sharded.set(sharded, (whole[0][1], whole[0][0], shard))

    # ------------------------------------------------------------------ parameters of FSDP1

    def _flattening(self, original: Any) -> Any:
        @functools.wraps(original)
        def __init__(of: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            outer, self._wrapping = not self._wrapping, True
            if outer and not any(map(kwargs.get, _APART)):
                self._context.guarded(WATCHER, self._before_flattening, module)
            try:
                original(of, module, *args, **kwargs)
            finally:
                self._wrapping = not outer

        return __init__

    def _before_flattening(self, module: Any) -> None:
        every = [(n, p) for n, p in module.named_parameters() if p.dim() > 1 and not p.is_meta]
        some, prints = [*every[:_MOST_NAMES], *every[_MOST_NAMES:][-_MOST_NAMES:]], Fingerprints()
        prints.add_all(_sample(parameter) for _, parameter in some)
        rows = zip(some, prints.read())  # noqa: B905
        shards = {n: [read, bool(self._loaded.get(p)), True] for (n, p), read in rows}
        self._context.log.event("sharded", keep=True, step=1, shards=shards)

    # ------------------------------------------------------------------ empty tensors

    def _emptied(self, frame: Any, _result: Any, module: Any, *_: Any, **__: Any) -> None:
        self._line = self._context.line(frame)
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point() and local(tensor).numel() and not tensor.is_meta:
                self._empty.set(tensor, _state_of(tensor))

    def _unwritten(self) -> None:
        """What a model has that nothing was written into. Zeros may have been written by way of
        ``.data``, which is not counted."""
        empty = {id(t) for t in self._empty.owners() if _state_of(t) == self._empty.get(t)}
        names: Dict[bool, Dict[str, None]] = {False: {}, True: {}}  # whether they are zeros
        for model in map(unwrapped, self._context.recorder.models.owners() if empty else ()):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if id(tensor) in empty:
                    zeros = tensor.requires_grad and not bool(local(tensor).any())
                    names[zeros][plain_name(name)] = None
        if any(names.values()):
            self._context.log.event(
                "unwritten", keep=True, line=self._line, names=[*names[False]], zeros=[*names[True]]
            )

    def _write(self, step: int) -> None:
        """At the first check: which shards hold what they were made of."""
        if self._written:
            return
        self._written = True
        self._unwritten()
        self._empty = ByObject()
        parameters = self._sharded.owners()
        if not parameters:
            return
        names = self._context.names.of(parameters)
        now = Fingerprints()
        now.add_all(map(_sample, parameters))
        before, shards = self._prints.read(), {}
        for name, parameter, present in zip(names, parameters, now.read()):  # noqa: B905
            loaded, whole, shard = self._sharded.get(parameter)
            if name is not None:
                shards[name] = [before[whole], loaded, before[shard] == present]
        self._context.log.event("sharded", keep=True, step=step, shards=shards)
        self._prints = Fingerprints()


def _state_of(tensor: Any) -> Tuple[int, int, List[float]]:
    own = local(tensor)
    first = own.reshape(-1)[:_FIRST_ELEMENTS].view(torch.uint8).tolist()
    return own._version, own.data_ptr(), first


def _sample(sharded: Any) -> Any:
    return local(sharded).reshape(-1)[:_SAMPLE]


def _has_matrix(content: Any, depth: int) -> bool:
    """Whether what is saved holds a model."""
    if isinstance(content, Mapping) and depth > 0:
        return any(_has_matrix(one, depth - 1) for one in content.values())
    matrix = isinstance(content, torch.Tensor) and content.dim() > 1
    return matrix or isinstance(content, torch.nn.Module)


def _has_optimizer(content: Any, depth: int) -> bool:
    """Whether a checkpoint holds the state of an optimizer that has stepped."""
    if not isinstance(content, Mapping):
        return False
    if "param_groups" in content and isinstance(content.get("state"), Mapping):
        return bool(content["state"])
    return depth > 0 and any(_has_optimizer(one, depth - 1) for one in content.values())
