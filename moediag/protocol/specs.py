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


def option(default: Any, description: str, **limits: Any) -> Any:
    """A field that scenario files have as well. ``default``: MISSING if the field is required; a
    class makes it. ``description``: what editors show. ``limits``: ``choices`` of a text, and
    pydantic's limits of a number."""
    made = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return field(**made, metadata={"description": description, **limits})


@dataclass(frozen=True)
class ModelSpec:
    """A tiny model built from a configuration; no weights are downloaded."""

    family: str = option("qwen3_moe", "Model family of transformers.")
    # In a hunt, `family` is any model type of the release, and `layers` one of each kind it has.
    by_rules: bool = option(
        False,
        "Build the configuration by rules on its field names, as `moediag hunt` does, "
        "instead of the family's recipe.",
    )
    layers: int = option(2, "Decoder layers.", ge=1)
    hidden: int = option(32, "Width of the residual stream.", ge=1)
    intermediate: int = option(16, "Width of one expert's hidden layer.", ge=1)
    experts: int = option(8, "Routed experts per MoE layer.", ge=2)
    top_k: int = option(2, "Experts per token.", ge=1)
    heads: int = option(4, "Attention heads; a multiple of kv_heads.", ge=1)
    kv_heads: int = option(2, "Key/value heads.", ge=1)
    head_dim: int = option(
        8,
        "Width of one head; even, because RoPE rotates pairs.",
        ge=2,
        multiple_of=2,
    )
    vocab: int = option(128, "Vocabulary size.", ge=32)
    dtype: str = option(
        "float32",
        "Dtype of the parameters; the reference always runs in float32.",
        choices=("float32", "bfloat16"),
    )
    config: Dict[str, Any] = option(
        dict,
        "More arguments of the family's configuration class, passed unchanged.",
    )
    source: str = option(
        "config",
        "config: every rank builds the model; checkpoint: it is saved once, and every "
        "rank loads it with the library's from_pretrained.",
        choices=("config", "checkpoint"),
    )
    pretrain: int = option(
        0,
        "Training steps on the scenario's own batches before the checkpoint is saved, "
        "so that the loss is low and later errors show in it.",
        ge=0,
    )
    experts_implementation: Optional[str] = option(
        None,
        "transformers' experts_implementation; triton is moediag's own kernel. null: "
        "the release's default.",
        choices=("eager", "batched_mm", "grouped_mm", "triton"),
    )


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
        "How the model is sharded. fsdp2: torch's fully_shard; zero2, zero3: DeepSpeed; "
        "transformers: from_pretrained alone; accelerate: its prepare with FSDP2. With "
        "an ep axis in the layout, from_pretrained divides the experts for fsdp2, "
        "transformers and accelerate; with a tp axis it divides the model, for "
        "transformers only. trainer and trl: a Trainer or SFTTrainer runs the steps "
        "itself. by-hand: fully_shard, with experts divided over ep and cut over etp by "
        "hand, and attention cut over tp by torch; alone or beside pp or cp.",
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
    granularity: str = option(
        "layer",
        "FSDP groups: per decoder layer; expert: also one per expert; root: only one.",
        choices=("layer", "expert", "root"),
    )
    # None, not in scenarios: torch chooses, which frees the parameters of all but the root.
    reshard_after_forward: Optional[bool] = option(
        True,
        "Free the gathered parameters after forward (FSDP).",
    )
    reduce_dtype: Optional[str] = option(
        None,
        "Dtype of the reduction of gradients; null: as parameters.",
        choices=("float32", "bfloat16"),
    )
    param_dtype: Optional[str] = option(
        None,
        "Kind fsdp2: dtype of forward and backward; parameters and optimizer keep "
        "theirs. Experts outside FSDP2 are cast in each forward. null: that of the "
        "parameters.",
        choices=("float32", "bfloat16"),
    )
    find_unused_parameters: bool = option(True, "DDP's find_unused_parameters.")
    schedule: str = option(
        "1f1b",
        "Schedule of a pp axis; interleaved has two stages per rank.",
        choices=("gpipe", "1f1b", "interleaved"),
    )
    rotate: str = option(
        "allgather",
        "How keys and values reach the other ranks of a cp axis.",
        choices=("allgather", "alltoall"),
    )
    distributed_config: Optional[Dict[str, Any]] = option(
        None,
        "Arguments of transformers' DistributedConfig; the name of a mesh axis or "
        '"world" stands for its size. null: chosen for the installed release and the '
        "layout.",
    )
    native_fsdp: bool = option(
        False,
        "Kinds transformers, trainer and trl: from_pretrained also shards with FSDP2.",
    )
    cpu_ram_efficient_loading: bool = option(
        False,
        "Kinds accelerate, trainer and trl: rank 0 loads and broadcasts.",
    )
    ignore_experts: bool = option(False, "Kind accelerate: pass the experts as ignored_modules.")
    fsdp_plugin: bool = option(
        True,
        "Kinds trainer and trl: request FSDP2. No effect with native_fsdp.",
    )
    hide_tp_size: bool = option(
        False,
        "Kinds trainer and trl: hide the number of ranks over which the experts are "
        "divided, so that the loaded model is prepared like any other.",
    )
    before_train: str = option(
        "nothing",
        "Kinds trainer and trl: what the script does with the Trainer before train(): nothing, "
        f"{', '.join(FIRST_CALLS)}, two of these (`save then evaluate`), or evaluate-unmarked: "
        "evaluate, then take back accelerate's mark on the model.",
        pattern=f"^(nothing|evaluate-unmarked|{_CALL}( then {_CALL})?)$",
    )


