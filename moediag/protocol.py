"""What crosses from the control side to the ranks, and the files the ranks leave behind.

The only module that both sides import, so: standard library only, Python >= 3.9.
A trial is written once as ``trial.json``; each rank appends to ``rank-N.events.jsonl``
(one JSON object a line, written with a single ``write`` so that a killed rank loses
nothing it had recorded) and keeps ``rank-N.heartbeat``, a small memory-mapped record.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

SCHEMA_VERSION = 1

# Environment variables through which a rank learns that it is watched.
ENV_TRIAL = "MOEDIAG_TRIAL"  # path of trial.json
ENV_EVIDENCE = "MOEDIAG_EVIDENCE"  # folder that receives the rank's files
# "1": ranks compare what they bring to each reduction of FSDP2, see recorder.guard.
ENV_GUARD = "MOEDIAG_GUARD"
ENV_GUARD_TIMEOUT = "MOEDIAG_GUARD_TIMEOUT"  # seconds until a rank that others wait for is absent
GUARD_TIMEOUT = 300.0

# A watched job: its run directory, the folder of this package, the marker of a process that is a
# rank (its children inherit it), how often the elastic agent started its ranks before, and the size
# of a segment of the log in bytes.
ENV_WATCH = "MOEDIAG_WATCH"
ENV_PACKAGE = "MOEDIAG_PACKAGE"
ENV_RANK_PID = "MOEDIAG_RANK_PID"
ENV_ATTEMPT = "MOEDIAG_ATTEMPT"
ENV_SEGMENT = "MOEDIAG_SEGMENT_BYTES"

TRIAL_FILE = "trial.json"
# In the run directory of a watched job: one line for each process that could not be recorded.
NOT_RECORDED_FILE = "not-recorded.txt"


def attempt_folder(attempt: int) -> str:
    """The evidence of a watched job's ranks; an elastic agent may start them several times."""
    return f"attempt-{attempt}"


def pid_file(rank: int) -> str:
    """JSON: pid, host, time (epoch seconds), of a watched job also world_size and local_ranks (null
    where the rank does not know). Lets the watchdog find the rank before its first heartbeat."""
    return f"rank-{rank}.pid"


def events_file(rank: int) -> str:
    """The recorder's log: JSON lines, one of EVENT_KINDS in field ``e``."""
    return f"rank-{rank}.events.jsonl"


def older_events_file(rank: int) -> str:
    """The segment of the log before ``events_file``, once that has grown to its bound; the newer
    segment repeats what its lines refer to (start, group, names), so it can be read alone."""
    return f"rank-{rank}.events.older.jsonl"


def heartbeat_file(rank: int) -> str:
    """The memory-mapped progress record, see :class:`Heartbeat`."""
    return f"rank-{rank}.heartbeat"


def output_file(rank: int) -> str:
    """The rank's own standard output and error, together."""
    return f"rank-{rank}.log"


def stacks_file(rank: int) -> str:
    """What ``faulthandler`` wrote (on a fatal signal, on SIGTERM, or when asked)."""
    return f"rank-{rank}.stacks.txt"


def error_file(rank: int) -> str:
    """The exception that ended the rank, as torch elastic's error file (JSON)."""
    return f"rank-{rank}.error.json"


def outcome_file(rank: int) -> str:
    """What the worker measured on this rank, see :class:`Outcome`; absent if it died."""
    return f"rank-{rank}.outcome.json"


def executed_file(rank: int) -> str:
    """Which functions of the installed packages this rank ran (JSON lines): ``[FILE, NAME]``
    numbers a file, ``[FILE, LINE]`` is a function of it by its first line, decorators included
    (0: the file was imported), ``[FILE, CLASS, FQN]`` a class of the model's module at FQN, with
    ``*`` for the numbers of layers and experts. Only where the trial asks for it."""
    return f"rank-{rank}.executed.jsonl"


