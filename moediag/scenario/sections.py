"""The parts of a scenario that reach the ranks, as strict types.

model, wrapper, step, skew, cost, program and resume mirror the dataclasses of
``moediag.protocol`` (a test holds names and defaults equal) and add the bounds and the words that
an editor shows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

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

Family = Literal[
    "qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "deepseek_v3", "glm4_moe", "glm4v_moe",
    "gpt_oss", "llama4", "qwen3_vl_moe", "qwen3_omni_moe", "internvl",
]  # fmt: skip
VerdictName = Literal[
    "clean", "hang", "collective-mismatch", "wrong-gradients", "wrong-weights",
    "replica-divergence", "nonfinite", "wrong-metrics", "resume-drift", "crash",
    "not-applicable", "inconclusive",
]  # fmt: skip
Backend = Literal["gloo", "nccl"]
AxisSize = Annotated[int, Field(ge=1)] | Literal["world"]

# Lower-case kebab: names become folders, JUnit names and command-line words.
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
    """An axis by name, refused as pydantic refuses a word that is not in a Literal."""
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
    """Base of every part of the file: unknown fields and converted types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelSection(Section):
    """A tiny model built from a configuration; no weights are downloaded."""

    family: Family = Field(default="qwen3_moe", description="Model family of transformers.")
    layers: int = Field(default=2, ge=1, description="Decoder layers.")
    hidden: int = Field(default=32, ge=1, description="Width of the residual stream.")
    intermediate: int = Field(default=16, ge=1, description="Width of one expert's hidden layer.")
    experts: int = Field(default=8, ge=2, description="Routed experts per MoE layer.")
    top_k: int = Field(default=2, ge=1, description="Experts that each token is sent to.")
    heads: int = Field(default=4, ge=1, description="Attention heads; a multiple of kv_heads.")
    kv_heads: int = Field(default=2, ge=1, description="Key/value heads.")
    head_dim: int = Field(
        default=8,
        ge=2,
        multiple_of=2,
        description="Width of one head; even, since RoPE rotates pairs.",
    )
    vocab: int = Field(default=128, ge=32, description="Vocabulary size.")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Type of the parameters; the reference always runs in float32.",
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of the family's configuration class, passed as they are.",
    )
    source: Literal["config", "checkpoint"] = Field(
        default="config",
        description="config: every rank builds the model; checkpoint: it is saved once, and every "
        "rank loads it by the library's own from_pretrained.",
    )
    pretrain: int = Field(
        default=0,
        ge=0,
        description="Steps of training on the scenario's own batches before the checkpoint is "
        "saved, so that the loss is low and shows what is wrong later.",
    )
    experts_implementation: Literal["eager", "batched_mm", "grouped_mm", "triton"] | None = Field(
        default=None,
        description="transformers' experts_implementation; triton is moediag's own, registered "
        "with the others; null: the release's default.",
    )


class WrapperSection(Section):
    """How parameters are sharded."""

    kind: Literal[
        "fsdp2", "fsdp1", "ddp", "zero2", "zero3", "transformers", "accelerate", "trainer", "trl"
    ] = Field(
        default="fsdp2",
        description="Who shards: fsdp2 is torch's fully_shard; zero2 and zero3 need DeepSpeed; "
        "transformers is from_pretrained alone; accelerate is its prepare with FSDP2. With an ep "
        "axis in the layout the experts are from_pretrained's part with any of the last two and "
        "fsdp2. trainer and trl are a Trainer or SFTTrainer that runs the steps itself.",
    )
    granularity: Literal["layer", "expert", "root"] = Field(
        default="layer",
        description="FSDP groups: one per decoder layer, one per expert besides, or the root only.",
    )
    reshard_after_forward: bool = Field(
        default=True, description="Free the gathered parameters after forward (FSDP)."
    )
    reduce_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="Type gradients are reduced in; null: that of the parameters."
    )
    param_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Kind fsdp2: type forward and backward are computed in, while parameters and "
        "optimizer stay as they are; experts that FSDP2 is told to leave out are cast for each "
        "forward. null: that of the parameters.",
    )
    find_unused_parameters: bool = Field(default=True, description="DDP's find_unused_parameters.")
    distributed_config: dict[str, Any] | None = Field(
        default=None,
        description="Arguments of transformers' DistributedConfig; a text that names a mesh axis "
        'or "world" stands for its size. null: how the installed release asks for the layout.',
    )
    native_fsdp: bool = Field(
        default=False,
        description="Kinds transformers, trainer and trl: from_pretrained shards by FSDP2 too.",
    )
    cpu_ram_efficient_loading: bool = Field(
        default=False, description="Kinds accelerate, trainer and trl: rank 0 loads and broadcasts."
    )
    ignore_experts: bool = Field(
        default=False, description="Kind accelerate: the experts are its ignored_modules."
    )
    fsdp_plugin: bool = Field(
        default=True,
        description="Kinds trainer and trl: its arguments ask for FSDP2. Without meaning where "
        "native_fsdp has sharded already.",
    )
    hide_tp_size: bool = Field(
        default=False,
        description="Kinds trainer and trl: the loaded model does not say how many ranks its "
        "experts are divided over, so that it is prepared as any model.",
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
        default=1.0, gt=0, description="Largest gradient norm; null: no clipping."
    )
    clipping: Literal["torch", "accelerate", "local", "per-mesh"] = Field(
        default="torch",
        description="Whose gradient norm: torch's or accelerate's clip_grad_norm_; local, the norm "
        "of what each rank holds; per-mesh, every mesh's gradients summed over what shards them.",
    )
    optimizer: Literal["adamw", "sgd"] = Field(default="adamw", description="The optimizer.")
    foreach: bool | None = Field(
        default=None, description="The optimizer's foreach; null: torch chooses by the device."
    )
    fused: bool | None = Field(default=None, description="The optimizer's fused; null: not asked.")
    parameter_groups: Literal["one", "per-mesh"] = Field(
        default="one",
        description="per-mesh: plain tensors and the DTensors of each mesh in groups of their own.",
    )
    lr: float = Field(default=1e-3, gt=0, description="Learning rate.")
    seed: int = Field(default=0, ge=0, description="Seed of the weights and of the batches.")
    fill_uninitialized: bool = Field(
        default=False,
        description="Memory that torch allocates and nobody has written holds nan, so that "
        "reading it shows every time.",
    )


