"""The parts of a scenario that reach the ranks, as strict types.

model, wrapper, step, skew, cost, program and resume mirror the dataclasses of
``moediag.protocol`` (a test compares names and defaults) and add limits and the descriptions that
editors show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import PydanticKnownError

from moediag.axes import AXES
from moediag.lab.families import FAMILIES
from moediag.result.verdicts import Verdict

if TYPE_CHECKING:
    Family = str
    VerdictName = str
else:
    Family = Literal[tuple(FAMILIES)]
    VerdictName = Literal[tuple(str(verdict) for verdict in Verdict)]
Backend = Literal["gloo", "nccl"]
AxisSize = Annotated[int, Field(ge=1)] | Literal["world"]

# Lower-case kebab: names become folders, JUnit names and command-line arguments.
KEBAB = r"^[a-z0-9]+(-[a-z0-9]+)*$"
VERSION = r"^[0-9]+(\.[0-9]+)*([a-z0-9.+-]*)$"
Kebab = Annotated[str, StringConstraints(pattern=KEBAB, max_length=60)]
Version = Annotated[str, StringConstraints(pattern=VERSION)]
PackageName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
]
Rank = Annotated[int, Field(ge=0)]
Versions = dict[PackageName, Version]


def _axis(name: str) -> str:
    """Returns the name of an axis; raises pydantic's error of a Literal for any other."""
    if name not in AXES:
        expected = ", ".join(f"'{axis}'" for axis in AXES)
        raise PydanticKnownError("literal_error", {"expected": expected})
    return name


AxisName = Annotated[
    str,
    AfterValidator(_axis),
    WithJsonSchema({"enum": [str(axis) for axis in AXES], "type": "string"}),
]
LayoutRequest = dict[AxisName, AxisSize]


