"""Which ranks hold the same part of a parameter, as the wrappers of the model declare it.

Only what a wrapper guarantees counts: DistributedDataParallel keeps parameters equal over its
process group, a Replicate placement means equal local tensors, and FSDP with a replicate dimension
reduces gradients over it, and Megatron marks what it shards. Any other plain tensor belongs to
nobody else, as far as is known.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import torch.distributed as dist

from moediag.axes import AXES
from moediag.recorder.core import ByObject, Recorder
from moediag.recorder.laws import megatron
from moediag.recorder.laws.model_parts import ModelParts
from moediag.recorder.step.pieces import axes_of, distributed, flat_parameters, same_part

# How equality is kept. REDUCED: by a reduction of the gradients. PLACED: each rank computes the
# same. LOCAL: the program steps without a reduction, or a hook replaces it. PART: there are other
# parts on the other ranks, and no replica. PLAIN: nothing is declared.
REDUCED, PLACED, LOCAL, PART, PLAIN = "reduced", "placed", "local", "part", "plain"
DATA_AXES = frozenset(("dp", "fs", "fsdp", "replicate", "shard", "data")).union(
    str(axis) for axis in AXES if axis.data_parallel
)


class Piece(NamedTuple):
    """The part of a parameter that this rank holds."""

    part: str  # which part, the same text on every rank that holds it
    how: str
    ranks: Tuple[int, ...]  # global ranks that hold it; of a PART, the ranks of all parts
    group: Any  # the process group over which it is kept equal, or None


class ReplicaSets:
    """Knows the wrappers of this rank; :meth:`pieces` looks up parameters."""

    def __init__(self, recorder: Recorder, parts: Callable[[Any], ModelParts] = ModelParts) -> None:
        self._recorder = recorder
        self._parts = parts
        self._known = ByObject()  # instances of DistributedDataParallel
        # Called with each new instance; must not raise.
        self.on_wrapped: List[Callable[[Any], None]] = []
        self._unreduced: "weakref.WeakSet[Any]" = weakref.WeakSet()  # wrappers, see stepped()

    def install(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        known, on_wrapped = self._known, self.on_wrapped

        def make(init: Any) -> Any:
            def _ddp_init_helper(self: Any, *args: Any, **kwargs: Any) -> None:
                init(self, *args, **kwargs)
                known.set(self, True)
                for tell in on_wrapped:
                    tell(self)

            return _ddp_init_helper

        # Not ``__init__``: its warnings name the frame of its caller, which must be the program's.
        self._recorder.patches.replace(DistributedDataParallel, "_ddp_init_helper", make)

    def wrapped(self) -> List[Any]:
        """The models in DistributedDataParallel, without it."""
        return [ddp.module for ddp in self._known.owners()]

    def plain_models(self) -> List[Any]:
        """The models that were seen running and have no wrapper."""
        inside = {id(p) for model in self.wrapped() for p in self._parts(model).parameters}
        return [
            model
            for model in self._recorder.models.owners()
            if not any(distributed(p) or id(p) in inside for p in self._parts(model).parameters)
        ]

    def stepped(self) -> None:
        """Notes what does not reduce gradients when an optimizer steps: local SGD steps inside
        ``no_sync``, or without FSDP2's all-reduce."""
        for ddp in self._known.owners():
            if not ddp.require_backward_grad_sync:
                self._unreduced.add(ddp)
        for group in self._recorder.fsdp2_groups():
            reduces = (getattr(group, f"{name}_grads", True) for name in ("all_reduce", "reduce"))
            if not all(reduces):
                self._unreduced.add(group)
        for state, handle in self._recorder.fsdp1_handles():
            if not getattr(state, "_sync_gradients", True):
                self._unreduced.add(handle)

    def pieces(self, parameters: List[Any]) -> List[Piece]:
        """The piece of each parameter, in order."""
        declared: Dict[int, Piece] = {}
        self._of_fsdp1(declared)
        self._of_ddp(declared)
        self._of_megatron(declared)
        reduced = self._over_which_fsdp2_reduces()
        return [declared.get(id(p)) or _of_tensor(p, reduced.get(id(p))) for p in parameters]

    def data_parallel(self, root: Any) -> Tuple[int, ...]:
        """The ranks over which the wrapper of a whole model averages gradients; () if unknown. Of
        FSDP2 only if no other dimension of a mesh may be folded into its own."""
        root = getattr(root, "_orig_mod", root)  # torch.compile
        if self._known.get(root):
            return _ranks(root.process_group)
        if is_engine(root):
            return _ranks(root.data_parallel_group) if root.data_parallel_group else ()
        for state, handle in self._recorder.fsdp1_handles():
            if state is root and getattr(state, "_inter_node_pg", None) is None:
                return _ranks(handle.process_group)
        for group in self._recorder.fsdp2_groups():
            # A flattened axis has the names of all.
            axes = {*"_".join(self._recorder.groups.axes()).split("_")} - {""}
            if root in group.modules and axes <= DATA_AXES:
                return tuple(sorted(group.mesh_info.mesh.mesh.flatten().tolist()))
        return ()

    def means(self) -> List[int]:
        """The ranks over whose samples FSDP or DeepSpeed takes the mean of the gradients of all
        models that train; [] if that is not known."""
        groups = self._recorder.fsdp2_groups()
        divided = any(getattr(group, "gradient_divide_factor", None) for group in groups)
        models = self._recorder.models.owners()
        trained = [m for m in models if any(p.requires_grad for p in self._parts(m).parameters)]
        over = {self.data_parallel(model) for model in trained}
        # The pieces of DistributedDataParallel show what it reduces.
        return [] if len(over) != 1 or divided or self._known.owners() else list(over.pop())

    def sent_buffers(self) -> Set[int]:
        """The ids of the modules whose buffers a wrapper sends from its first rank."""
        sends = (one for one in self._known.owners() if one.broadcast_buffers)
        return {id(module) for ddp in sends for module in self._parts(ddp.module).modules}

    def joins(self) -> bool:
        """Whether a rank without samples may answer the calls of others (``Join``)."""
        return any(ddp._join_config.enable for ddp in self._known.owners())

    def hooked(self) -> bool:
        """Whether the program gave a wrapper a communication hook."""
        states = (state for state, _ in self._recorder.fsdp1_handles())
        return any(getattr(one, "_comm_hooks", None) for one in self._known.owners()) or any(
            getattr(one, "_comm_hook", None) is not None for one in states
        )

    def keep_gradients(self) -> bool:
        """Whether a wrapper keeps gradients of an earlier micro-batch where the program does not
        see them."""
        engines = filter(is_engine, self._recorder.models.owners())
        every = any(one.micro_steps % one.gradient_accumulation_steps() for one in engines)
        handles = self._recorder.fsdp1_handles()
        every = every or any(handle.flat_param.grad is not None for _, handle in handles)
        return every or any(map(unreduced, self._recorder.fsdp2_groups()))

    def engine_ranks(self, optimizer: Any) -> Tuple[int, ...]:
        """The ranks that have the parts of a model of DeepSpeed of which ``optimizer`` has one; ()
        of other optimizers."""
        for root in self._recorder.models.owners():
            own = getattr(root, "optimizer", None) if is_engine(root) else None
            if own is not None and getattr(own, "optimizer", None) is optimizer:
                return self.data_parallel(root)
        return ()

    def averaged(self, root: Any) -> Tuple[int, ...]:
        """The same, also if the model that is called contains the wrapper: a task with its loss,
        say. What is outside the wrapper may differ between ranks."""
        known = self.data_parallel(root)
        if known:
            return known
        parts = self._parts(root)
        inside = [module for module in parts.modules if self._known.get(module)]
        wrapped = {id(p) for ddp in inside for p in self._parts(ddp).parameters}
        ranks = {_ranks(ddp.process_group) for ddp in inside}
        whole = all(id(p) in wrapped for p in parts.parameters if p.requires_grad)
        return ranks.pop() if len(ranks) == 1 and whole else ()

    def _of_ddp(self, declared: Dict[int, Piece]) -> None:
        for ddp in self._known.owners():
            group = ddp.process_group
            how = LOCAL if ddp in self._unreduced or getattr(ddp, "_comm_hooks", None) else REDUCED
            piece = Piece("", how, _ranks(group), group)
            for name, parameter in self._parts(ddp.module).named_parameters:
                if name not in ddp.parameters_to_ignore and not distributed(parameter):
                    declared.setdefault(id(parameter), piece)

    def _of_megatron(self, declared: Dict[int, Piece]) -> None:
        """Each rank computes the update of a duplicate itself."""
        models = [root for _, one in self._recorder.roots for root in [one()] if root is not None]
        found, group = megatron.of_models(models)
        for parameter, sharded in found:
            part = f"tensor part {group.rank()} of {group.size()}" if sharded else ""
            piece = Piece(part, PART if sharded else PLACED, _ranks(group), None)
            declared.setdefault(id(parameter), piece)

    def _of_fsdp1(self, declared: Dict[int, Piece]) -> None:
        for state, handle in self._recorder.fsdp1_handles():
            own = handle.process_group
            strategy = getattr(getattr(handle, "_sharding_strategy", None), "name", "")
            between = getattr(state, "_inter_node_pg", None)
            part, how, group = f"shard {own.rank()} of {own.size()}", PART, own
            # HYBRID_SHARD. Over shard groups of one rank FSDP takes NO_SHARD instead, and reduces
            # within this group only.
            if between is not None and between.size() > 1:
                how, group = REDUCED, between
            elif strategy == "NO_SHARD":
                part, how = "", REDUCED
            unreduced = handle in self._unreduced or getattr(state, "_comm_hook", None) is not None
            how = LOCAL if how == REDUCED and unreduced else how
            piece = Piece(part, how, _ranks(group), group)
            for parameter in flat_parameters(handle):
                declared.setdefault(id(parameter), piece)

    def _over_which_fsdp2_reduces(self) -> Dict[int, Tuple[Any, str]]:
        """Sharded parameter -> the process group of FSDP2's replicate dimension, and whether it
        reduces."""
        found = {}
        for group in self._recorder.fsdp2_groups():
            info = getattr(group, "mesh_info", None)
            over = getattr(info, "replicate_process_group", None)
            hook = getattr(group, "_all_reduce_hook", None)
            how = LOCAL if group in self._unreduced or hook is not None else REDUCED
            for parameter in getattr(group, "fsdp_params", ()) if over is not None else ():
                found[id(parameter.sharded_param)] = over, how
        return found


def _of_tensor(parameter: Any, over: Optional[Tuple[Any, str]]) -> Piece:
    axes = axes_of(parameter)
    found = same_part(parameter.device_mesh, axes) if axes else None
    if found is None:
        return Piece("", PLAIN, (), None)
    part, ranks = found
    if over is not None:
        group, how = over
        return Piece(part, how, _ranks(group), group)
    if any(axis.placed.is_replicate() for axis in axes):
        return Piece(part, PLACED, ranks, None)
    every = parameter.device_mesh.mesh
    return Piece(part, PART, tuple(sorted(every.flatten().tolist())), None)


def is_engine(root: Any) -> bool:
    return type(root).__name__ == "DeepSpeedEngine"


def unreduced(group: Any) -> bool:
    """Whether a group of FSDP2 keeps gradients of a backward that it did not reduce."""
    return any(
        one.unsharded_accumulated_grad is not None
        or getattr(getattr(one, "_unsharded_param", None), "grad", None) is not None
        for one in getattr(group, "fsdp_params", ())
    )


def _ranks(group: Any) -> Tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
