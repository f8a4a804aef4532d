"""What the worker measured on a rank."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from moediag.protocol.files import outcome_file
from moediag.protocol.number_text import natural
from moediag.protocol.recorded_state import ResumedRun
from moediag.protocol.stored import build, read_json, write_json

_BY_STEP = (
    "gradients", "replicas", "inputs", "updates", "applied", "metrics", "reference_metrics",
)  # fmt: skip


@dataclass(frozen=True)
class ExpertRows:
    """Which experts one rank holds of one expert parameter, row by row of its local part."""

    fqn: str
    # Per local row the expert of the checkpoint whose bytes it has, -1 for none of that layer.
    held: List[int]
    # Per local row the expert that sharding says it is (from the DTensor's placements, or the
    # rank's place on the ep axis), -1 where that is not known.
    declared: List[int]
    # Dim 0 of the whole parameter as the rank sees it: the number of experts when it is intact.
    rows: int
    placement: str = "plain"  # "Shard(0) on ep[2]"; "plain": the tensor is not distributed
    first: Optional[float] = None  # first element of the local part; null: there is none
    # The checkpoint's first element of the expert that belongs there; null: not known.
    should: Optional[float] = None
    # Experts of the checkpoint's parameter; null: as many as the layer is said to have. Some
    # families have identity experts beside it, or experts of attention.
    experts: Optional[int] = None


@dataclass(frozen=True)
class Multiple:
    """One tensor as a multiple of another."""

    factor: float  # factor * reference is nearest to the tensor (least squares)
    residual: float  # what is left then, relative to the tensor's own L2 norm
    numel: int = 1  # elements compared; a single element is always a multiple


@dataclass(frozen=True)
class GradientError:
    """One parameter's gradient compared with the reference, over this rank's shard."""

    # max |gradient - reference|; inf and nan are given as the strings that JSON allows.
    max_abs: float
    scale: float  # max |reference| over the shard
    wrong: bool  # see moediag.recorder.step.tensor_error
    missing: bool = False  # no gradient on this rank where the reference has a non-zero one
    placement: str = ""  # how the parameter lies on the mesh; "": a plain tensor
    # The gradient as a multiple of the reference; null: that is zero, or something is not finite.
    times: Optional[Multiple] = None


@dataclass(frozen=True)
class Sketch:
    """A tensor in a few numbers, see moediag.recorder.step.numbers."""

    norm: float  # L2; as text where it is not finite, and then there are no projections
    projections: List[float] = field(default_factory=list)  # random


@dataclass(frozen=True)
class Replica:
    """One parameter as this rank holds it."""

    slice: str  # the declared part of the whole tensor, e.g. "0:4,:,:"; ":" is the whole
    kind: str = "plain"  # "plain", or a DTensor's mesh such as "ep [0, 1]"
    weight: Optional[Sketch] = None  # after the optimizer's step
    # Before clipping; null also where it is not yet reduced, or sharded in another way.
    gradient: Optional[Sketch] = None
    has_gradient: Optional[bool] = None  # null before the first step
    # After the step: the optimizer's tensors of the weight's shape (exp_avg, …).
    state: Dict[str, Sketch] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReplicas:
    """What ranks can be compared by after one step. Empty or null where the wrapper does not show
    it."""

    # By FQN, without those that no other rank can hold a replica of.
    parameters: Dict[str, Replica] = field(default_factory=dict)
    dtype: str = "float32"  # of the parameters
    local_norm: Optional[float] = None  # L2 norm of this rank's own gradients, nothing reduced
    optimizer_steps: List[float] = field(default_factory=list)  # smallest and largest step count
    learning_rates: List[float] = field(default_factory=list)  # of each parameter group


@dataclass(frozen=True)
class Applied:
    """What the optimizer did in one step, compared with one process."""

    # By FQN; `scale` is how far training should have moved the parameter since the start.
    weights: Dict[str, GradientError] = field(default_factory=dict)
    rate: Optional[float] = None  # learning rate
    reference_rate: Optional[float] = None
    updates: Optional[float] = None  # number of updates so far
    reference_updates: Optional[float] = None


@dataclass(frozen=True)
class StepNumbers:
    """Of each step, in order."""

    losses: List[float] = field(default_factory=list)  # this rank's mean
    # L2 norm of this rank's own part of the gradient before clipping; null where it has none.
    norms: List[Optional[float]] = field(default_factory=list)


@dataclass(frozen=True)
class StateDifference:
    """Two states of one rank: only what differs."""

    # By FQN the largest |difference| of the local weights; null: one side lacks the tensor, or it
    # has another shape.
    weights: Dict[str, Optional[float]] = field(default_factory=dict)
    optimizer: Dict[str, Optional[float]] = field(default_factory=dict)  # by "FQN exp_avg"
    settings: List[str] = field(default_factory=list)  # of the optimizer's groups, in words
    compared: int = 0  # tensors


@dataclass(frozen=True)
class ResumeOutcome:
    """N steps in one go (``straight``), the same once more (``again``, the control), and ``after``
    steps, a save, a load into a new model and optimizer, and the steps that are left
    (``resumed``: those alone)."""

    through: str
    after: int
    straight: StepNumbers = field(default_factory=StepNumbers)
    again: StepNumbers = field(default_factory=StepNumbers)
    resumed: StepNumbers = field(default_factory=StepNumbers)
    # The state at the end of `again` compared with that of `straight`.
    control: StateDifference = field(default_factory=StateDifference)
    # The state after loading compared with that at the save, bit by bit.
    at_load: StateDifference = field(default_factory=StateDifference)
    # The resumed state at the end compared with that of `straight`.
    at_end: StateDifference = field(default_factory=StateDifference)
    # Per expert parameter what this rank's rows are after loading, by their bytes at the save on
    # any rank (`declared`: what they were at the save).
    loaded: List[ExpertRows] = field(default_factory=list)
    # Parameters of which every rank has a copy, but the copies differed at the save.
    apart: List[str] = field(default_factory=list)
    # The layout after loading, where it is another one. `straight` and `again` then got the state
    # at the save in memory, at that layout.
    layout: str = ""


# How a rank trains a parameter otherwise than one process: it does not require a gradient, it does
# though that of one process does not, or no optimizer has it.
FROZEN, THAWED, LEFT_OUT = "frozen", "thawed", "left out"
# Further: no rank holds it; another rank's optimizer updates it and this rank still has the old
# value; each rank has its own gradient of it, and their mean, or their sum, is that of one process;
# each element of its gradient is that of an element near it.
ABSENT, NOT_SENT, NOT_AVERAGED, NOT_SUMMED = "absent", "not sent", "not averaged", "not summed"
SHIFTED = "shifted"
# Why DistributedDataParallel reduces nothing: the module inside it is called (names of classes), it
# is called only under no_sync (names of classes), it does not know the parameter.
BARE, NO_SYNC, REPLACED = "bare", "no_sync", "replaced"


# What is wrong first at a module while all before it is right: its output, its input, the gradient
# of its input or output (on each rank a part of a sum that nothing adds up), or the loss; AFTER:
# none of these.
OUTPUT, INPUT, GRADIENT, PART, LOSS = "output", "input", "gradient", "part of a gradient", "loss"
AFTER = "after"


@dataclass(frozen=True)
class WrongModule:
    """Where a rank's step first differs from that of one process."""

    name: str  # "": the model itself
    kind: str = ""  # its class
    at: str = ""  # the line that called it
    what: str = ""  # one of the words above
    order: int = 0  # of several ranks' modules the lowest is the first
    of_output: bool = False  # a gradient is that of its output
    input_known: bool = True  # OUTPUT: its input was compared, and is right
    # INPUT: modules before it whose outputs one process has at other positions of the sequence.
    moved: List[str] = field(default_factory=list)
    # AFTER: calls of modules that were compared; and by what each forward's gradients are multiples
    # of the reference's.
    compared: int = 0
    factors: List[float] = field(default_factory=list)
    # AFTER: the low precision that the values of all float32 gradients of parameters have, and
    # those of the reference have not; "": none.
    rounded: str = ""