def flight_file(rank: int) -> str:
    """Flight Recorder dump of this rank (JSON, without stacks)."""
    return f"rank-{rank}.flight.json"


# What a susceptibility trial found, see :class:`Susceptibility`.
SUSCEPTIBILITY_FILE = "susceptibility.json"


# A file that, once created by the control side, asks the rank's recorder thread to dump the
# Flight Recorder into flight_file(rank).
def dump_request_file(rank: int) -> str:
    return f"rank-{rank}.dump-request"


# --------------------------------------------------------------------------------------
# Events, one JSON object a line. ``e`` is the kind, ``t`` the wall clock in seconds.
#
# start       rank world_size pid host python torch transformers accelerate backend
# group       group(name) desc axis(mesh axis name or null) ranks backend
# names       id fqns[]            interned list of parameter names; later events carry the id
# collective  n(per-rank index, from 0)  group  k(index of this op within its group, from 0)
#             op numel_in numel_out dtype splits_in|null splits_out|null peer|null reduce|null
#             phase(forward|backward|recompute|optimizer|other) module(FQN or "")
#             carries(names id|null: parameters on the wire)
#             of(names id|null: all parameters of that FSDP group)  sizes(numel of each carried)
#             site("file.py:12 function") step(int) async(bool)
# done        n                    the collective was waited for and completed
# tokens      step layer(FQN of the MoE block) counts[experts]   one line per forward of it
# no_gradient step names(id)       parameters whose .grad is None when the optimizer steps
# phase       name(free text: "step 1", "imports", …) step
# weights     when(loaded|prepared|resumed) experts[ExpertRows…] unequal[FQN…: other parameters
#             that differ from the checkpoint] compared(int: how many of those) asked(ep size asked
#             for, 1: none) whole(experts of a layer in the checkpoint) left_out(bool: sharding
#             was told to leave the experts alone)
# experts_used rows{FQN of an expert parameter: how many experts a forward computes with}
# note        text                 a fact about how the trial was run (shims, how it was asked)
# decision    what value step      which branch the rank takes where others may take another one;
#             value: a number, the names of what it has, or words that follow "rank 1 "
# finding     what text step details{}  wrong, and found before it shows; what: optimizer-group
# not_seen    text                 something this rank's recorder cannot observe here
# error       type message where   the exception that ends the rank
# end
# --------------------------------------------------------------------------------------
EVENT_KINDS = (
    "start", "group", "names", "collective", "done", "tokens", "no_gradient", "phase",
    "weights", "experts_used", "decision", "finding", "note", "not_seen", "error", "end",
)  # fmt: skip

OPS = (
    "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather", "scatter",
    "all_to_all", "send", "recv", "barrier",
)  # fmt: skip


class Heartbeat:
    """Layout of the memory-mapped progress record of one rank (64 bytes, little endian).

    ``progress`` grows with every recorded event; ``collective`` is the index of the collective
    the main thread is inside of, or -1; ``state`` is one of STATES; ``time`` is the wall clock
    of the last change in seconds; ``step`` the training step, from 1.
    """

    MAGIC = b"MDHB0001"
    STATES = ("starting", "running", "in-collective", "finished")
    LAYOUT = struct.Struct("<8sQqQdq")  # magic, progress, collective, state, time, step
    SIZE = 64

    def __init__(self, progress: int, collective: int, state: str, time: float, step: int) -> None:
        self.progress = progress
        self.collective = collective
        self.state = state
        self.time = time
        self.step = step

    @classmethod
    def read(cls, path: Union[str, Path]) -> Optional["Heartbeat"]:
        """The record at ``path``; None when it does not exist yet or is incomplete."""
        try:
            raw = Path(path).read_bytes()[: cls.LAYOUT.size]
        except OSError:
            return None
        if len(raw) < cls.LAYOUT.size or not raw.startswith(cls.MAGIC):
            return None
        _, progress, collective, state, time, step = cls.LAYOUT.unpack(raw)
        name = cls.STATES[state] if state < len(cls.STATES) else "running"
        return cls(progress, collective, name, time, step)


