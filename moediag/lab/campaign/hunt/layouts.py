"""Relations between several ranks and one process: the ways to load, shard and train a model.

Each way is a trial like those of a scenario. Its detectors decide: the bytes of every parameter and
buffer after loading and after sharding, the losses, norms and gradients of each step, replicas, and
how the ranks ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import astuple, field
from typing import Any

from moediag.axes import DP_REPLICATE, DP_SHARD, EP, TP
from moediag.protocol import (
    SIZES,
    VOCAB,
    GenerateTask,
    ModelSpec,
    SaveTask,
    Size,
    SkewSpec,
    StepSpec,
    StepTask,
    Task,
    TrainerTask,
    Trial,
    WrapperSpec,
)
from moediag.protocol.specs import FIRST_CALLS
from moediag.records import dataclass

RANKS = 2
SCENARIO = "hunt"
# The model's own loss, with its auxiliary part as large as the cross entropy.
_AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 1.0}


@dataclass(frozen=True, slots=True)
class LaunchedWay:
    """One way to run the model on several ranks."""

    name: str
    wrapper: WrapperSpec
    layout: Mapping[str, int]
    batches: str = "distinct"
    """See SkewSpec."""
    task: Task = field(default_factory=StepTask)
    accumulate: int = 1
    source: str = "checkpoint"
    """See ModelSpec."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """See ModelSpec."""
    clip: bool = True
    world: int = RANKS
    experts: str | None = None
    """Implementation of the experts; None: the release's default."""

    def trial(self, family: str, seed: int, size: Size, timeout: float) -> Trial:
        """Returns the trial; its name says all but the family."""
        model = ModelSpec(
            family=family, by_rules=True, hidden=size.hidden, heads=size.heads,
            kv_heads=size.kv_heads, head_dim=size.head_dim, experts=size.experts,
            top_k=size.top_k, intermediate=size.width, vocab=VOCAB,
            source=self.source, config=dict(self.config), experts_implementation=self.experts,
        )  # fmt: skip
        # SGD: AdamW turns the rounding of a gradient near zero into a full step.
        step = StepSpec(
            steps=2, batch=2, seq_len=16, accumulate=self.accumulate, optimizer="sgd", lr=0.05,
            clip=1.0 if self.clip else None, seed=seed,
        )  # fmt: skip
        return Trial(
            name=f"{self.name}-{seed}{_word(size)}", scenario=SCENARIO, variant=self.name,
            task=self.task, world_size=self.world, layout=dict(self.layout), model=model,
            wrapper=self.wrapper, step=step, skew=SkewSpec(batches=self.batches), timeout=timeout,
        )  # fmt: skip


def _word(size: Size) -> str:
    """Returns its place in SIZES, or its numbers."""
    return str(SIZES.index(size)) if size in SIZES else "-".join(map(str, astuple(size)))


@dataclass(frozen=True, slots=True)
class LaunchedRelation:
    """What must hold on several ranks."""

    name: str
    says: str
    ways: tuple[LaunchedWay, ...]
    alone: LaunchedWay
    """The control: one rank, which must agree with the single process."""
    route: LaunchedWay
    """The second route to gradients: torch's DDP on the same batches must agree too."""


def _accelerate(**options: Any) -> WrapperSpec:
    return WrapperSpec(kind="accelerate", **options)


_FROM_PRETRAINED = WrapperSpec(kind="transformers")
_SHARDED = WrapperSpec(kind="transformers", native_fsdp=True)
_NO_PLAN = WrapperSpec(
    kind="transformers", distributed_config={"tp_size": RANKS, "ep_size": RANKS, "tp_plan": {}}
)
_ON_SHARDS: Mapping[str, int] = {DP_SHARD: RANKS}


def _saved(name: str, wrapper: WrapperSpec, layout: Mapping[str, int]) -> LaunchedWay:
    return LaunchedWay(f"{name}-saved", wrapper, layout, "per-replica", SaveTask(), clip=False)


