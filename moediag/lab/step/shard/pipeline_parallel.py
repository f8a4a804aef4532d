"""Pipeline parallelism of the model under test: torch's schedules over stages of the same model,
each sharded by FSDP2 over the data-parallel axes of the layout."""

from __future__ import annotations

import copy
from typing import Any, Dict, Iterator, List, Optional, Tuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moediag.axes import PP
from moediag.lab.step.shard import clipping as clip
from moediag.lab.step.shard.data_parallel import FSDP2
from moediag.lab.step.shard.wrapped import ROUTER_LOGITS, mesh_of
from moediag.protocol import ResumeTask
from moediag.recorder.not_applicable import NotApplicable

# wrapper.schedule -> (class of torch.distributed.pipelining, stages per rank)
_SCHEDULES = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
}
Named = Tuple[str, nn.Module]


class Stages(nn.Module):
    """This rank's stages. Parameters have their names in the whole model."""

    def __init__(self, stages: List[nn.Module], held: List[Named]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._held = held

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Tuple[str, nn.Parameter]]:
        for fqn, module in self._held:
            yield from module.named_parameters(fqn)


class Stage(nn.Module):
    """A model with a part of its layers; only the first stage embeds tokens, only the last one
    returns logits."""

    def __init__(self, model: nn.Module, first: bool) -> None:
        super().__init__()
        self.module = model
        self.first = first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.int64, device=x.device)
        given = {"input_ids" if self.first else "inputs_embeds": x}
        out: torch.Tensor = self.module(**given, attention_mask=mask, use_cache=False).logits
        return out


class Pipelined(FSDP2):
    """``step.accumulate`` is the number of micro-batches."""

    def wrap(self, model: nn.Module) -> nn.Module:
        try:
            from torch.distributed import pipelining
            from torch.distributed.pipelining import PipelineStage
        except ImportError as error:
            raise NotApplicable("this torch has no torch.distributed.pipelining") from error
        self.whole_mesh = self.root()
        self.group = self.whole_mesh.get_group(str(PP))
        self.size, self.at = dist.get_world_size(self.group), dist.get_rank(self.group)
        schedule, each = _SCHEDULES[self.trial.wrapper.schedule]
        count = self.size * each
        micro = self.trial.step.accumulate
        if micro < self.size or micro % self.size:
            raise NotApplicable(
                f"step.accumulate is {micro}: a pipeline of {self.size} ranks needs a multiple of "
                "its ranks as micro-batches"
            )
        if isinstance(self.trial.task, ResumeTask):
            raise NotApplicable("the pipeline under test is not saved")
        if self.trial.step.checkpointing != "none" or self.trial.wrapper.granularity == "expert":
            raise NotApplicable("the pipeline under test has no checkpointing and no expert groups")
        made, held, stages = [], [], []
        for index in range(self.at, count, self.size):
            shell, named = self._cut(model, index, count)
            stage = Stage(shell, first=index == 0)
            if self.sharded_axes():
                layers = [layer for _, layer in self.anatomy.layers]
                self.shard(stage, [module for _, module in named if module in layers])
            held += named
            stages.append(stage)
            made.append(PipelineStage(stage, index, count, self.device, group=self.group))
        self.has_first, self.has_last = self.at == 0, self.at == self.size - 1
        class_: Any = getattr(pipelining, schedule)
        self.schedule = class_(
            made[0] if each == 1 else made, micro, loss_fn=self._loss, scale_grads=False
        )
        return Stages(stages, held)

    def root(self) -> DeviceMesh:
        """Returns the mesh of all ranks."""
        return mesh_of(self.trial, PP)

    def sharded_axes(self) -> Tuple[str, ...]:
        """Returns the mesh's data-parallel axes."""
        return tuple(name for name in self.whole_mesh.mesh_dim_names or () if name != PP)

    def mesh(self) -> DeviceMesh:
        return self.whole_mesh[self.sharded_axes()]

    def _cut(self, model: nn.Module, index: int, count: int) -> Tuple[nn.Module, List[Named]]:
        """Returns a copy of ``model`` that shares the modules of stage ``index`` and lacks those of
        the others, and the shared ones by name. Raises NotApplicable."""
        layers, whole = self.anatomy.layers, cast(Any, model)
        fqn_of = {id(module): name for name, module in model.named_modules()}
        embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
        base_fqn = layers[0][0].rpartition(".layers.")[0]
        base: Any = model.get_submodule(base_fqn)
        norm = getattr(base, "norm", None)
        ends = (embedding, norm, head)
        known = {id(p) for m in (*ends, *dict(layers).values()) if m for p in m.parameters()}
        kinds = set(getattr(whole.config, "layer_types", None) or ())
        if None in ends or len(kinds) > 1 or any(id(p) not in known for p in model.parameters()):
            raise NotApplicable(
                f"{type(model).__name__} is not embedding, equal layers, norm, head"
            )
        if embedding.weight is head.weight or self.trial.model.config.get(ROUTER_LOGITS):
            raise NotApplicable("tied embeddings and auxiliary losses span several stages")
        if len(layers) % count:
            raise NotApplicable(
                f"{len(layers)} layers cannot be divided evenly over {count} stages"
            )
        share = len(layers) // count
        own = [m for _, m in layers[index * share : (index + 1) * share]]
        memo: Dict[int, Any] = {id(m): m for m in (*ends, *dict(layers).values())}
        shell: Any = copy.deepcopy(model, memo)
        part: Any = shell.get_submodule(base_fqn)
        part.layers = nn.ModuleList(own)
        if index:
            shell.set_input_embeddings(nn.Identity())
        else:
            own = [embedding, *own]
        if index < count - 1:
            part.norm = nn.Identity()
            shell.set_output_embeddings(nn.Identity())
        else:
            own += [norm, head]
        return shell, [(fqn_of[id(module)], module) for module in own]

    def _loss(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Returns a micro-batch's share of the step's loss."""
        flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
        return F.cross_entropy(flat, tokens[:, 1:].reshape(-1)) / self.trial.step.accumulate

    def forward_backward(self, batches: List[torch.Tensor]) -> float:
        tokens = torch.cat(batches)
        losses: List[torch.Tensor] = []
        arguments = (tokens,) if self.has_first else ()
        ends = {"target": tokens, "losses": losses} if self.has_last else {}
        self.schedule.step(*arguments, **ends)
        total = torch.zeros((), device=self.device)
        if self.has_last:
            total += torch.stack([loss.detach() for loss in losses]).sum()
        last = dist.get_global_rank(self.group, self.size - 1)
        dist.broadcast(total, last, group=self.group)
        return float(total)

    def clip(self, limit: float) -> Optional[float]:
        """Clips as torchtitan does: by the norm of each stage, squared and summed over stages."""
        how = self.trial.step.clipping
        if how not in ("torch", "per-mesh"):
            raise NotApplicable(f"a pipeline is not clipped by clipping: {how}")
        gradients = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        norm: Any
        if how == "torch":
            norm = nn.utils.get_total_norm(list(gradients.values()))
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        else:
            norm = torch.tensor(clip.per_mesh_norm(gradients, self.plain_shards))
        square = norm.to(self.device) ** 2
        dist.all_reduce(square, group=self.group)
        total = float(square.sqrt())
        clip.scale(list(gradients.values()), limit, total)
        return total