# --------------------------------------------------------------------------------------
# The trial. Field names equal those of the scenario YAML (a test keeps them equal).
# --------------------------------------------------------------------------------------


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
    experts_implementation: Optional[str] = None  # eager | batched_mm | grouped_mm


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


@dataclass(frozen=True)
class CostSpec:
    """The side-by-side timing of fixes on a mid-size healthy step."""

    fixes: List[str] = field(default_factory=list)
    rounds: int = 8
    model: ModelSpec = field(default_factory=ModelSpec)
    batch: int = 1
    seq_len: int = 512


LOAD_METHODS = (
    "per-parameter",  # one broadcast per parameter, then each rank cuts its shard
    "accelerate",  # accelerate's fsdp2_load_full_state_dict as installed
    "coalesced",  # one broadcast per bucket of parameters, then each rank cuts
    "torch",  # set_model_state_dict with broadcast_from_rank0
    "scatter",  # distribute_tensor as torch sets it up: one scatter per parameter
    "local",  # distribute_tensor(src_data_rank=None): every rank has all weights already
)


@dataclass(frozen=True)
class LoadCostSpec:
    """The side-by-side timing of ways to load full weights into a sharded model."""

    parameters: List[int] = field(default_factory=lambda: [100, 200, 400])
    numel: int = 4096  # elements of one matrix; every eighth parameter is a vector of odd length
    methods: List[str] = field(default_factory=lambda: list(LOAD_METHODS))
    rounds: int = 3
    bucket_mb: float = 25.0  # coalesced: bytes of one broadcast, in 10^6
    dtype: str = "float32"  # float32 | bfloat16


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


