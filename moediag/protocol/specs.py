"""The parts of a trial: model, sharding, step, skew, recorder. A scenario file has sections of the
same fields, which are made from these (`lab/scenario/sections.py`)."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any, Dict, List, Optional

from moediag.protocol.files import GUARD_TIMEOUT

# What a script may do with a Trainer and its Accelerator before it trains.
FIRST_CALLS = (
    "evaluate", "predict", "save", "read-batches", "create-optimizer", "prepare-for-evaluation",
    "unwrap", "free-memory",
)  # fmt: skip
_CALL = f"({'|'.join(FIRST_CALLS)})"


def option(default: Any, **limits: Any) -> Any:
    """A field with limits in scenario files. ``default``: a class makes it. ``limits``:
    ``choices`` of a text, and pydantic's limits of a number. What editors show is the text below
    the field, unless a ``description`` is given."""
    made = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return field(**made, metadata=limits)


@dataclass(frozen=True)
class ModelSpec:
    """A tiny model built from a configuration; no weights are downloaded."""

    family: str = "qwen3_moe"
    """Model family of transformers."""
    # In a hunt, `family` is any model type of the release, and `layers` one of each kind it has.
    by_rules: bool = False
    """Build the configuration by rules on its field names, as `moediag hunt` does, instead of the
    family's recipe."""
    layers: int = option(2, ge=1)
    """Decoder layers."""
    hidden: int = option(32, ge=1)
    """Width of the residual stream."""
    intermediate: int = option(16, ge=1)
    """Width of one expert's hidden layer."""
    experts: int = option(8, ge=2)
    """Routed experts per MoE layer."""
    top_k: int = option(2, ge=1)
    """Experts per token."""
    heads: int = option(4, ge=1)
    """Attention heads; a multiple of kv_heads."""
    kv_heads: int = option(2, ge=1)
    """Key/value heads."""
    head_dim: int = option(8, ge=2, multiple_of=2)
    """Width of one head; even, because RoPE rotates pairs."""
    vocab: int = option(128, ge=32)
    """Vocabulary size."""
    dtype: str = option("float32", choices=("float32", "bfloat16"))
    """Dtype of the parameters; the reference always runs in float32."""
    config: Dict[str, Any] = option(dict)
    """More arguments of the family's configuration class, passed unchanged."""
    source: str = option("config", choices=("config", "checkpoint"))
    """config: every rank builds the model; checkpoint: it is saved once, and every rank loads it
    with the library's from_pretrained."""
    pretrain: int = option(0, ge=0)
    """Training steps on the scenario's own batches before the checkpoint is saved, so that the loss
    is low and later errors show in it."""
    experts_implementation: Optional[str] = option(
        None, choices=("eager", "batched_mm", "grouped_mm", "triton")
    )
    """transformers' experts_implementation; triton is moediag's own kernel. null: the release's
    default."""


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
    """How parameters are sharded."""

    kind: str = option(
        "fsdp2",
        choices=(
            "fsdp2",
            "fsdp1",
            "ddp",
            "zero2",
            "zero3",
            "transformers",
            "accelerate",
            "trainer",
            "trl",
            "by-hand",
        ),
    )
    """How the model is sharded. fsdp2: torch's fully_shard; zero2, zero3: DeepSpeed; transformers:
    from_pretrained alone; accelerate: its prepare with FSDP2. With an ep axis in the layout,
    from_pretrained divides the experts for fsdp2, transformers and accelerate; with a tp axis it
    divides the model, for transformers only. trainer and trl: a Trainer or SFTTrainer runs the
    steps itself. by-hand: fully_shard, with experts divided over ep and cut over etp by hand, and
    attention cut over tp by torch; alone or beside pp or cp."""
    granularity: str = option("layer", choices=("layer", "expert", "root"))
    """FSDP groups: per decoder layer; expert: also one per expert; root: only one."""
    # None, not in scenarios: torch chooses, which frees the parameters of all but the root.
    reshard_after_forward: Optional[bool] = True
    """Free the gathered parameters after forward (FSDP)."""
    reduce_dtype: Optional[str] = option(None, choices=("float32", "bfloat16"))
    """Dtype of the reduction of gradients; null: as parameters."""
    param_dtype: Optional[str] = option(None, choices=("float32", "bfloat16"))
    """Kind fsdp2: dtype of forward and backward; parameters and optimizer keep theirs. Experts
    outside FSDP2 are cast in each forward. null: that of the parameters."""
    find_unused_parameters: bool = True
    """DDP's find_unused_parameters."""
    schedule: str = option("1f1b", choices=("gpipe", "1f1b", "interleaved"))
    """Schedule of a pp axis; interleaved has two stages per rank."""
    rotate: str = option("allgather", choices=("allgather", "alltoall"))
    """How keys and values reach the other ranks of a cp axis."""
    distributed_config: Optional[Dict[str, Any]] = None
    """Arguments of transformers' DistributedConfig; the name of a mesh axis or "world" stands for
    its size. null: chosen for the installed release and the layout."""
    native_fsdp: bool = False
    """Kinds transformers, trainer and trl: from_pretrained also shards with FSDP2."""
    cpu_ram_efficient_loading: bool = False
    """Kinds accelerate, trainer and trl: rank 0 loads and broadcasts."""
    ignore_experts: bool = False
    """Kind accelerate: pass the experts as ignored_modules."""
    fsdp_plugin: bool = True
    """Kinds trainer and trl: request FSDP2. No effect with native_fsdp."""
    hide_tp_size: bool = False
    """Kinds trainer and trl: hide the number of ranks over which the experts are divided, so that
    the loaded model is prepared like any other."""
    before_train: str = option(
        "nothing",
        description="Kinds trainer and trl: what the script does with the Trainer before train(): "
        f"nothing, {', '.join(FIRST_CALLS)}, two of these (`save then evaluate`), or "
        "evaluate-unmarked: evaluate, then take back accelerate's mark on the model.",
        pattern=f"^(nothing|evaluate-unmarked|{_CALL}( then {_CALL})?)$",
    )


