"""What an exported file needs from a planned trial, and what it cannot express. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from moediag.axes import DP_SHARD, EP, Layout
from moediag.lab.families import FAMILIES
from moediag.lab.scenario.plan import PlannedTrial
from moediag.protocol import ProgramTask, StepSpec, StepTask, TrainerTask, Trial
from moediag.records import dataclass

FIXES = ("set-reduce-scatter-unused-params", "touch")
# Fields of the step that a file writes out; the others must have their defaults.
_WRITTEN = ("steps", "batch", "seq_len", "accumulate", "accumulate_sync", "checkpointing", "clip",
            "optimizer", "foreach", "lr", "seed")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """What the template writes."""

    trial: Trial
    module: str
    config_class: str
    model_class: str
    # Arguments of config_class, the family's.
    config: dict[str, Any]
    # Arguments of DistributedConfig; None without one.
    asked: dict[str, Any] | None
    # What from_pretrained calls the dtype.
    dtype_argument: str
    # Rank -> the rank whose data it gets.
    replicas: tuple[int, ...]
    # The mesh axis that fully_shard shards over.
    sharded_axis: str
    # Ranks that share the experts of a layer.
    expert_parallel: int


def facts(planned: PlannedTrial, transformers: str) -> Facts:
    """``transformers``: the release that the file is written for."""
    trial = planned.trial
    family = FAMILIES[trial.model.family]
    version = Version(transformers)
    layout = Layout.resolve(trial.layout, trial.world_size)
    return Facts(
        trial=trial,
        module=f"transformers.models.{family.module}",
        config_class=family.config,
        model_class=family.model,
        config={**family.build(trial.model), **trial.model.config},
        asked=asked(trial, version),
        dtype_argument="dtype" if version >= Version("4.56") else "torch_dtype",
        replicas=tuple(
            layout.batch_source(rank, trial.skew.batches) for rank in range(trial.world_size)
        ),
        sharded_axis=str(DP_SHARD),
        expert_parallel=layout.size(EP),
    )


def asked(trial: Trial, version: Version) -> dict[str, Any] | None:
    """Arguments that request the layout from transformers ``version``.

    As worker.load.spelling, but for a release that need not be installed; a test compares the two.
    """
    wrapper, ep = trial.wrapper, trial.layout.get(EP, 1)
    if wrapper.distributed_config is not None:
        return dict(wrapper.distributed_config)
    if ep == 1 and not wrapper.native_fsdp:
        return None
    if version >= Version("5.19"):
        if wrapper.native_fsdp:
            return {"fsdp_size": trial.world_size, "ep_size": ep}
        sizes = {"tp_size": ep, "ep_size": ep}
        return sizes if version >= Version("5.23") else {**sizes, "tp_plan": {}}
    if version >= Version("5.13"):
        shards = {"fsdp_size": trial.world_size // ep} if wrapper.native_fsdp else {}
        return {**shards, "tp_size": ep, "enable_expert_parallel": True} if ep > 1 else shards
    return {"enable_expert_parallel": True}


def refused(trial: Trial, version: Version) -> Iterator[str]:
    """Why the ranks would report not-applicable on that release, as worker.load.spelling does."""
    wrapper, ep = trial.wrapper, trial.layout.get(EP, 1)
    if trial.model.source != "checkpoint" or wrapper.distributed_config is not None:
        return
    shards = trial.world_size // ep
    alone = ep > 1 or wrapper.kind == "transformers"
    if not wrapper.native_fsdp and shards > 1 and alone:
        yield f"wrapper.kind {wrapper.kind} where the layout leaves {shards} ranks for each expert"
    if wrapper.native_fsdp and version >= Version("5.19"):
        return
    if wrapper.native_fsdp and version < Version("5.13"):
        yield f"wrapper.native_fsdp on transformers {version}"
    elif ep > 1 and trial.skew.batches not in ("identical", "per-replica"):
        yield f"skew.batches {trial.skew.batches} with expert parallelism on transformers {version}"


def unsupported(planned: PlannedTrial) -> Iterator[str]:
    """What a file cannot express of the trial, by the scenario's field names."""
    trial = planned.trial
    wrapper, step = trial.wrapper, trial.step
    if isinstance(trial.task, ProgramTask):
        yield f"program {trial.task.name}"
    elif not isinstance(trial.task, (StepTask, TrainerTask)):
        yield trial.task.kind
    checkpoint = trial.model.source == "checkpoint"
    kinds = ("fsdp2", "accelerate", "transformers") if checkpoint else ("fsdp2", "ddp")
    if not isinstance(trial.task, ProgramTask) and wrapper.kind not in kinds:
        yield f"wrapper.kind {wrapper.kind}"
    if wrapper.ignore_experts:
        yield "wrapper.ignore_experts"
    if wrapper.hide_tp_size:
        yield "wrapper.hide_tp_size"
    if wrapper.before_train != "nothing":
        yield f"wrapper.before_train {wrapper.before_train}"
    if wrapper.param_dtype is not None:
        yield f"wrapper.param_dtype {wrapper.param_dtype}"
    if trial.skew.routing is not None:
        yield f"skew.routing {trial.skew.routing}"
    if trial.model.experts_implementation == "triton":
        yield "model.experts_implementation triton (moediag's own)"
    if trial.fix is not None and trial.fix not in FIXES:
        yield f"fix {trial.fix} (of the fixes: {', '.join(FIXES)})"
    allowed = {DP_SHARD, EP} if checkpoint else {DP_SHARD}
    axes = [axis for axis in Layout(trial.layout).active if axis not in allowed]
    if axes:
        yield f"layout axis {', '.join(axes)}"
    if trial.model.pretrain:
        yield "model.pretrain"
    if "text_config" in FAMILIES[trial.model.family].build(trial.model):
        yield f"model.family {trial.model.family} (multimodal)"
    plain = StepSpec()
    for field in dataclasses.fields(StepSpec):
        value = getattr(step, field.name)
        if field.name not in _WRITTEN and value != getattr(plain, field.name):
            yield f"step.{field.name} {value}"