# Programs: steps that no sharding of a whole model shows, each a module of moediag.worker.programs.
# Name -> option -> default; a tuple lists what an option of text may be, its default first.
PROGRAMS: Dict[str, Dict[str, Any]] = {
    # One MoE block under tensor parallelism. expert_tp: routed experts are cut over the tp ranks
    # (tp) or whole on each (1); scores: routing scores scale what comes out of the experts (after)
    # or what goes in (before); fix: see worker.tp_router.plans.
    "tp-router": {
        "block": ("look-alike", "torchtitan"),
        "tensor_parallel": True,
        "expert_tp": ("tp", "1"),
        "scores": ("after", "before"),
        "fix": (
            "none",
            "weights-partial",
            "gate-partial",
            "gate-mean",
            "gate-sum",
            "boundary-twice",
            "merged",
            "boundary",
        ),
    },
    "fsdp1-nested-ep": {
        "wrap": (
            "ignored-modules", "auto-wrap", "without-assertions", "bottom-up", "custom-policy",
        ),
        "divide": ("nothing", "gradients", "postdivide-factor", "loss"),
    },
    "fsdp2-two-meshes": {
        "experts": ("own-mesh", "two-axes", "per-parameter"),
        "divide": ("nothing", "world", "world-premul", "ep", "gradients", "loss"),
        "norm": ("mesh", "mesh-and-ep"),
    },
    "checkpoint-recompute": {
        # How routing differs in the recomputation, see moediag.worker.rerouted.
        "change": ("count", "metadata", "permuted", "noise", "none"),
        "on_rank": 1,  # whose recomputation
        "pair": False,  # permuted: two tokens alone exchange their experts
        "router": ("inside", "outside"),  # of the checkpointed region
        "save": ("nothing", "top-k", "matmul"),  # selective checkpointing: what is not recomputed
        "mutate": False,  # selective checkpointing: what was saved may be written to
        # The released block; one whose router normalises into a new tensor; that, visiting each
        # expert.
        "block": ("released", "not-in-place", "every-expert"),
        "preserve_rng": True,  # checkpointing's own preserve_rng_state
        "unpack": ("strict", "scalar", "zeros"),  # what backward gets for what does not match
    },
    # A step with a gradient that is not finite: who skips the optimizer, and by doing what.
    "skipped-step": {
        "optimizer": ("adamw", "sgd", "muon"),  # sgd with momentum; muon: torch.optim.Muon
        # Where it overflows: rank 0's loss, one row of one parameter (its shard is the last
        # rank's), or nowhere.
        "overflow": ("loss", "one-row", "none"),
        "at": 2,  # in this step
        "norm": ("global", "own-shards"),  # what is asked for being finite
        "agree": False,  # ranks skip when any of them found it not finite
        # In place of the step: return; zero_grad() and step(); zero_grad(set_to_none=False) and
        # step(); nothing, the step as it is.
        "answer": ("return", "none-then-step", "zeros-then-step", "step"),
        "schedule": ("with-updates", "always"),  # when the scheduler advances
    },
    # Metrics that are all-reduced over the ranks, by name, beside gradient accumulation.
    "metrics": {
        "reduce": ("inside", "after"),  # each micro-batch's | their mean, after the last
        "micro_batches": 3,
        "fewer": 0,  # by so many on odd ranks
        # What FSDP2 does in all but the last micro-batch: reduces gradients; keeps them; keeps
        # them and the gathered parameters too, so that nothing is communicated.
        "accumulation": ("every", "no-sync", "no-sync-gathered"),
        "pad": False,  # ranks agree on the largest number; a padding micro-batch has weight 0
        "keys": ("same", "one-missing", "other-order"),  # of odd ranks
        # How names meet: in each rank's own order; sorted; all known names, 0 where a rank has
        # none; the same with the number of ranks that have it.
        "names": ("own-order", "sorted", "zero-for-missing", "counted"),
    },
    "tied-embeddings-meta": {
        # When the meta model gets memory; before sharding torch's to_empty gives each name its own.
        "empty": ("after-sharding", "before-sharding", "before-sharding-but-rank-0"),
        "retie": ("never", "before-sharding", "after-loading"),
        "checkpoint": ("both-names", "embedding-only"),
        "load": ("torch", "accelerate", "broadcasts"),
    },
    "router-logits-guard": {
        # By which field of a configuration a trainer takes its model for a mixture of experts.
        "guard": (
            "always",
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "any",
            "any-in-text-config",
            "own-switch",
        ),
    },
}  # fmt: skip


def program_options(name: str, given: Dict[str, Any]) -> Dict[str, Any]:
    """Every option of program ``name`` with its value. Raises KeyError for an unknown program or
    option, ValueError for a value that it cannot have."""
    known = PROGRAMS[name]
    values = {k: v[0] if isinstance(v, tuple) else v for k, v in known.items()}
    for option, value in given.items():
        may = known[option]
        if isinstance(may, tuple):
            if value not in may:
                raise ValueError(f"{option}: {value!r} is none of {', '.join(map(str, may))}")
        elif type(value) is not type(may) and not (isinstance(may, float) and type(value) is int):
            raise ValueError(f"{option}: {value!r}, but a {type(may).__name__} belongs there")
        values[option] = value
    return values


@dataclass(frozen=True)
class ProgramSpec:
    """A program of moediag.worker.programs in place of the training step of a whole model."""

    name: str = ""
    options: Dict[str, Any] = field(default_factory=dict)  # see PROGRAMS


REFERENCE = "reference"
SUSCEPTIBILITY = "susceptibility"


