"""Expert and tensor parallelism by hand on a model that every rank built whole, with FSDP2, alone
or beside torch's pipeline or context parallelism.

Experts are divided over ep, and each one's matrices are cut over etp. torch's parallelize_module
cuts the attention over tp. FSDP2 shards experts over the ranks that hold the same part of them, and
the rest over the ranks that hold the same part of the attention.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moediag.axes import AXES, CP, DP_REPLICATE, DP_SHARD, EP, ETP, PP, TP, Axis, Layout
from moediag.lab.step.shard import dispatch, fsdp2_internals, sums
from moediag.lab.step.shard.context_parallel import ContextParallel
from moediag.lab.step.shard.data_parallel import FSDP2, over
from moediag.lab.step.shard.pipeline_parallel import Pipelined
from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable

KIND = "by-hand"  # wrapper.kind
_CUT = "{} cuts each expert's matrices by hand and sums their outputs"
_ATTENTION = (
    "{} cuts the attention by torch's parallelize_module; all other parameters are whole on it"
)


class ByHand(FSDP2):
    _root: Optional[DeviceMesh] = None

    def wrap(self, model: nn.Module) -> nn.Module:
        layout = Layout(self.trial.layout)
        self._divided = layout.size(EP) > 1 or layout.size(ETP) > 1
        if self._divided:
            self._divide_experts()
        if layout.size(TP) > 1:
            self._cut_attention()
        return super().wrap(model)

    def root(self) -> DeviceMesh:
        """Returns the mesh of all ranks; dp_shard is one of its axes whatever its size, and ep if
        experts are cut."""
        if self._root is None:
            layout = Layout(self.trial.layout)
            always = (DP_SHARD, EP) if layout.size(ETP) > 1 else (DP_SHARD,)
            used = [axis for axis in AXES if axis in (*layout.active, *always)]
            device = "cuda" if self.trial.on_gpu else "cpu"
            sizes, names = tuple(map(layout.size, used)), tuple(map(str, used))
            self._root = init_device_mesh(device, sizes, mesh_dim_names=names)
        return self._root

    def mesh(self) -> DeviceMesh:
        return over(self.root(), DP_SHARD, CP, EP, ETP)

    def apart(self, layers: Sequence[nn.Module]) -> List[Tuple[nn.Module, DeviceMesh]]:
        if not self._divided:
            return []
        mesh, here = over(self.root(), DP_SHARD, CP), {id(layer) for layer in layers}
        blocks = [b for b in self.anatomy.blocks if id(self.anatomy.layers[b.layer][1]) in here]
        return [(getattr(block.module, "experts"), mesh) for block in blocks]  # noqa: B009

    def _divide_experts(self) -> None:
        """Replaces experts' parameters by DTensors on ep, or on ep and etp."""
        from torch.distributed.tensor import DTensor, Shard

        root = self.root()
        ep, names = root.get_group(str(EP)), [str(EP)]
        around: dispatch.Around = dispatch.unchanged
        cut = None
        if str(ETP) in (root.mesh_dim_names or ()):
            cut = root.get_group(str(ETP))
            around = functools.partial(summed, cut)
            names.append(str(ETP))
        # A gradient is a sum over the tokens of an ep group, and each loss a mean of one rank's.
        share = 1 / dist.get_world_size(ep)
        dispatch.divide(self.anatomy, ep, "from-dispatched", around, share)
        for block in self.anatomy.blocks:
            experts: Any = getattr(block.module, "experts")  # noqa: B009
            held = {name: p.detach() for name, p in experts.named_parameters()}
            for name, (part, *along) in columns(held, cut).items():
                made = DTensor.from_local(part, root[tuple(names)], [Shard(0), *along])
                setattr(experts, name, nn.Parameter(made))
        self.notes.append(dispatch.NOTE.format(" and ".join(held)))
        if cut is not None:
            self.notes.append(_CUT.format(ETP))

    def _cut_attention(self) -> None:
        try:
            from torch.distributed.tensor.parallel import (
                ColwiseParallel,
                RowwiseParallel,
                SequenceParallel,
                parallelize_module,
            )
        except ImportError as error:
            raise NotApplicable("this torch has no tensor parallelism") from error
        mesh, model = self.root()[str(TP)], self.trial.model
        if model.heads % mesh.size() or model.kv_heads % mesh.size():
            raise NotApplicable(
                f"{model.heads} heads and {model.kv_heads} key/value heads cannot be divided over "
                f"{mesh.size()} ranks"
            )
        for fqn, layer in self.anatomy.layers:
            attention = getattr(layer, "self_attn", None)
            matrices = ("q_proj", "k_proj", "v_proj", "o_proj")
            if attention is None or any(not hasattr(attention, name) for name in matrices):
                raise NotApplicable(f"{fqn} has no attention with {', '.join(matrices)}")
            *inner, last = matrices
            plan: Dict[str, Any] = {name: ColwiseParallel() for name in inner}
            plan[last] = RowwiseParallel()
            # They normalise each head, (batch, tokens, heads, width), and each rank has some.
            for name in ("q_norm", "k_norm"):
                if hasattr(attention, name):
                    plan[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
            parallelize_module(attention, mesh, plan)
        self.notes.append(_ATTENTION.format(TP))


class _PipelinedByHand(ByHand, Pipelined):
    pass


class _ContextByHand(ByHand, ContextParallel):
    pass


_BESIDE: Dict[Axis, Type[ByHand]] = {PP: _PipelinedByHand, CP: _ContextByHand}
_KNOWN = (PP, DP_REPLICATE, DP_SHARD, CP, EP, ETP, TP)


def kind(trial: Trial) -> Type[ByHand]:
    """Returns the class for the trial's layout. Raises NotApplicable."""
    active = Layout(trial.layout).active
    beside = [axis for axis in active if axis in _BESIDE]
    foreign = [axis for axis in active if axis not in _KNOWN]
    if foreign or len(beside) > 1:
        raise NotApplicable(f"wrapper {KIND} has no mesh axis {' beside '.join(foreign or beside)}")
    if trial.model.source == "checkpoint":
        raise NotApplicable(f"wrapper {KIND} divides a model that every rank built whole")
    if fsdp2_internals.sums_for_means(trial.backend):
        raise NotApplicable("FSDP2 on gloo needs torch >= 2.9")
    return _BESIDE[beside[0]] if beside else ByHand


def columns(held: Dict[str, torch.Tensor], group: Optional[Any]) -> Dict[str, Tuple[Any, ...]]:
    """Returns by name each tensor's piece for this rank of ``group``, and its placement along it;
    None: the whole tensors. gate_up_proj (experts, gate and up, hidden) and down_proj (experts,
    hidden, width) are cut along the width. Raises NotApplicable."""
    if group is None:
        return {name: (tensor,) for name, tensor in held.items()}
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    size, at = dist.get_world_size(group), dist.get_rank(group)
    both, down = held.get("gate_up_proj"), held.get("down_proj")
    if both is None or down is None or len(held) > 2 or both.shape[1] != 2 * down.shape[2]:
        raise NotApplicable(f"experts with {', '.join(held)} cannot be cut by hand")
    if down.shape[2] % size:
        raise NotApplicable(f"a width of {down.shape[2]} cannot be divided over {size} ranks")
    halves = [half.chunk(size, dim=1)[at] for half in both.chunk(2, dim=1)]
    return {
        "gate_up_proj": (torch.cat(halves, dim=1), _StridedShard(1, split_factor=2)),
        "down_proj": (down.chunk(size, dim=2)[at].contiguous(), Shard(2)),
    }


def summed(group: Any, computed: dispatch.Computed) -> dispatch.Computed:
    """Returns ``computed`` with its outputs summed over ``group``, and the gradients of its rows
    too. Ranks of a group have the same rows."""

    def found(hidden: torch.Tensor, rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return sums.summed(computed(hidden, sums.copied(rows, group), own), group)

    return found
