"""What ranks recorded of values that must be equal on several ranks: plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# How equality of a piece is kept, see recorder.replica_sets.
REDUCED, PLACED, LOCAL, PART, PLAIN = "reduced", "placed", "local", "part", "plain"
# In place of a fingerprint: the parameter has no gradient.
NO_GRADIENT = ""
# Its gradient has only zeros.
ZERO_GRADIENT = "zero"


@dataclass(frozen=True, slots=True)
class LawPiece:
    """The part of a parameter that a rank holds."""

    name: str
    #: Which part, the same text on every rank that holds it; "": all of it.
    part: str
    #: REDUCED, PLACED, LOCAL, PART or PLAIN.
    how: str
    #: Ranks that hold the same part; of a PART those of all parts; empty if unknown.
    ranks: tuple[int, ...]
    #: The parameter group of the optimizer.
    group: int = 0
    #: Number of its replica set among those of the optimizer.
    replica_set: int = 0


@dataclass(frozen=True, slots=True)
class LawCheck:
    """One rank when one optimizer is about to step. Each fingerprint belongs to the piece at the
    same position; None: it could not be read."""

    #: The same on all ranks whose optimizers have the same parameters.
    key: str
    #: Class of the optimizer.
    optimizer: str
    step: int
    #: Earlier calls of the optimizer's step().
    count: int
    pieces: tuple[LawPiece, ...]
    #: Calls on the group of each replica set so far; None where there is no group.
    clocks: tuple[int | None, ...] = ()
    params: tuple[str | None, ...] = ()
    #: NO_GRADIENT or ZERO_GRADIENT where that is known.
    grads: tuple[str | None, ...] = ()
    #: Position -> sum with pseudo-random signs and norm, of gradients of PLACED pieces.
    sketches: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    #: By name: ``exp_avg``.
    state: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    #: The numbers of each parameter group, as text: ``{"lr": "0.001"}``.
    hyper: tuple[Mapping[str, str], ...] = ()
    #: Parameters with an element that is not finite; at most 20.
    nonfinite: tuple[str, ...] = ()
    #: The same of gradients.
    nonfinite_grads: tuple[str, ...] = ()
    #: A GradScaler decides inside the step whether to use the gradients.
    scaled: bool = False
    #: The user's line that called step(), "file.py:12 function", or "".
    line: str = ""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What a whole model was called with, once."""

    step: int
    #: Counts the calls of the step, from 0.
    forward: int
    #: Fingerprint of all tensors.
    digest: str
    #: Ranks between which its wrapper averages gradients; empty if unknown.
    over: tuple[int, ...] = ()
    #: Class of the sampler of the data loader that gave the last batch, or "".
    sampler: str = ""
    #: Of a DistributedSampler: how many parts it makes, and which one is its own; else 0 and -1.
    replicas: int = 0
    number: int = -1
    #: The user's line that asked for the batch, or "".
    line: str = ""


@dataclass(frozen=True, slots=True)
class SameOrder:
    """A DistributedSampler that shuffles gave the same order in two complete passes of training."""

    line: str
    epoch: int
    sampler: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class ClipNorm:
    """The norm by which clip_grad_norm_ scaled the gradients of plain parameters."""

    step: int
    names: tuple[str, ...]
    norm: float
    max_norm: float
    line: str = ""

    @property
    def factor(self) -> float:
        """What the gradients were multiplied by."""
        return min(1.0, self.max_norm / (self.norm + 1e-6))


@dataclass(frozen=True, slots=True)
class RankLaws:
    """The laws' log of one rank."""

    checks: tuple[LawCheck, ...] = ()
    inputs: tuple[ModelInputs, ...] = ()
    same_order: tuple[SameOrder, ...] = ()
    norms: tuple[ClipNorm, ...] = ()
