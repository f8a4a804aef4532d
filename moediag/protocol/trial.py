"""The trial: what a rank is given to do. Field names equal those of the scenario YAML (a test keeps
them equal)."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from moediag.protocol.files import GUARD_TIMEOUT, TRIAL_FILE
from moediag.protocol.programs import ProgramSpec
from moediag.protocol.stored import SCHEMA_VERSION, build, write_json


@dataclass(frozen=True)
class ModelSpec:
    """A tiny model built from a configuration; no weights are downloaded.

    ``source``: ``config`` builds it in every rank; ``checkpoint`` saves it once (the reference run
    does) and every rank loads it by the library's own ``from_pretrained``.
    """

    family: str = "qwen3_moe"
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
    source: str = "config"  # config | checkpoint
    pretrain: int = 0  # steps on the trial's own batches before the checkpoint is saved
    experts_implementation: Optional[str] = None  # eager | batched_mm | grouped_mm | triton


@dataclass(frozen=True)
class WrapperSpec:
    """How parameters are sharded.

    With an ``ep`` axis in the layout the model comes out of ``from_pretrained(distributed_config=
    …)``; the kind says who shards the rest: ``transformers`` nobody else, ``fsdp2`` torch's
    ``fully_shard`` with the experts left out, ``accelerate`` its ``prepare``; ``trainer`` and
    ``trl`` a Trainer or SFTTrainer, that run the steps too.
    ``distributed_config``: the arguments of transformers' DistributedConfig as they are, None for
    this release's own way to ask for the layout. ``native_fsdp``: that it shall shard with FSDP2
    too (kind transformers). ``cpu_ram_efficient_loading`` and ``ignore_experts``: of accelerate's
    FSDP plugin. ``fsdp_plugin``: a Trainer is asked for FSDP2. ``hide_tp_size``: it is not told by
    the loaded model how many ranks its experts are divided over.
    """

    # fsdp2 | fsdp1 | ddp | zero2 | zero3 | transformers | accelerate | trainer | trl
    kind: str = "fsdp2"
    granularity: str = "layer"  # fsdp2/fsdp1: layer | expert | root
    reshard_after_forward: bool = True
    reduce_dtype: Optional[str] = None  # float32 | bfloat16 | null: same as the parameters
    param_dtype: Optional[str] = None  # fsdp2: what is computed in; null: as the parameters are
    find_unused_parameters: bool = True  # ddp
    distributed_config: Optional[Dict[str, Any]] = None
    native_fsdp: bool = False
    cpu_ram_efficient_loading: bool = False
    ignore_experts: bool = False
    fsdp_plugin: bool = True
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
    clipping: str = "torch"  # torch | accelerate | local | per-mesh: whose norm, see worker.clip
    optimizer: str = "adamw"  # adamw | sgd
    foreach: Optional[bool] = None  # the optimizer's implementation; null: torch chooses
    fused: Optional[bool] = None
    parameter_groups: str = "one"  # one | per-mesh: plain tensors and each mesh's DTensors apart
    lr: float = 1e-3
    seed: int = 0
    fill_uninitialized: bool = False  # memory that nobody wrote holds nan


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
    # distinct | identical | per-replica (ranks that differ only in ep, etp, tp or pp share one) |
    # one-token (rank r: one repeated token)
    batches: str = "distinct"
    # balanced | zero-token | one-hot: which experts each token goes to, see worker.skew; null: the
    # router decides
    routing: Optional[str] = None


@dataclass(frozen=True)
class CostSpec:
    """The side-by-side timing of fixes on a mid-size healthy step."""

    fixes: List[str] = field(default_factory=list)
    rounds: int = 8
    model: ModelSpec = field(default_factory=ModelSpec)
    batch: int = 1
    seq_len: int = 512


@dataclass(frozen=True)
class ResumeSpec:
    """Training is saved, loaded into a new model and a new optimizer, and goes on.

    ``through``: ``dcp``, torch.distributed.checkpoint with get_state_dict and set_state_dict;
    ``accelerate``, its save_state and load_state; ``save-pretrained``, the model by the library's
    own save_pretrained and from_pretrained, the optimizer by torch.save on each rank.
    """

    through: str = "dcp"  # dcp | accelerate | save-pretrained
    after: int = 2  # steps before the save
    state_dict: str = "sharded"  # accelerate's state dict type: sharded | full


@dataclass(frozen=True)
class RecorderSpec:
    """What the recorder does in each rank besides recording. ``guard``: compares what ranks bring
    to each FSDP2 reduction before it begins; ``guard_timeout``: see ENV_GUARD_TIMEOUT."""

    guard: bool = False
    guard_timeout: float = GUARD_TIMEOUT


REFERENCE = "reference"
SUSCEPTIBILITY = "susceptibility"


@dataclass(frozen=True)
class Trial:
    """One launch: what a rank needs to know. ``purpose``: ``step`` runs the training step under
    test, or with ``resume`` the steps in one go against the same with a save and a load between;
    ``reference`` runs the same step in one process in fp32 and writes ``reference_path``;
    ``susceptibility`` asks in one process whether ranks would disagree about which parameters have
    a gradient; ``cost`` times the fixes side by side."""

    name: str  # unique within the run; also its folder's name
    scenario: str
    variant: str
    role: str = "unfixed"  # unfixed | fix | control
    purpose: str = "step"  # step | reference | susceptibility | cost
    world_size: int = 2
    layout: Dict[str, int] = field(default_factory=dict)  # mesh axis -> size, outermost first
    backend: str = "gloo"
    launcher: str = "fork"
    model: ModelSpec = field(default_factory=ModelSpec)
    wrapper: WrapperSpec = field(default_factory=WrapperSpec)
    step: StepSpec = field(default_factory=StepSpec)
    skew: SkewSpec = field(default_factory=SkewSpec)
    cost: Optional[CostSpec] = None
    resume: Optional[ResumeSpec] = None
    program: Optional[ProgramSpec] = None
    fix: Optional[str] = None  # name of a module in moediag.worker.fixes, in kebab-case
    reference_path: Optional[str] = None
    recorder: RecorderSpec = field(default_factory=RecorderSpec)
    record: bool = True  # install the recorder (benchmarks switch it off)
    executed: bool = False  # with it, note which functions ran, see executed_file
    timeout: float = 120.0  # seconds; the bound on the whole launch, not the hang detector
    shared_gpu: bool = False  # several ranks on one GPU, with whatever backend
    # Variables a rank sets before it joins the process group, unless they are set already.
    environment: Dict[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def alone(self) -> bool:
        """It runs in one process, whatever its world size."""
        return self.purpose in (REFERENCE, SUSCEPTIBILITY)

    @property
    def on_gpu(self) -> bool:
        """Whether its tensors lie on GPUs: always with NCCL, with gloo where ranks share one."""
        return self.backend == "nccl" or self.shared_gpu

    @property
    def computes_in(self) -> str:
        """dtype of forward and backward; FSDP2's param_dtype may differ from the parameters'."""
        return self.wrapper.param_dtype or self.model.dtype

    @property
    def checkpoint_path(self) -> Path:
        """The folder of the saved model, beside the reference that wrote it. Raises ValueError."""
        if self.reference_path is None:
            raise ValueError(f"trial {self.name}: no reference run, so nothing saved a checkpoint")
        return Path(self.reference_path).with_suffix(".checkpoint")

    def write(self, folder: Union[str, Path]) -> Path:
        """Writes ``trial.json`` atomically; returns its path."""
        return write_json(Path(folder) / TRIAL_FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Union[str, Path]) -> "Trial":
        """Raises ValueError when the file is of another schema version."""
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        if raw.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: schema_version {raw.get('schema_version')!r}, "
                f"this moediag reads {SCHEMA_VERSION}"
            )
        return typing.cast("Trial", build(cls, raw))