@dataclass(frozen=True)
class Trial:
    """One launch: what a rank needs to know. ``purpose``: ``step`` runs the training step under
    test, or with ``resume`` the steps in one go against the same with a save and a load between;
    ``reference`` runs the same step in one process in fp32 and writes ``reference_path``;
    ``susceptibility`` asks in one process whether ranks would disagree about which parameters have
    a gradient; ``cost`` times the fixes side by side; ``load-cost`` times the ways to load
    weights."""

    name: str  # unique within the run; also its folder's name
    scenario: str
    variant: str
    role: str = "unfixed"  # unfixed | fix | control
    purpose: str = "step"  # step | reference | susceptibility | cost | load-cost
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
    load_cost: Optional[LoadCostSpec] = None
    program: Optional[ProgramSpec] = None
    fix: Optional[str] = None  # name of a module in moediag.fixes, in kebab-case
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
        return typing.cast("Trial", _build(cls, raw))


@dataclass(frozen=True)
class ExpertRows:
    """Which experts one rank really holds of one expert parameter, row by row of its local part.

    ``held``: per local row the expert of the checkpoint whose bytes it has, -1 for none of that
    layer. ``declared``: per local row the expert that sharding says it is (from the DTensor's
    placements, or the rank's place on the ep axis), -1 where that is not known. ``rows``: dim 0 of
    the whole parameter as the rank sees it; an intact one has as many as there are experts.
    ``placement``: "Shard(0) on ep[2]", or "plain" for a tensor that is not distributed.
    ``first``: the first element of the local part; ``should``: the checkpoint's, of the expert
    that belongs there; None where there is none, or it is not known.
    """

    fqn: str
    held: List[int]
    declared: List[int]
    rows: int
    placement: str = "plain"
    first: Optional[float] = None
    should: Optional[float] = None


@dataclass(frozen=True)
class Multiple:
    """One tensor as a multiple of another: ``factor`` brings factor * reference nearest to it
    (least squares), ``residual`` is what is left then, relative to the tensor's own L2 norm.
    ``numel``: elements compared; of one alone every number is a multiple."""

    factor: float
    residual: float
    numel: int = 1


@dataclass(frozen=True)
class GradientError:
    """One parameter's gradient against the reference, over this rank's shard.

    ``max_abs`` is max |gradient - reference|; ``scale`` max |reference| over the shard, inf or
    nan are given as the strings JSON allows; ``missing`` when this rank has no gradient where
    the reference has a non-zero one; ``wrong`` by the tolerance in worker.compare.
    ``placement``: how the parameter lies on the mesh, "" where it is a plain tensor. ``times``:
    the gradient as a multiple of the reference, null where that is zero or something not finite.
    """

    max_abs: float
    scale: float
    wrong: bool
    missing: bool = False
    placement: str = ""
    times: Optional[Multiple] = None


@dataclass(frozen=True)
class Sketch:
    """A tensor in a few numbers: its L2 norm and random projections, see worker.replicas. Not
    finite: the norm as text, no projections."""

    norm: float
    projections: List[float] = field(default_factory=list)


@dataclass(frozen=True)
class Replica:
    """One parameter as this rank holds it. ``slice``: the declared part of the whole tensor, e.g.
    "0:4,:,:", the whole is ":"; ``kind``: "plain", or a DTensor's mesh such as "ep [0, 1]";
    ``weight`` after the optimizer's step; ``gradient`` before clipping, null also where it is not
    yet reduced or sharded in another way; ``has_gradient``: null before the first step; ``state``:
    the optimizer's tensors of the weight's shape (``exp_avg``, …) after its step."""

    slice: str
    kind: str = "plain"
    weight: Optional[Sketch] = None
    gradient: Optional[Sketch] = None
    has_gradient: Optional[bool] = None
    state: Dict[str, Sketch] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReplicas:
    """What ranks can be compared by after one step. ``parameters`` by FQN, without those that no
    other rank can hold a replica of; ``local_norm``: L2 norm of this rank's own gradients, nothing
    reduced; ``optimizer_steps``: smallest and largest step count; ``learning_rates``: of each
    parameter group; ``dtype`` of the parameters. Empty or null where the wrapper keeps it to
    itself."""

    parameters: Dict[str, Replica] = field(default_factory=dict)
    dtype: str = "float32"
    local_norm: Optional[float] = None
    optimizer_steps: List[float] = field(default_factory=list)
    learning_rates: List[float] = field(default_factory=list)