@dataclass(frozen=True)
class StepSpec:
    """The training step: forward, backward, clip, optimizer."""

    steps: int = option(2, "Training steps.", ge=1)
    batch: int = option(1, "Sequences per rank and micro-batch.", ge=1)
    seq_len: int = option(64, "Tokens per sequence.", ge=1)
    accumulate: int = option(1, "Micro-batches per step.", ge=1)
    accumulate_sync: bool = option(
        True,
        "false: gradients are reduced in the last micro-batch only (no_sync).",
    )
    checkpointing: str = option(
        "none",
        "Activation checkpointing of each decoder layer.",
        choices=("none", "reentrant", "non-reentrant"),
    )
    clip: Optional[float] = option(1.0, "Maximum gradient norm; null: no clipping.", gt=0)
    clipping: str = option(
        "torch",
        "The gradient norm: torch's or accelerate's clip_grad_norm_; local: the norm of "
        "each rank's local tensors; per-mesh: squared norms summed over the axes that "
        "shard them.",
        choices=("torch", "accelerate", "local", "per-mesh"),
    )
    optimizer: str = option("adamw", "The optimizer.", choices=("adamw", "sgd"))
    foreach: Optional[bool] = option(
        None,
        "The optimizer's foreach; null: torch chooses by the device.",
    )
    fused: Optional[bool] = option(None, "The optimizer's fused; null: not passed.")
    parameter_groups: str = option(
        "one",
        "per-mesh: separate groups for plain tensors and for each mesh's DTensors.",
        choices=("one", "per-mesh"),
    )
    lr: float = option(1e-3, "Learning rate.", gt=0)
    seed: int = option(0, "Seed of weights and batches.", ge=0)
    fill_uninitialized: bool = option(
        False,
        "Fill memory that torch allocates with nan, so that every read of unwritten memory shows.",
    )


@dataclass(frozen=True)
class Starve:
    """An expert that gets no token from one training step on, on one rank or on all."""

    expert: int = option(MISSING, "The expert, counted from 0.", ge=0)
    rank: Optional[int] = option(None, "The rank; null: every rank.")
    layer: Optional[int] = option(None, "The decoder layer; null: every layer.", ge=0)
    from_step: int = option(1, "First step without tokens, counted from 1.", ge=1)


@dataclass(frozen=True)
class SkewSpec:
    """How routing is skewed per rank."""

    starve: List[Starve] = option(list, "Through the router: experts that get no token.")
    # repeated, not in scenarios: rank 0's on all ranks, and the first one in all micro-batches.
    batches: str = option(
        "distinct",
        "Through the data. distinct: each rank has its own batch; identical: all ranks "
        "have rank 0's; per-replica: ranks that work on one copy of the model share "
        "one; one-token: each rank repeats one token, a different one on each. Ranks "
        "that differ only in tp share a batch in any case.",
        choices=("distinct", "identical", "per-replica", "one-token"),
    )
    routing: Optional[str] = option(
        None,
        "Through the router, the same on all ranks: fixes the experts of each token, "
        "regardless of scores. balanced: all in turn; zero-token: every second expert "
        "in turn, none to the others; one-hot: all tokens to the first top_k experts. "
        "null: the router decides.",
        choices=("balanced", "zero-token", "one-hot"),
    )


@dataclass(frozen=True)
class RecorderSpec:
    """Extra tasks of the recorder in each rank."""

    guard: bool = option(
        False,
        "Before each reduction of an FSDP2 group, ranks compare what they reduce; a "
        "difference raises one named error on all of them (MOEDIAG_GUARD=1).",
    )
    guard_timeout: float = option(
        GUARD_TIMEOUT,
        "Seconds after which a rank that the guard waits for counts as absent.",
        gt=0,
    )