@dataclass(frozen=True)
class StepSpec:
    """The training step: forward, backward, clip, optimizer."""

    steps: int = option(2, ge=1)
    """Training steps."""
    batch: int = option(1, ge=1)
    """Sequences per rank and micro-batch."""
    seq_len: int = option(64, ge=1)
    """Tokens per sequence."""
    accumulate: int = option(1, ge=1)
    """Micro-batches per step."""
    accumulate_sync: bool = True
    """false: gradients are reduced in the last micro-batch only (no_sync)."""
    checkpointing: str = option("none", choices=("none", "reentrant", "non-reentrant"))
    """Activation checkpointing of each decoder layer."""
    clip: Optional[float] = option(1.0, gt=0)
    """Maximum gradient norm; null: no clipping."""
    clipping: str = option("torch", choices=("torch", "accelerate", "local", "per-mesh"))
    """The gradient norm: torch's or accelerate's clip_grad_norm_; local: the norm of each rank's
    local tensors; per-mesh: squared norms summed over the axes that shard them."""
    optimizer: str = option("adamw", choices=("adamw", "sgd"))
    """The optimizer."""
    foreach: Optional[bool] = None
    """The optimizer's foreach; null: torch chooses by the device."""
    fused: Optional[bool] = None
    """The optimizer's fused; null: not passed."""
    parameter_groups: str = option("one", choices=("one", "per-mesh"))
    """per-mesh: separate groups for plain tensors and for each mesh's DTensors."""
    lr: float = option(1e-3, gt=0)
    """Learning rate."""
    seed: int = option(0, ge=0)
    """Seed of weights and batches."""
    fill_uninitialized: bool = False
    """Fill memory that torch allocates with nan, so that every read of unwritten memory shows."""


@dataclass(frozen=True)
class Starve:
    """An expert that gets no token from one training step on, on one rank or on all."""

    expert: int = option(MISSING, ge=0)
    """The expert, counted from 0."""
    rank: Optional[int] = None
    """The rank; null: every rank."""
    layer: Optional[int] = option(None, ge=0)
    """The decoder layer; null: every layer."""
    from_step: int = option(1, ge=1)
    """First step without tokens, counted from 1."""


@dataclass(frozen=True)
class SkewSpec:
    """How routing is skewed per rank."""

    starve: List[Starve] = option(list)
    """Through the router: experts that get no token."""
    # repeated, not in scenarios: rank 0's on all ranks, and the first one in all micro-batches.
    batches: str = option("distinct", choices=("distinct", "identical", "per-replica", "one-token"))
    """Through the data. distinct: each rank has its own batch; identical: all ranks have rank 0's;
    per-replica: ranks that work on one copy of the model share one; one-token: each rank repeats
    one token, a different one on each. Ranks that differ only in tp share a batch in any case."""
    routing: Optional[str] = option(None, choices=("balanced", "zero-token", "one-hot"))
    """Through the router, the same on all ranks: fixes the experts of each token, regardless of
    scores. balanced: all in turn; zero-token: every second expert in turn, none to the others;
    one-hot: all tokens to the first top_k experts. null: the router decides."""


@dataclass(frozen=True)
class RecorderSpec:
    """Extra tasks of the recorder in each rank."""

    guard: bool = False
    """Before each reduction of an FSDP2 group, ranks compare what they reduce; a difference raises
    one named error on all of them (MOEDIAG_GUARD=1)."""
    guard_timeout: float = option(GUARD_TIMEOUT, gt=0)
    """Seconds after which a rank that the guard waits for counts as absent."""