@dataclass(frozen=True)
class OutcomeTable:
    """Numbers of a program for its page; ranks that share the rows of one table give it the same
    title and columns."""

    title: str
    columns: List[str]
    rows: List[List[Any]]  # cells: text, whole numbers, fractions, null
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """What the worker measured on one rank; written only when the rank reached its end. Steps are
    numbered from 1 and written as strings (JSON)."""

    rank: int
    # By step and FQN, only of steps that were compared.
    gradients: Dict[str, Dict[str, GradientError]] = field(default_factory=dict)
    losses: List[float] = field(default_factory=list)  # one per step, this rank's mean
    reference_losses: List[float] = field(default_factory=list)  # one per step, mean over ranks
    # One per step, before clipping; null where the library does not report it.
    gradient_norms: List[Optional[float]] = field(default_factory=list)
    reference_norms: List[float] = field(default_factory=list)
    replicas: Dict[str, StepReplicas] = field(default_factory=dict)  # by step; "0": untrained
    steps_done: int = 0
    step_seconds: List[float] = field(default_factory=list)
    # Why this trial cannot be done on this stack (verdict not-applicable), else null.
    applicable: Optional[str] = None
    # Fix name ("": the unfixed step; "again": the same once more, which shows the noise) -> the
    # seconds of each round.
    cost: Dict[str, List[float]] = field(default_factory=dict)
    # How the trial was run, where a reader of the result must know (workarounds, look-alikes).
    notes: List[str] = field(default_factory=list)
    versions: Dict[str, Optional[str]] = field(default_factory=dict)
    # By step and FQN of a MoE block: the gradient of the block's input.
    inputs: Dict[str, Dict[str, GradientError]] = field(default_factory=dict)
    # Of a ResumeTask; losses and norms are then those of the straight run.
    resume: Optional[ResumeOutcome] = None
    # By step and FQN: how far the weights have moved since the start, beside the reference's.
    updates: Dict[str, Dict[str, Multiple]] = field(default_factory=dict)
    applied: Dict[str, Applied] = field(default_factory=dict)  # by step
    # By step and name, as this rank reports them after they were reduced over ranks.
    metrics: Dict[str, Dict[str, float]] = field(default_factory=dict)
    reference_metrics: Dict[str, Dict[str, float]] = field(default_factory=dict)
    tables: List[OutcomeTable] = field(default_factory=list)  # of a program
    # Of a VerifyTask: why its numbers cannot be compared with one process (verdict inconclusive),
    # what to do then, and what was not compared.
    incomparable: str = ""
    # Of a VerifyTask: how ranks trained on the same samples while one process had others, or "".
    repeats: str = ""
    # Of a VerifyTask: parameters that this rank does not train as one process does, by how: FROZEN
    # and the other words above.
    trained_otherwise: Dict[str, List[str]] = field(default_factory=dict)
    first_wrong: Optional[WrongModule] = None  # of a VerifyTask; null: not compared
    # Of a GenerateTask: what this rank generated, and what one process does.
    tokens: List[int] = field(default_factory=list)
    reference_tokens: List[int] = field(default_factory=list)
    # The largest difference of their logits, as a share of the largest logit.
    logit_error: Optional[float] = None
    # Of a SaveTask on rank 0: parameter or buffer -> what it holds, if not the checkpoint's bytes;
    # and how many were compared.
    saved: Dict[str, str] = field(default_factory=dict)
    saved_compared: int = 0
    micro_batches: int = 1  # backward calls in the first step
    resumed: Optional[ResumedRun] = None  # of a ResumedTask
    next_step: str = ""
    not_seen: List[str] = field(default_factory=list)

    def write(self, folder: Union[str, Path]) -> Path:
        return write_json(Path(folder) / outcome_file(self.rank), dataclasses.asdict(self))

    @classmethod
    def read(cls, path: Union[str, Path]) -> "Outcome":
        """Raises ValueError, also for a step that is no number."""
        found = typing.cast("Outcome", build(cls, read_json(path)))
        for name in _BY_STEP:
            for step in getattr(found, name):
                if natural(step) is None:
                    raise ValueError(f"{name}: {step[:20]!r} is no step")
        return found