@dataclass(frozen=True)
class Applied:
    """What the optimizer left behind after one step, against one process. ``weights``: by FQN,
    ``scale`` how far training should have moved the parameter since the start. ``rate`` and
    ``updates``: learning rate and number of updates, this rank's and the right ones."""

    weights: Dict[str, GradientError] = field(default_factory=dict)
    rate: Optional[float] = None
    reference_rate: Optional[float] = None
    updates: Optional[float] = None
    reference_updates: Optional[float] = None


@dataclass(frozen=True)
class StepNumbers:
    """Of each step, in order: this rank's mean loss, and the norm of its own part of the gradient
    (null where it has none), before clipping."""

    losses: List[float] = field(default_factory=list)
    norms: List[Optional[float]] = field(default_factory=list)


@dataclass(frozen=True)
class StateDifference:
    """Two states of one rank, only what differs. By FQN the largest |difference| of the local
    weights, by "FQN exp_avg" that of the optimizer's tensors; null where one side lacks it or has
    another shape. ``settings``: of the optimizer's parameter groups, in words. ``compared``: how
    many tensors there were."""

    weights: Dict[str, Optional[float]] = field(default_factory=dict)
    optimizer: Dict[str, Optional[float]] = field(default_factory=dict)
    settings: List[str] = field(default_factory=list)
    compared: int = 0


@dataclass(frozen=True)
class ResumeOutcome:
    """N steps in one go (``straight``), the same once more (``again``, the control), and ``after``
    steps, a save, a load into a new model and optimizer, and the steps that are left (``resumed``:
    those alone).

    ``control``: the state at the end of ``again`` against ``straight``; ``at_load``: the state
    after loading against that at the save, bit by bit; ``at_end``: the resumed state at the end
    against ``straight``. ``loaded``: per expert parameter what this rank's rows are after loading,
    by their bytes at the save on any rank (``declared``: what they were at the save). ``apart``:
    parameters of which every rank has a copy, but not the same one at the save.
    """

    through: str
    after: int
    straight: StepNumbers = field(default_factory=StepNumbers)
    again: StepNumbers = field(default_factory=StepNumbers)
    resumed: StepNumbers = field(default_factory=StepNumbers)
    control: StateDifference = field(default_factory=StateDifference)
    at_load: StateDifference = field(default_factory=StateDifference)
    at_end: StateDifference = field(default_factory=StateDifference)
    loaded: List[ExpertRows] = field(default_factory=list)
    apart: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadTiming:
    """One way to load a model of ``parameters`` parameters, on one rank.

    ``bytes``: of the whole model. ``seconds``: of each round, the whole load. ``communication``:
    of each round, its collectives alone on buffers that exist; empty where it has none.
    ``calls``: how many collectives of which kind the whole load issued. ``wrong``: FQNs of
    parameters whose shard differed, in any bit and any round, from its cut of the true tensor.
    """

    method: str
    parameters: int
    bytes: int
    calls: Dict[str, int] = field(default_factory=dict)
    seconds: List[float] = field(default_factory=list)
    communication: List[float] = field(default_factory=list)
    wrong: List[str] = field(default_factory=list)


