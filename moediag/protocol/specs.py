"""The parts of a trial: model, sharding, step, skew, recorder. Field names equal those of the
scenario YAML (a test keeps them equal)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional

from moediag.protocol.files import GUARD_TIMEOUT


@dataclass(frozen=True)
class ModelSpec:
    """A tiny model built from a configuration; no weights are downloaded."""

    family: str = "qwen3_moe"
    # Built by rules on the names of its configuration's fields, as in a hunt: `family` is then any
    # model type of the release, and `layers` one of each kind that the family has.
    by_rules: bool = False
    layers: int = 2
    hidden: int = 32
    intermediate: int = 16  # width of one expert
    experts: int = 8
    top_k: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    vocab: int = 128
    dtype: str = "float32"  # float32 | bfloat16: dtype of the parameters
    config: Dict[str, Any] = field(default_factory=dict)  # passed to the config class as is
    # config: every rank builds the model. checkpoint: the reference run saves it once, and every
    # rank loads it by the library's own from_pretrained.
    source: str = "config"
    pretrain: int = 0  # steps on the trial's own batches before the checkpoint is saved
    experts_implementation: Optional[str] = None  # eager | batched_mm | grouped_mm | triton


@dataclass(frozen=True)
class Size:
    """The size of a model that is built by rules."""

    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    experts: int = 4
    top_k: int = 2
    width: int = 24  # of a feed-forward layer


VOCAB = 64  # of such a model
# They differ in every dimension but that of a head. Even, so that two ranks can divide each.
SIZES = (Size(), Size(hidden=64, heads=8, kv_heads=4, experts=6, top_k=3, width=40))


@dataclass(frozen=True)
class WrapperSpec:
    """How parameters are sharded.

    With an ``ep`` axis in the layout the model comes out of ``from_pretrained(distributed_config=
    …)``; ``kind`` says what shards the rest.
    """

    # fsdp2 | fsdp1 | ddp | zero2 | zero3: torch's or DeepSpeed's own. With an ep axis fsdp2 is
    # torch's fully_shard with the experts left out. transformers: from_pretrained alone.
    # accelerate: its prepare(). trainer | trl: a Trainer or SFTTrainer, which also runs the steps.
    # by-hand: fully_shard, with ep, etp and tp by hand on a model that every rank builds whole.
    kind: str = "fsdp2"
    granularity: str = "layer"  # fsdp2/fsdp1: layer | expert | root
    # fsdp2; null: torch chooses, which frees the parameters of all but the root.
    reshard_after_forward: Optional[bool] = True
    reduce_dtype: Optional[str] = None  # float32 | bfloat16 | null: same as the parameters
    param_dtype: Optional[str] = None  # fsdp2: dtype of the computation; null: the parameters'
    find_unused_parameters: bool = True  # ddp
    schedule: str = "1f1b"  # of a pp axis: gpipe | 1f1b | interleaved
    rotate: str = "allgather"  # of a cp axis, how keys and values travel: allgather | alltoall
    # Arguments of transformers' DistributedConfig; null: how this release is asked for the layout.
    distributed_config: Optional[Dict[str, Any]] = None
    native_fsdp: bool = False  # kind transformers: DistributedConfig asks for FSDP2 too
    cpu_ram_efficient_loading: bool = False  # of accelerate's FSDP plugin
    ignore_experts: bool = False  # accelerate's FSDP plugin leaves the experts alone
    fsdp_plugin: bool = True  # trainer/trl: ask for FSDP2
    # trainer/trl: the loaded model does not say how many ranks its experts are divided over.
    hide_tp_size: bool = False


@dataclass(frozen=True)
class StepSpec:
    """The training step: forward, backward, clip, optimizer."""

    steps: int = 2
    batch: int = 1  # sequences per rank and micro-batch
    seq_len: int = 64
    accumulate: int = 1  # micro-batches per step
    accumulate_sync: bool = True  # False: FSDP2 set_requires_gradient_sync / no_sync
    checkpointing: str = "none"  # none | reentrant | non-reentrant
    clip: Optional[float] = 1.0  # max gradient norm; null: no clipping
    # torch | accelerate | local | per-mesh: which norm, see moediag.lab.step.shard.clipping
    clipping: str = "torch"
    optimizer: str = "adamw"  # adamw | sgd
    foreach: Optional[bool] = None  # the optimizer's implementation; null: torch chooses
    fused: Optional[bool] = None
    parameter_groups: str = "one"  # one | per-mesh: plain tensors and each mesh's DTensors apart
    lr: float = 1e-3
    seed: int = 0
    fill_uninitialized: bool = False  # uninitialized memory holds nan


@dataclass(frozen=True)
class Starve:
    """On ``rank`` (null: every rank) no token goes to ``expert`` of ``layer`` (null: every
    layer), from training step ``from_step`` (1-based) on."""

    expert: int
    rank: Optional[int] = None
    layer: Optional[int] = None
    from_step: int = 1


@dataclass(frozen=True)
class SkewSpec:
    """How routing is bent per rank."""

    starve: List[Starve] = field(default_factory=list)  # through the router
    # distinct | identical | per-replica (ranks that work on one copy of the model share one) |
    # one-token (rank r: one repeated token) | repeated (rank 0's on all ranks, and the first one in
    # all micro-batches; not in scenarios)
    batches: str = "distinct"
    # balanced | zero-token | one-hot: which experts each token goes to, see
    # moediag.lab.step.models.skew; null: the router decides
    routing: Optional[str] = None


@dataclass(frozen=True)
class RecorderSpec:
    """What the recorder does in each rank besides recording."""

    guard: bool = False  # compare what ranks bring to each FSDP2 reduction before it begins
    guard_timeout: float = GUARD_TIMEOUT  # see ENV_GUARD_TIMEOUT
