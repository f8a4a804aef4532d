"""What `moediag check` finds out without ranks: the plan, who holds which experts, and simulated
schedules."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

from moediag.protocol.files import CHECKED_FILE, simulated_file
from moediag.protocol.stored import build, read_json, write_json

# Levels of a finding. FAILS: the step cannot run, or a part of the request has no effect. MAY_FAIL:
# it fails under a condition that the text names. NOTE: legitimate, but good to know.
FAILS, MAY_FAIL, NOTE = "fails", "may fail", "note"


@dataclass(frozen=True)
class MeshSlice:
    """What one mesh axis does to a parameter."""

    axis: str  # as the library names it
    size: int
    # Tensor dim that it divides; null: each rank along it has the same part.
    dim: Optional[int] = None


@dataclass(frozen=True)
class PlannedParameter:
    """Parameters whose names differ only in numbers, with the same shape and placement."""

    name: str  # numbers of layers and experts are *
    count: int
    shape: List[int]
    dtype: str
    element: int  # bytes
    slices: List[MeshSlice] = field(default_factory=list)  # empty: whole on every rank
    most: int = 0  # elements of one of them on the rank that holds most
    least: int = 0  # on the rank that holds least
    routed: bool = False  # of routed experts
    rule: str = ""  # the rule that divides it, as the library's plan spells it; "": none
    where: str = ""  # file and line of that rule


@dataclass(frozen=True)
class PlannedUnit:
    """FSDP2 groups alike: their parameters are gathered and reduced together."""

    module: str  # numbers are *
    count: int
    axis: str  # the mesh axis over which it shards
    shards: int
    replicas: int  # ranks that hold the same shard; their gradients are all-reduced
    element: int  # bytes
    parameters: int  # tensors
    elements: int  # of them, without padding
    gathered: int  # elements of one all-gather, padding included
    gathers: int  # all-gathers in a step: 2 if freed after forward, else 1
    reduced_element: int = 0  # bytes of a gradient's element; 0: the same


@dataclass(frozen=True)
class ExpertRange:
    """The experts that each rank holds, for parameters with the same placement."""

    names: List[str]  # numbers are *
    experts: int
    copies: int  # how often each expert must be held
    # By rank: first and last + 1. Equal: none.
    ranges: List[Tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class CheckFinding:
    part: str  # plan | ownership | checkpoint | schedule
    level: str  # FAILS | MAY_FAIL | NOTE
    text: str
    where: str = ""  # file and line of the library that decides


@dataclass(frozen=True)
class SimulatedCase:
    """Simulated ranks of one step. ``folder`` holds their recorder logs."""

    name: str
    condition: str  # of the skewed ranks; "" for the control
    skewed: List[int]
    folder: str  # beside the outcome
    seconds: float = 0.0
    routed: bool = True  # False: by the model's own router, whose weights differ between ranks here


@dataclass(frozen=True)
class SimulatedRank:
    """How far a simulated rank of a user's program came. It is written at the first process group,
    when a field changes, and at the end."""

    rank: int
    world_size: int
    steps: int = 0  # optimizer steps that it made
    # The first read of data that other ranks would have sent: what, and the user's line; "": none.
    read: str = ""
    known: Optional[int] = None  # recorded calls before that read
    read_after: int = 0  # optimizer steps before it
    ended: str = ""  # steps: as requested; "": otherwise
    problem: str = ""  # why the program cannot be simulated

    def with_(self, folder: Union[str, Path], **known: Any) -> "SimulatedRank":
        """Returns it with these fields, and writes it."""
        found = dataclasses.replace(self, **known)
        write_json(Path(folder) / simulated_file(self.rank), dataclasses.asdict(found))
        return found

    @classmethod
    def of(cls, folder: Union[str, Path], rank: int) -> Optional["SimulatedRank"]:
        """Returns what ``rank`` wrote; None if it created no process group or cannot be read."""
        try:
            raw = read_json(Path(folder) / simulated_file(rank))
            return typing.cast("SimulatedRank", build(cls, raw))
        except (OSError, ValueError):
            return None


@dataclass(frozen=True)
class MemoryPhase:
    """The moment of a stretch of a step at which most is alive, in bytes of a rank."""

    name: str  # whose forward or backward runs
    parameters: int = 0  # the rank's own, with buffers
    gradients: int = 0  # the rank's own
    gathered: int = 0  # whole parameters and gradients of a unit, and their communication buffers
    activations: int = 0  # made in forward, or again in backward
    temporary: int = 0  # made in backward

    @property
    def total(self) -> int:
        whole = self.parameters + self.gradients + self.gathered
        return whole + self.activations + self.temporary


@dataclass(frozen=True)
class Traffic:
    """What a rank sends on one group in the forward and backward of a step, by a ring, without
    FSDP2's calls."""

    name: str  # of the mesh axis
    ranks: int  # of the group
    last: int  # the highest of them
    calls: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class MemoryTimeline:
    """Forward and backward of the full model, in the order of time."""

    phases: List[MemoryPhase] = field(default_factory=list)
    # With expert parallelism: the same if all peers send this rank as much as they can.
    worst: List[MemoryPhase] = field(default_factory=list)
    layers: int = 0  # that ran; the others are like them
    traffic: List[Traffic] = field(default_factory=list)
    # If asked for: which tensor holds how many bytes (0: freed) from then on, on which stream.
    events: List[Tuple[int, int, int]] = field(default_factory=list)
    before: int = 0  # those that make what lives before the step


@dataclass(frozen=True)
class Checked:
    """The answer of the worker."""

    model: str = ""  # class
    model_type: str = ""
    parameters: int = 0  # elements
    experts: int = 0  # routed ones of a block; 0: the model has none
    top_k: int = 0
    asked: str = ""  # how the library was called
    dtype: str = ""  # that from_pretrained is given
    dtype_from: str = ""  # why that one
    plan: List[PlannedParameter] = field(default_factory=list)
    stage_layers: int = 0  # with a pipeline: layers of the stage that was planned
    stages: List[int] = field(default_factory=list)  # layers of each, as the release divides them
    units: List[PlannedUnit] = field(default_factory=list)
    owners: List[ExpertRange] = field(default_factory=list)
    timeline: MemoryTimeline = field(default_factory=MemoryTimeline)  # no phases: not requested
    findings: List[CheckFinding] = field(default_factory=list)
    # The tiny model of the simulation: its own units, which the recorded calls are held against.
    simulated_units: List[PlannedUnit] = field(default_factory=list)
    simulated_layout: Dict[str, int] = field(default_factory=dict)
    cases: List[SimulatedCase] = field(default_factory=list)
    not_seen: List[str] = field(default_factory=list)
    problem: str = ""  # why nothing was checked
    seconds: Dict[str, float] = field(default_factory=dict)  # by part

    def write(self, folder: Union[str, Path]) -> Path:
        return write_json(Path(folder) / CHECKED_FILE, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Union[str, Path]) -> "Checked":
        return typing.cast("Checked", build(cls, read_json(Path(folder) / CHECKED_FILE)))
