"""What `moediag resume` asks the processes of a job to record, and what they answer.

The request travels in the variable of :mod:`moediag.protocol.measured`. Each rank answers with one
JSON file, and with one for each step whose state it recorded: the state that the step began with.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

from moediag.protocol.stored import build, parse_json, read_json, read_ranks, write_json

# Kinds of what a state consists of.
PARAMETER, BUFFER, FROZEN, MODE = "parameter", "buffer", "frozen flag", "mode of a module"
STATE, COUNT, SETTING = "optimizer state", "step count", "optimizer setting"
MAIN = "main weight"  # of an optimizer that keeps its own copies of the parameters
SCHEDULER, SCALER, COPY, GENERATOR = "scheduler", "loss scaler", "copy of the weights", "generator"
BATCH, LOSS = "batch", "loss"

# In the folder of the recordings: the number of steps after which a rank saved a checkpoint.
SAVED = "saved-after-"
_KIND = "states"


def recorded_file(rank: int) -> str:
    """What a rank recorded, see :class:`Recorded`."""
    return f"rank-{rank}.recorded.json"


def state_file(rank: int, step: int) -> str:
    """The state that step ``step`` (from 1) began with, see :class:`RecordedStep`."""
    return f"rank-{rank}.state-{step}.json"


@dataclass(frozen=True)
class StateRequest:
    """What to record."""

    folder: str  # receives the files
    # The first step whose state is kept. 0: the one after the first checkpoint.
    first: int = 0
    steps: int = 1  # whose state is kept
    after: int = 1  # with ``first`` 0: steps that must be made before that checkpoint
    to_end: bool = False  # let the program end by itself
    # The one from which a Trainer of transformers resumes whose program names none.
    checkpoint: str = ""

    def text(self) -> str:
        return json.dumps({"kind": _KIND, **dataclasses.asdict(self)})

    @classmethod
    def of_text(cls, text: str) -> "Optional[StateRequest]":
        """None if ``text`` is another request."""
        raw = parse_json(text)
        if not isinstance(raw, dict) or raw.get("kind") != _KIND:
            return None
        return typing.cast("StateRequest", build(cls, raw))


@dataclass(frozen=True)
class Part:
    """Which part of a whole tensor a rank holds; it may be all of it."""

    value: str  # sums over the parts to the whole's, see moediag.recorder.step.numbers
    places: str  # a fingerprint of its positions in the whole
    elements: int
    all: int  # elements of the whole
    first: Optional[int] = None  # its first row, if it is whole rows


@dataclass(frozen=True)
class Item:
    """One tensor or value of a state."""

    value: str  # a fingerprint of the tensor's bytes, or the value as text
    # Of a tensor of floating point, see moediag.recorder.step.numbers: the sum with random signs,
    # and the norm; empty: not known.
    sketch: List[Any] = field(default_factory=list)
    rows: List[str] = field(default_factory=list)  # fingerprints of its rows, of few rows
    part: Optional[Part] = None  # null: it is no tensor, or its place is not known


Items = Dict[str, Dict[str, Item]]  # kind -> name


@dataclass(frozen=True)
class RecordedStep:
    """The state that one step began with: the model's before the forward, the optimizer's before
    its update."""

    step: int
    items: Items = field(default_factory=dict)

    def write(self, folder: Union[str, Path], rank: int) -> Path:
        path = Path(folder) / state_file(rank, self.step)
        return write_json(path, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: Union[str, Path], rank: int, step: int) -> "Optional[RecordedStep]":
        """None if it was not recorded, or cannot be read."""
        try:
            raw = read_json(Path(folder) / state_file(rank, step))
            return typing.cast("RecordedStep", build(cls, raw))
        except (OSError, ValueError):
            return None


@dataclass(frozen=True)
class Transfer:
    """What one call wrote to a checkpoint, read from one, or put into an object."""

    step: int  # optimizer steps made before
    what: str  # torch.save, …, or the class whose load_state_dict it was
    where: str = ""  # the user's line, train.py:12 save
    path: str = ""
    values: List[str] = field(default_factory=list)  # fingerprints of tensors
    # Plain values by the last key that leads to them.
    scalars: Dict[str, List[str]] = field(default_factory=dict)
    elements: int = 0  # of all tensors of floating point


@dataclass(frozen=True)
class Recorded:
    """What one rank recorded, without the states."""

    rank: int
    world_size: int
    pid: int
    done: bool = False  # all that was requested is recorded
    made: int = 0  # optimizer steps
    trainer: bool = False  # a Trainer of transformers runs the steps
    saved_after: Optional[int] = None  # steps made before the first checkpoint that counts
    # One number for the samples of each step, hexadecimal: the sum of their hashes.
    batches: List[str] = field(default_factory=list)
    losses: List[List[float]] = field(default_factory=list)  # of each step
    saves: List[Transfer] = field(default_factory=list)
    loads: List[Transfer] = field(default_factory=list)
    puts: List[Transfer] = field(default_factory=list)  # into a model, an optimizer, …
    problems: List[str] = field(default_factory=list)

    def write(self, folder: Union[str, Path]) -> Path:
        return write_json(Path(folder) / recorded_file(self.rank), dataclasses.asdict(self))


def read_recorded(folder: Union[str, Path]) -> Dict[int, Recorded]:
    """What the ranks of one run have recorded so far."""
    return read_ranks(folder, "rank-*.recorded.json", Recorded)


# Why a value is not as it was at the save.
NOT_SAVED, NOT_LOADED, NOT_PUT = "not saved", "not loaded", "not put back"
ELSEWHERE, RESET, MOVED = "loaded into something else", "reset afterwards", "rows moved"
RESTARTED = "restarted"  # the samples
DRAWN = "drawn from afterwards"  # a generator; also a Transfer of what such a state would be
INVENTED = "invented"  # it did not exist at the save
FROM_RANK = "another rank's"


@dataclass(frozen=True)
class Lost:
    """Values of one kind that the resumed run began with otherwise, for the same reason."""

    kind: str
    names: List[str]
    why: str = ""  # one of the words above; "": not known
    # Of the first: the distance of the two tensors relative to the norm at the save; null: it is
    # no tensor of floating point.
    distance: Optional[float] = None
    expected: str = ""  # of the first, if it is plain: the value at the save
    got: str = ""
    other: str = ""  # where it is instead, or the user's line that did it


@dataclass(frozen=True)
class ResumedRun:
    """A run that resumed, compared with the interrupted run and with uninterrupted ones."""

    after: int  # steps before the save
    steps: int  # compared after it; 0: only the state before the first step
    # The ranks that saved and those that resumed, if these are not as many: then whole tensors are
    # compared, put together from all ranks.
    layouts: List[int] = field(default_factory=list)
    compared: int = 0  # values that were compared at the first step
    # What differs in the state that the first step after the save began with.
    lost: List[Lost] = field(default_factory=list)
    # The first later step with a difference, and what differs there; null: none.
    later: Optional[int] = None
    later_lost: List[Lost] = field(default_factory=list)
    # The largest difference of the loss from the uninterrupted run, by step; null: not known.
    losses: List[Optional[float]] = field(default_factory=list)
    # By kind, how many values were not judged because two uninterrupted runs differ in them.
    noise: Dict[str, int] = field(default_factory=dict)
    # With ``layouts``: values of which the ranks together do not show the whole.
    not_known: List[str] = field(default_factory=list)
    files: List[str] = field(default_factory=list)  # what was saved, and by which line
    loaded: List[str] = field(default_factory=list)