class StarveSection(Section):
    """From one training step on, no token goes to one expert, on one rank or on all."""

    expert: int = Field(ge=0, description="The expert, counted from 0.")
    rank: Rank | None = Field(default=None, description="The rank; null: every rank.")
    layer: int | None = Field(
        default=None, ge=0, description="The decoder layer; null: every layer."
    )
    from_step: int = Field(
        default=1, ge=1, description="First step of the starvation, counted from 1."
    )
    every: int | None = Field(
        default=None,
        ge=2,
        description="Repeats the pattern: with `every: 2`, rank 0 stands for ranks 0, 2, 4, …; "
        "the scenario then means the same at any world size. null: this rank alone.",
    )


class SkewSection(Section):
    """How routing is bent per rank."""

    starve: list[StarveSection] = Field(
        default_factory=list, description="Through the router: experts that get no token."
    )
    batches: Literal["distinct", "identical", "per-replica", "one-token"] = Field(
        default="distinct",
        description="Through the data: each rank its own batch, all ranks rank 0's, one for all "
        "ranks that differ only in ep, etp, tp or pp, or on each rank one repeated token, another "
        "one on each.",
    )
    routing: Literal["balanced", "zero-token", "one-hot"] | None = Field(
        default=None,
        description="Through the router, the same on all ranks: the experts that each token goes "
        "to, whatever its scores. balanced: all in turn; zero-token: every second expert in turn, "
        "none to the others; one-hot: all tokens to the first top_k experts. null: the router "
        "decides.",
    )


class CostSection(Section):
    """The side-by-side timing of fixes on a mid-size healthy step."""

    fixes: list[Kebab] = Field(
        default_factory=list,
        description="Fixes to time; empty: those of the selected variants on the same stack.",
    )
    rounds: int = Field(default=8, ge=1, description="Timed steps of each fix, taken in turn.")
    model: ModelSection = Field(
        default_factory=ModelSection, description="The model that is timed; mid-size."
    )
    batch: int = Field(default=1, ge=1, description="Sequences per rank.")
    seq_len: int = Field(default=512, ge=1, description="Tokens per sequence.")


class ProgramSection(Section):
    """A step of its own in place of the training step of a whole model."""

    name: str = Field(default="", description="A program of moediag.worker.programs.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Its options; those of a variant are laid over the scenario's, one by one.",
    )


class ResumeSection(Section):
    """All steps in one go against some, a save, a load into a new model and optimizer, and the
    rest. Judged by the steps after the save alone, in place of the gradients."""

    through: Literal["dcp", "accelerate", "save-pretrained"] = Field(
        default="dcp",
        description="dcp: torch.distributed.checkpoint with get_state_dict and set_state_dict; "
        "accelerate: save_state and load_state; save-pretrained: the model by save_pretrained and "
        "from_pretrained, the optimizer by torch.save on each rank.",
    )
    after: int = Field(default=2, ge=1, description="Steps before the save.")
    state_dict: Literal["sharded", "full"] = Field(
        default="sharded", description="Through accelerate: its state dict type."
    )


class RecorderSection(Section):
    """What the recorder does in each rank besides recording."""

    guard: bool = Field(
        default=False,
        description="Ranks compare what they bring to each reduction of an FSDP2 group before it "
        "begins; a difference is one named error on all of them (MOEDIAG_GUARD=1).",
    )
    guard_timeout: float = Field(
        default=300.0,
        gt=0,
        description="Seconds before a rank that others wait for in the guard is called absent.",
    )
