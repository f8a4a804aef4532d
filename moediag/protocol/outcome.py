"""What the worker measured on a rank."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from moediag.protocol.files import SUSCEPTIBILITY_FILE, outcome_file
from moediag.protocol.stored import build, write_json


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
    round. ``notes``: facts about how the trial was run that a reader of the result must know
    (shims, look-alikes). ``resume``: of a resume trial, whose losses and norms are the straight
    run's. ``applied``: by step. ``metrics``: by step and name, as this rank reports them after they
    were reduced over ranks; ``reference_metrics``: what they are. ``tables``: of a program.
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
        return typing.cast("Outcome", build(cls, raw))


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
        return typing.cast("Susceptibility", build(cls, raw))