@dataclass(frozen=True)
class OutcomeTable:
    """Numbers of a program for its page; ranks that share the rows of one table give it the same
    title and columns. Cells: text, whole numbers, fractions, null."""

    title: str
    columns: List[str]
    rows: List[List[Any]]
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """What the worker measured on one rank; written only when the rank reached its end.

    ``gradients``: by step (as a string, JSON) and FQN, only of steps that were compared.
    ``inputs``: likewise the gradient of each MoE block's input, by the block's FQN.
    ``updates``: likewise how far the weights have moved since the beginning, against the
    reference's, after the steps that it names.
    ``losses`` (this rank's mean), ``reference_losses`` (mean over ranks), ``gradient_norms`` and
    ``reference_norms`` (both before clipping): one per step; a norm is null where the library keeps
    it to itself. ``replicas``: by step, "0" before training. ``applicable``: a reason when this
    trial cannot be done on this stack (verdict not-applicable), else null. ``cost``: by fix name
    ("" is the unfixed step, "again" the same once more, which shows the noise), the seconds of each
    round. ``loads``: of a load-cost trial. ``notes``: facts about how the trial was run that a
    reader of the result must know (shims, look-alikes). ``resume``: of a resume trial, whose losses
    and norms are the straight run's. ``applied``: by step. ``metrics``: by step and name, as this
    rank reports them after they were reduced over ranks; ``reference_metrics``: what they are.
    ``tables``: of a program.
    """

    rank: int
    gradients: Dict[str, Dict[str, GradientError]] = field(default_factory=dict)
    losses: List[float] = field(default_factory=list)
    reference_losses: List[float] = field(default_factory=list)
    gradient_norms: List[Optional[float]] = field(default_factory=list)
    reference_norms: List[float] = field(default_factory=list)
    replicas: Dict[str, StepReplicas] = field(default_factory=dict)
    steps_done: int = 0
    step_seconds: List[float] = field(default_factory=list)
    applicable: Optional[str] = None
    cost: Dict[str, List[float]] = field(default_factory=dict)
    loads: List[LoadTiming] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    versions: Dict[str, Optional[str]] = field(default_factory=dict)
    inputs: Dict[str, Dict[str, GradientError]] = field(default_factory=dict)
    resume: Optional[ResumeOutcome] = None
    updates: Dict[str, Dict[str, Multiple]] = field(default_factory=dict)
    applied: Dict[str, Applied] = field(default_factory=dict)
    metrics: Dict[str, Dict[str, float]] = field(default_factory=dict)
    reference_metrics: Dict[str, Dict[str, float]] = field(default_factory=dict)
    tables: List[OutcomeTable] = field(default_factory=list)

    def write(self, folder: Union[str, Path]) -> Path:
        return write_json(Path(folder) / outcome_file(self.rank), dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Union[str, Path]) -> "Outcome":
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        return typing.cast("Outcome", _build(cls, raw))


@dataclass(frozen=True)
class Susceptibility:
    """Which parameters have no gradient after forward and backward of each rank's own batches, all
    in one process. ``missing``: by training step, then rank, their FQNs. ``finite``: every loss
    was. ``applicable``: why it could not be asked of this release, else null; then the rest says
    nothing."""

    missing: List[List[List[str]]] = field(default_factory=list)
    finite: bool = True
    applicable: Optional[str] = None

    def write(self, folder: Union[str, Path]) -> Path:
        return write_json(Path(folder) / SUSCEPTIBILITY_FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Union[str, Path]) -> "Susceptibility":
        raw = json.loads((Path(folder) / SUSCEPTIBILITY_FILE).read_text(encoding="utf-8"))
        return typing.cast("Susceptibility", _build(cls, raw))


def write_json(path: Path, value: Any) -> Path:
    """Writes atomically: a reader sees the old file or the whole new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    temporary.replace(path)
    return path


def _build(cls: Any, raw: Any) -> Any:
    """A dataclass of type ``cls`` from plain JSON, nested dataclasses included."""
    hints = typing.get_type_hints(cls)
    values: Dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        if f.name in raw:
            values[f.name] = _convert(hints[f.name], raw[f.name])
    return cls(**values)


def _convert(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Union:
        return _convert(next(a for a in args if a is not type(None)), value)
    if origin is list:
        return [_convert(args[0], item) for item in value]
    if origin is dict:
        return {key: _convert(args[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _build(hint, value)
    return value