LAYOUTS = LaunchedRelation(
    "layouts",
    "a model loaded, saved and trained on two ranks has every byte, loss, norm and gradient of one "
    "process",
    (
        LaunchedWay("fully-shard", WrapperSpec(kind="fsdp2"), _ON_SHARDS),
        # All but the top-k experts get no token on a rank, and other ones on the other rank.
        LaunchedWay("fully-shard-one-token", WrapperSpec(kind="fsdp2"), _ON_SHARDS, "one-token"),
        LaunchedWay("accelerate", _accelerate(), _ON_SHARDS),
        LaunchedWay("accelerate-ram-efficient", _accelerate(cpu_ram_efficient_loading=True),
                    _ON_SHARDS),
        # The ignored experts are not reduced: the ranks share a batch.
        LaunchedWay("accelerate-ram-efficient-ignored-experts",
                    _accelerate(cpu_ram_efficient_loading=True, ignore_experts=True),
                    _ON_SHARDS, "identical", clip=False),
        LaunchedWay("fsdp-size", _SHARDED, _ON_SHARDS),
        # torch's clip_grad_norm_ takes no plain tensors beside DTensors.
        LaunchedWay("tp-size", _FROM_PRETRAINED, {TP: RANKS}, "per-replica", clip=False),
        LaunchedWay("ep-size", _FROM_PRETRAINED, {EP: RANKS}, "per-replica", clip=False),
        LaunchedWay("ep-size-batched-mm", _FROM_PRETRAINED, {EP: RANKS}, "per-replica", clip=False,
                    experts="batched_mm"),
        # As the release's own warning advises.
        LaunchedWay("ep-size-empty-tp-plan", _NO_PLAN, {EP: RANKS}, "per-replica", clip=False),
        LaunchedWay("fsdp-size-ep-size", _SHARDED, {EP: RANKS}, clip=False),
        LaunchedWay("accelerate-ep-size", _accelerate(), {EP: RANKS}, "per-replica", clip=False),
        _saved("accelerate", _accelerate(), _ON_SHARDS),
        _saved("fsdp-size", _SHARDED, _ON_SHARDS),
        _saved("tp-size", _FROM_PRETRAINED, {TP: RANKS}),
        _saved("ep-size", _FROM_PRETRAINED, {EP: RANKS}),
        _saved("fsdp-size-ep-size", _SHARDED, {EP: RANKS}),
    ),
    LaunchedWay("one-rank", WrapperSpec(kind="none"), {}, world=1),
    LaunchedWay("ddp", WrapperSpec(kind="ddp"), {DP_REPLICATE: RANKS}),
)  # fmt: skip


def _trained(
    name: str, kind: str = "trainer", auxiliary: bool = True, before: str = "nothing", **more: Any
) -> LaunchedWay:
    values: dict[str, Any] = {"layout": {DP_REPLICATE: RANKS}, "batches": "repeated"}
    task = TrainerTask() if kind == "trainer" else StepTask()
    wrapper = WrapperSpec(kind=kind, fsdp_plugin=False, before_train=before)
    config = _AUXILIARY if auxiliary else {}
    values.update(task=task, source="config", config=config)
    values.update(more)
    return LaunchedWay(name, wrapper, **values)


TRAINER = LaunchedRelation(
    "trainer",
    "transformers' Trainer gives the gradients of one batch, with and without the auxiliary loss, "
    "if ranks or micro-batches repeat that batch",
    (
        _trained("data-parallel"),
        _trained("accumulation", layout={}, world=1, accumulate=2),
        _trained("data-parallel-cross-entropy", auxiliary=False),
        _trained("accumulation-cross-entropy", auxiliary=False, layout={}, world=1, accumulate=2),
    ),
    _trained("one-rank", layout={}, world=1),
    _trained("ddp", "ddp"),
)


def _after(*calls: str) -> LaunchedWay:
    before = " then ".join(calls)
    name = before.replace(" ", "-")
    return _trained(name, auxiliary=False, before=before, batches="distinct")


# Two calls in each order, of those that give the model to the library.
_TWICE = ("evaluate", "predict", "save", "prepare-for-evaluation")

BEFORE_TRAINING = LaunchedRelation(
    "before-training",
    "training after anything else is the same training: what a script does with Trainer and its "
    "Accelerator before train() changes no gradient",
    (*map(_after, FIRST_CALLS), *(_after(*two) for two in itertools.permutations(_TWICE, 2))),
    _trained("one-rank", auxiliary=False, layout={}, world=1),
    _trained("ddp", "ddp", auxiliary=False, batches="distinct"),
)


def _generates(name: str, wrapper: WrapperSpec, synced: bool = False, **more: Any) -> LaunchedWay:
    return LaunchedWay(name, wrapper, task=GenerateTask(synced), **more)


GENERATE = LaunchedRelation(
    "generate",
    "generate ends on ranks whose prompts end after different numbers of tokens, with the tokens "
    "and logits of one process",
    (
        # transformers passes synced_gpus by itself only to models that it sharded.
        _generates("fully-shard", WrapperSpec(kind="fsdp2"), synced=True, layout=_ON_SHARDS),
        _generates("fsdp-size", _SHARDED, layout=_ON_SHARDS),
        _generates("tp-size", _FROM_PRETRAINED, layout={TP: RANKS}, batches="per-replica"),
        _generates("ep-size", _FROM_PRETRAINED, layout={EP: RANKS}, batches="per-replica"),
        _generates("fsdp-size-ep-size", _SHARDED, layout={EP: RANKS}),
    ),
    _generates("one-rank", WrapperSpec(kind="none"), layout={}, world=1),
    _generates("ddp", WrapperSpec(kind="ddp"), layout={DP_REPLICATE: RANKS}),
)

RELATIONS = {relation.name: relation for relation in (LAYOUTS, TRAINER, BEFORE_TRAINING, GENERATE)}