class Section(BaseModel):
    """Base of every part of the file. Refuses unknown fields and type conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """A tiny model built from a configuration; no weights are downloaded."""

    family: Family = Field(default="qwen3_moe", description="Model family of transformers.")
    by_rules: bool = Field(
        default=False,
        description="Build the configuration by rules on its field names, as `moediag hunt` does, "
        "instead of the family's recipe.",
    )
    layers: int = Field(default=2, ge=1, description="Decoder layers.")
    hidden: int = Field(default=32, ge=1, description="Width of the residual stream.")
    intermediate: int = Field(default=16, ge=1, description="Width of one expert's hidden layer.")
    experts: int = Field(default=8, ge=2, description="Routed experts per MoE layer.")
    top_k: int = Field(default=2, ge=1, description="Experts per token.")
    heads: int = Field(default=4, ge=1, description="Attention heads; a multiple of kv_heads.")
    kv_heads: int = Field(default=2, ge=1, description="Key/value heads.")
    head_dim: int = Field(
        default=8,
        ge=2,
        multiple_of=2,
        description="Width of one head; even, because RoPE rotates pairs.",
    )
    vocab: int = Field(default=128, ge=32, description="Vocabulary size.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Dtype of the parameters; the reference always runs in float32.",
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="More arguments of the family's configuration class, passed unchanged.",
    )
    source: Literal["config", "checkpoint"] = Field(
        default="config",
        description="config: every rank builds the model; checkpoint: it is saved once, and every "
        "rank loads it with the library's from_pretrained.",
    )
    pretrain: int = Field(
        default=0,
        ge=0,
        description="Training steps on the scenario's own batches before the checkpoint is saved, "
        "so that the loss is low and later errors show in it.",
    )
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "triton"] | None = Field(
        default=None,
        description="transformers' experts_implementation; triton is moediag's own kernel. "
        "null: the release's default.",
    )


class WrapperSection(Section):
    """How parameters are sharded."""

    kind: Literal[
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
    ] = Field(
        default="fsdp2",
        description="How the model is sharded. fsdp2: torch's fully_shard; zero2, zero3: "
        "DeepSpeed; transformers: from_pretrained alone; accelerate: its prepare with FSDP2. With "
        "an ep axis in the layout, from_pretrained divides the experts for fsdp2, transformers and "
        "accelerate; with a tp axis it divides the model, for transformers only. trainer and "
        "trl: a Trainer or SFTTrainer runs the steps itself. by-hand: fully_shard, with "
        "experts divided over ep and cut over etp by hand, and attention cut over tp by torch; "
        "alone or beside pp or cp.",
    )
    granularity: Literal["layer", "expert", "root"] = Field(
        default="layer",
        description="FSDP groups: per decoder layer; expert: also one per expert; root: only one.",
    )
    reshard_after_forward: bool = Field(
        default=True, description="Free the gathered parameters after forward (FSDP)."
    )
    reduce_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Dtype of the reduction of gradients; null: as parameters.",
    )
    param_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Kind fsdp2: dtype of forward and backward; parameters and optimizer keep "
        "theirs. Experts outside FSDP2 are cast in each forward. null: that of the parameters.",
    )
    find_unused_parameters: bool = Field(default=True, description="DDP's find_unused_parameters.")
    schedule: Literal["gpipe", "1f1b", "interleaved"] = Field(
        default="1f1b", description="Schedule of a pp axis; interleaved has two stages per rank."
    )
    rotate: Literal["allgather", "alltoall"] = Field(
        default="allgather",
        description="How keys and values reach the other ranks of a cp axis.",
    )
    distributed_config: dict[str, Any] | None = Field(
        default=None,
        description="Arguments of transformers' DistributedConfig; the name of a mesh axis or "
        '"world" stands for its size. null: chosen for the installed release and the layout.',
    )
    native_fsdp: bool = Field(
        default=False,
        description="Kinds transformers, trainer and trl: from_pretrained also shards with FSDP2.",
    )
    cpu_ram_efficient_loading: bool = Field(
        default=False, description="Kinds accelerate, trainer and trl: rank 0 loads and broadcasts."
    )
    ignore_experts: bool = Field(
        default=False, description="Kind accelerate: pass the experts as ignored_modules."
    )
    fsdp_plugin: bool = Field(
        default=True,
        description="Kinds trainer and trl: request FSDP2. No effect with native_fsdp.",
    )
    hide_tp_size: bool = Field(
        default=False,
        description="Kinds trainer and trl: hide the number of ranks over which the experts are "
        "divided, so that the loaded model is prepared like any other.",
    )


class StepSection(Section):
    """The training step: forward, backward, clip, optimizer."""

    steps: int = Field(default=2, ge=1, description="Training steps.")
    batch: int = Field(default=1, ge=1, description="Sequences per rank and micro-batch.")
    seq_len: int = Field(default=64, ge=1, description="Tokens per sequence.")
    accumulate: int = Field(default=1, ge=1, description="Micro-batches per step.")
    accumulate_sync: bool = Field(
        default=True,
        description="false: gradients are reduced in the last micro-batch only (no_sync).",
    )
    checkpointing: Literal["none", "reentrant", "non-reentrant"] = Field(
        default="none", description="Activation checkpointing of each decoder layer."
    )
    clip: float | None = Field(
        default=1.0, gt=0, description="Maximum gradient norm; null: no clipping."
    )
    clipping: Literal["torch", "accelerate", "local", "per-mesh"] = Field(
        default="torch",
        description="The gradient norm: torch's or accelerate's clip_grad_norm_; local: the norm "
        "of each rank's local tensors; per-mesh: squared norms summed over the axes that shard "
        "them.",
    )
    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="The optimizer.")
    foreach: bool | None = Field(
        default=None, description="The optimizer's foreach; null: torch chooses by the device."
    )
    fused: bool | None = Field(default=None, description="The optimizer's fused; null: not passed.")
    parameter_groups: Literal["one", "per-mesh"] = Field(
        default="one",
        description="per-mesh: separate groups for plain tensors and for each mesh's DTensors.",
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate.")
    seed: int = Field(default=0, ge=0, description="Seed of weights and batches.")
    fill_uninitialized: bool = Field(
        default=False,
        description="Fill memory that torch allocates with nan, so that every read of unwritten "
        "memory shows.",
    )


class StarveSection(Section):
    """An expert that gets no token from one training step on, on one rank or on all."""

    expert: int = Field(ge=0, description="The expert, counted from 0.")
    rank: Rank | None = Field(default=None, description="The rank; null: every rank.")
    layer: int | None = Field(
        default=None, ge=0, description="The decoder layer; null: every layer."
    )
    from_step: int = Field(
        default=1, ge=1, description="First step without tokens, counted from 1."
    )
    every: int | None = Field(
        default=None,
        ge=2,
        description="Repeats the pattern: with `every: 2`, rank 0 means ranks 0, 2, 4, …, so the "
        "scenario means the same at any world size. null: this rank only.",
    )


class SkewSection(Section):
    """How routing is skewed per rank."""

    starve: list[StarveSection] = Field(
        default_factory=list, description="Through the router: experts that get no token."
    )
    batches: Literal["distinct", "identical", "per-replica", "one-token"] = Field(
        default="distinct",
        description="Through the data. distinct: each rank has its own batch; identical: all ranks "
        "have rank 0's; per-replica: ranks that work on one copy of the model share one; "
        "one-token: each rank repeats one token, a different one on each. Ranks that differ only "
        "in tp share a batch in any case.",
    )
    routing: Literal["balanced", "zero-token", "one-hot"] | None = Field(
        default=None,
        description="Through the router, the same on all ranks: fixes the experts of each token, "
        "regardless of scores. balanced: all in turn; zero-token: every second expert in turn, "
        "none to the others; one-hot: all tokens to the first top_k experts. null: the router "
        "decides.",
    )


class CostSection(Section):
    """Times the fixes on a mid-size healthy step, side by side."""

    fixes: list[str] = Field(
        default_factory=list,
        description="Fixes to time; empty: those of the selected variants on the same stack.",
    )
    rounds: int = Field(default=8, ge=1, description="Timed steps per fix, alternating.")
    model: ModelSection = Field(
        default_factory=ModelSection, description="The timed model; mid-size."
    )
    batch: int = Field(default=1, ge=1, description="Sequences per rank.")
    seq_len: int = Field(default=512, ge=1, description="Tokens per sequence.")


class ProgramSection(Section):
    """A program that replaces the training step of a whole model."""

    name: str = Field(
        default="",
        description="A program of the catalogue, e.g. metrics, or the path of your own, relative "
        "to this file: ./my_step.py.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Its options; a variant overrides the scenario's options one by one.",
    )


class ResumeSection(Section):
    """Compares an uninterrupted run with some steps, a save, a load into a new model and optimizer,
    and the rest. Only the steps after the save are judged, not the gradients."""

    through: Literal["dcp", "dcp-model", "accelerate", "save-pretrained"] = Field(
        default="dcp",
        description="dcp: torch.distributed.checkpoint with get_state_dict and set_state_dict; "
        "dcp-model: the same without the optimizer; "
        "accelerate: save_state and load_state; save-pretrained: save_pretrained and "
        "from_pretrained for the model, torch.save on each rank for the optimizer.",
    )
    after: int = Field(default=2, ge=1, description="Steps before the save.")
    state_dict: Literal["sharded", "full"] = Field(
        default="sharded", description="Through accelerate: its state dict type."
    )
    layout: LayoutRequest = Field(
        default_factory=dict,
        description="The layout after loading, if it is another one. The steps after it are "
        "compared with those of a training that got the state at the save in memory, at this "
        "layout.",
    )


class RecorderSection(Section):
    """Extra tasks of the recorder in each rank."""

    guard: bool = Field(
        default=False,
        description="Before each reduction of an FSDP2 group, ranks compare what they reduce; a "
        "difference raises one named error on all of them (MOEDIAG_GUARD=1).",
    )
    guard_timeout: float = Field(
        default=300.0,
        gt=0,
        description="Seconds after which a rank that the guard waits for counts as absent.",
    )
