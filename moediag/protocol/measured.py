"""What `moediag verify` asks the processes of a job to measure, and what they answer.

The request travels in one environment variable. Each rank answers with one JSON file and with
tensors: those at its start and those of each step.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterable, List, Optional, Sequence, Union

from moediag.protocol.stored import build, parse_json, read_ranks, write_json

ENV_MEASURE = "MOEDIAG_MEASURE"  # a MeasureRequest as JSON
# In the folder of the measurements. The control side creates it when all ranks have answered; ranks
# then end with exit code 0.
MEASURED_ENOUGH = "enough"

# How one process is given the samples of ranks: the batches of all ranks as one, or one after the
# other.
JOINED, IN_TURN = "joined", "in turn"

# From the coarsest dtype to the finest.
_COARSE = ("float8_e5m2", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64")


def measured_file(rank: int) -> str:
    """What a rank measured, see :class:`Measured`; complete from the first step on."""
    return f"rank-{rank}.measured.json"


def start_tensors(rank: int) -> str:
    """torch.save: the rank's parts of all parameters and buffers before the first forward."""
    return f"rank-{rank}.start.pt"


def modules_file(rank: int) -> str:
    """torch.save: the calls of the model's modules in the first step."""
    return f"rank-{rank}.modules.pt"


def drawn_tensors(rank: int) -> str:
    """torch.save: the samples that the rank drew until the end of its last step."""
    return f"rank-{rank}.drawn.pt"


def step_tensors(rank: int, step: int) -> str:
    """torch.save: ``gradients`` (before clipping) and ``weights`` (after the step)."""
    return f"rank-{rank}.step-{step}.pt"


@dataclass(frozen=True)
class MeasureRequest:
    """What to measure."""

    folder: str  # receives the files
    steps: int  # steps of the optimizer
    # The measurements of another run: this run starts from its weights.
    start_from: Optional[str] = None
    # Change each weight at random by one rounding error of this dtype.
    rounding: Optional[str] = None
    merged: int = 1  # so many steps of the program are made one: one process sees what ranks see
    # How it is given the samples that the ranks of ``start_from`` drew; "": it draws its own.
    replayed: str = ""

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def of_text(cls, text: str) -> "MeasureRequest":
        return typing.cast("MeasureRequest", build(cls, parse_json(text)))


@dataclass(frozen=True)
class MeasuredStep:
    """One step of one rank, without its tensors."""

    # One hash per sample that the model was called with.
    samples: List[str] = field(default_factory=list)
    # What ``backward`` was called on, in order.
    losses: List[float] = field(default_factory=list)
    # The norm that scaled the gradients; null: not clipped, or not known.
    norm: Optional[float] = None
    clips: int = 0  # calls that clipped
    # Of all elements of these samples in any order, as hexadecimal text: ranks that have parts of
    # each sample have the sum together. "": the model was called without tensors.
    total: str = ""
    elements: int = 0  # of these samples
    rates: Dict[str, float] = field(default_factory=dict)  # learning rate by parameter
    # Updates that the optimizer has counted by parameter, with this step; empty if it counts none.
    updates: Dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What one rank measured, without the tensors."""

    rank: int
    world_size: int
    pid: int
    python: str  # its interpreter
    done: bool = False  # all requested steps are measured
    steps: List[MeasuredStep] = field(default_factory=list)
    # dtypes that the parameters have or that the model computes in.
    dtypes: List[str] = field(default_factory=list)
    random: bool = False  # the model drew random numbers in a forward
    # Why its numbers cannot be compared.
    problems: List[str] = field(default_factory=list)
    not_checked: List[str] = field(default_factory=list)
    layout: Dict[str, int] = field(default_factory=dict)  # axes of the meshes of its parameters
    # The class of a module whose result for a sample depends on the rest of the batch, or "".
    across_samples: str = ""
    auxiliary: bool = False  # the model returns an auxiliary loss
    foreign: bool = False  # an optimizer that stepped has parameters of no model that was called
    averages_over: List[int] = field(default_factory=list)  # ranks that average gradients; or empty
    # ZeRO clears gradients after each step, so several steps cannot be made one.
    clears: bool = False
    merged: int = 1  # of a reference: so many steps of the program are one
    replayed: str = ""  # of a reference: how it was given the samples of the ranks
    drawn: str = ""  # what of its samples can be given to another process; "": nothing
    form: str = ""  # of these samples: a hash of all sizes but the number of rows
    # Ranks that exchange values between the begin of a forward and its backward, by their group.
    gathers: List[List[int]] = field(default_factory=list)
    # Of a reference: other name of a parameter -> its first name.
    tied: Dict[str, str] = field(default_factory=dict)
    # Of a reference: parameters of which only their bytes say which part each rank holds.
    by_bytes: List[str] = field(default_factory=list)
    # Of a reference: by rank, what to add to numbers in its names (layers that a stage counts from
    # 0), by the text before them.
    renamed: Dict[str, Dict[str, int]] = field(default_factory=dict)
    # Of a reference: parameters that no rank of the distributed run holds.
    absent: List[str] = field(default_factory=list)
    # What DistributedDataParallel does not reduce, by reason: see moediag.protocol.outcome.
    reduction: Dict[str, List[str]] = field(default_factory=dict)
    size: int = 0  # bytes that its files take

    def write(self, folder: Union[str, Path]) -> Path:
        return write_json(Path(folder) / measured_file(self.rank), dataclasses.asdict(self))


def read_measured(folder: Union[str, Path]) -> Dict[int, Measured]:
    """What the ranks of one run have measured so far."""
    return read_ranks(folder, "rank-*.measured.json", Measured)


def coarsest_dtype(answers: Iterable[Measured]) -> str:
    """Returns the dtype whose rounding decides how exactly these runs can be compared."""
    dtypes = {dtype for one in answers for dtype in one.dtypes}
    return next((dtype for dtype in _COARSE if dtype in dtypes), "float32")


def split_alike(ranks: Sequence[str], alone: str) -> bool:
    """Whether the ranks together saw all elements of the samples of ``alone``, each equally often:
    parts of sequences, or the same documents in other rows. Totals as hexadecimal text; "": a rank
    that saw no samples, as a later stage of a pipeline."""
    if not alone or not any(ranks):
        return False
    found = sum(int(one or "0", 16) for one in ranks) % (1 << 64)
    return any(
        (found - times * int(alone, 16)) % (1 << 64) == 0 for times in range(1, len(ranks) + 1)
    )
