"""Shards a model on a simulated process group, by the code of the release or by fully_shard."""

from __future__ import annotations

from typing import Any, Dict

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moediag.axes import CP, DP_REPLICATE, DP_SHARD, EP, ETP, PP, TP, Layout
from moediag.lab.check.configured import Configured, anatomy
from moediag.lab.step.models import checkpoint
from moediag.lab.step.shard.data_parallel import FSDP2, over
from moediag.lab.step.shard.expert_parallel import Transformers
from moediag.lab.step.shard.wrapped import Wrapped, mesh_of
from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable

NATIVE = "transformers"
_INSTEAD = "; --wrapper fsdp2 shards over it by torch"
_FROM = (5, 16)  # earlier releases divide the experts while they load them


def arguments(layout: Layout, ranks: int) -> Dict[str, Any]:
    """Returns the arguments of DistributedConfig. ``ranks``: fewer than the layout's if those of
    tensor parallelism lie inside expert parallelism. Raises NotApplicable for a layout that it
    cannot express."""
    unknown = [str(axis) for axis in (CP, ETP) if axis in layout.active]
    if unknown:
        raise NotApplicable(
            f"DistributedConfig of transformers {checkpoint.version()} has no mesh axis "
            f"{' and no '.join(unknown)}{_INSTEAD if layout.active == (DP_SHARD, CP) else ''}"
        )
    tp, ep = layout.size(TP), layout.size(EP)
    known = checkpoint.distributed_fields()
    pp, replicas = layout.size(PP), layout.size(DP_REPLICATE)
    # Ranks of an ep axis have batches of their own: they belong to data parallelism.
    asked: Dict[str, Any] = {
        "pp_size": pp, "dp_replicate_size": replicas, "tp_size": tp, "ep_size": ep,
        "fsdp_size": ranks // (pp * replicas * tp),
    }  # fmt: skip
    if ep > 1 and "ep_size" not in known:
        if tp > 1:
            raise NotApplicable(
                f"transformers {checkpoint.version()} divides experts over tp_size: it cannot cut "
                "the other weights too"
            )
        del asked["ep_size"]
        asked.update(tp_size=ep, fsdp_size=layout.size(DP_SHARD), enable_expert_parallel=True)
    return {name: value for name, value in asked.items() if value is True or value > 1}


def words(trial: Trial) -> str:
    if trial.wrapper.kind == NATIVE:
        asked = arguments(Layout(trial.layout), trial.world_size)
        return f"from_pretrained with {checkpoint.words(asked)}"
    return "fully_shard of torch on each module of _no_split_modules and on the root"


def wrapped(configured: Configured, model: nn.Module, trial: Trial) -> Wrapped:
    """Returns ``model`` sharded for the trial's layout, on meta or with weights. Raises
    NotApplicable, and what the release or torch raises."""
    layout = Layout(trial.layout)
    if trial.wrapper.kind == NATIVE:
        model = _by_release(configured, model, arguments(layout, trial.world_size))
        return Transformers(model, anatomy(model, configured.experts), trial)
    if CP in layout.active:
        return _OverContext(model, anatomy(model, configured.experts), trial)
    if DP_REPLICATE in layout.active and DP_SHARD not in layout.active:
        raise NotApplicable(
            f"{DP_REPLICATE} without {DP_SHARD} is plain data parallelism, which shards nothing"
        )
    return FSDP2(model, anatomy(model, configured.experts), trial)


class _OverContext(FSDP2):
    """Ranks of cp hold pieces as those of dp_shard do. How they attend does not change the plan."""

    def mesh(self) -> DeviceMesh:
        return over(mesh_of(self.trial, CP), DP_SHARD, CP)


def _by_release(configured: Configured, model: Any, asked: Dict[str, Any]) -> nn.Module:
    class_ = configured.model
    major, minor = (int(part) for part in checkpoint.version().split(".")[:2])
    if (major, minor) < _FROM or not hasattr(class_, "maybe_distribute_model"):
        raise NotApplicable(
            f"transformers {checkpoint.version()} divides tensors while it loads them, so that "
            f"nothing shows the plan without weights; 5.16 is the first that can be checked"
        )
    config, _, mesh = class_.prepare_distribute_model(checkpoint.distributed_config(asked))
    made: Any = class_.maybe_distribute_model(model, config, mesh)
    made.tie_weights(recompute_mapping=False)  # as the release does after loading
    return made
