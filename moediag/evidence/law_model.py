"""What ranks recorded of values that must be equal on several ranks: plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# How equality of a piece is kept, see recorder.replica_sets.
REDUCED, PLACED, LOCAL, PART, PLAIN = "reduced", "placed", "local", "part", "plain"
# In place of a fingerprint: the parameter has no gradient.
NO_GRADIENT = ""


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
    #: NO_GRADIENT where there is none.
    grads: tuple[str | None, ...] = ()
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
class RankLaws:
    """The laws' log of one rank."""

    checks: tuple[LawCheck, ...] = ()
