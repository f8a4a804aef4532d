"""What ranks recorded of values that must be equal on several ranks: plain frozen data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from typing import Annotated, Any, TypeVar

from moediag.protocol.names import plain_name
from moediag.records import dataclass

T = TypeVar("T")
Name = Annotated[str, plain_name]
# What reading an event raises that is not what its recorder writes.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
# How equality of a piece is kept, see recorder.laws.replica_sets.
REDUCED, PLACED, LOCAL, PART, PLAIN = "reduced", "placed", "local", "part", "plain"
# In place of a fingerprint: the parameter has no gradient.
NO_GRADIENT = ""
# Its gradient has only zeros.
ZERO_GRADIENT = "zero"


def trains(gradients: Iterable[str | None]) -> bool:
    """Whether all of these gradients are known and have other elements than zero."""
    return {None, NO_GRADIENT, ZERO_GRADIENT}.isdisjoint(gradients)


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
    #: ``50x8``, or "" if unknown.
    shape: str = ""


@dataclass(frozen=True, slots=True)
class LawCheck:
    """One rank when one optimizer is about to step. Each fingerprint belongs to the piece at the
    same position; None: it could not be read."""

    #: The same on all ranks whose optimizers have the same parameters.
    key: str
    #: Class of the optimizer; "": these are parameters of a model of which the rank's optimizers
    #: have only a part.
    optimizer: str
    step: int
    #: Earlier calls of the optimizer's step().
    count: int
    pieces: tuple[LawPiece, ...]
    #: Updates that its state has counted; -1: it counts none.
    age: float = -1.0
    #: Updates in a row until this one whose learning rates are all 0.
    zero_rates: int = 0
    #: Calls on the group of each replica set so far; None where there is no group.
    clocks: tuple[int | None, ...] = ()
    #: Before each of the last updates: the updates so far, and the clocks.
    past: tuple[tuple[int | None, ...], ...] = ()
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
    nonfinite: tuple[Name, ...] = ()
    #: The same of gradients.
    nonfinite_grads: tuple[Name, ...] = ()
    #: A GradScaler decides inside the step whether to use the gradients.
    scaled: bool = False
    #: The user's line that called step(), "file.py:12 function", or "".
    line: str = ""
    #: Of a model: the parameters that the rank's optimizers have.
    owned: tuple[Name, ...] = ()
    #: Position -> the optimizer's copy of the parameter, in the parameter's dtype.
    copies: Mapping[int, str | None] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(piece.name for piece in self.pieces)


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
    #: The user's line that made the data loader, or "".
    made: str = ""
    #: Of torch's sampler that shuffles all samples: which data they are, and the first indices of
    #: the pass. Else "".
    data: str = ""
    order: str = ""
    #: Of a DistributedSampler that shuffles.
    seed: int = 0
    epoch: int = 0
    #: Samples that a DistributedSampler knows of, and those of the loader that uses it.
    drawn: int = 0
    given: int = 0
    #: Samples of each batch of the loader, and rows of the first tensor; 0 if unknown.
    batch: int = 0
    rows: int = 0
    #: Into how many parts its loader divides the samples.
    divided: int = 1
    #: A tensor of it requires a gradient.
    graded: bool = False
    #: The updates so far when its loader began to give batches; -1 if unknown.
    began: int = -1


@dataclass(frozen=True, slots=True)
class ClipNorm:
    """The norm by which clip_grad_norm_ of torch or DeepSpeed scaled gradients of plain tensors."""

    step: int
    names: tuple[Name, ...]
    norm: float
    max_norm: float
    line: str = ""
    #: The loss scale by which the gradients were still multiplied; 0.0 if they were not.
    scale: float = 0.0
    #: The squared norm of each gradient, as far as this rank has it; only of DeepSpeed's.
    squares: tuple[float, ...] = ()

    @property
    def factor(self) -> float:
        """What the gradients were multiplied by."""
        return min(1.0, self.max_norm / (self.norm + 1e-6))


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """A tensor that the program declared to be equal on several ranks."""

    step: int
    #: Names of the mesh axes over which it is declared to be equal.
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    #: Which part of the whole tensor; "": all of it.
    part: str
    shape: str
    #: One of the axes is one of data parallelism.
    data: bool = False
    #: Fingerprint of integers; None of others.
    digest: str | None = None
    #: Of floats as :attr:`LawCheck.sketches`; None of others.
    sketch: tuple[float, float] | None = None
    line: str = ""


@dataclass(frozen=True, slots=True)
class ModelState:
    """What no optimizer changes, at a checked step."""

    step: int
    #: The ranks that average gradients of a model, and fingerprints of its buffers and of samples
    #: of its frozen parameters.
    buffers: tuple[tuple[tuple[int, ...], Mapping[Name, str | None]], ...] = ()
    #: Parameters with a gradient that no optimizer has, and their fingerprints.
    left_out: Mapping[Name, str | None] = field(default_factory=dict)
    #: Those of them that are plain tensors, which ``parameters()`` does not return.
    tensors: tuple[Name, ...] = ()
    #: Those of them that replaced parameters of the same shapes, which the optimizers still have.
    replaced: tuple[Name, ...] = ()
    #: Routers that do not train although their experts do.
    frozen_routers: tuple[Name, ...] = ()
    #: Updates of each AveragedModel so far.
    averages: tuple[int, ...] = ()
    #: Of each model that runs and does not train, the class and some matrices.
    followers: tuple[tuple[str, Mapping[Name, str | None]], ...] = ()
    #: No parameter of an optimizer that stepped had a gradient.
    idle: bool = False
    #: Classes of models in DistributedDataParallel of which no optimizer that stepped has a
    #: parameter, though they have gradients.
    unowned: tuple[str, ...] = ()
    #: The names of each parameter that has several.
    tied: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Cleared:
    """Gradients between two calls of an optimizer's ``step``."""

    #: The step of the first one.
    step: int
    #: Class of the optimizer, and the parameters that were followed.
    optimizer: str
    names: tuple[Name, ...]
    #: None of them was ever cleared before autograd added to it.
    kept: bool
    #: The user's line of the second call, or "".
    line: str = ""
    #: How often autograd added to each of them.
    times: int = 0
    #: Autograd added to them before another optimizer's update and after it, and nothing cleared
    #: them in between.
    mixed: bool = False
    #: The same, where the later backward may also have added to the other optimizer's gradients;
    #: None if no other optimizer made an update in between.
    crossed: bool | None = None
    #: The second update used the gradients of the first one: no backward came between them.
    again: bool = False


@dataclass(frozen=True, slots=True)
class Mode:
    """A model that is being trained ran with gradients, in training or in evaluation mode."""

    step: int
    #: Counts the models of the rank, from 0.
    model: int
    #: Its class.
    name: Name
    training: bool
    #: Classes of its modules that compute something else in evaluation mode.
    kinds: tuple[Name, ...] = ()


@dataclass(frozen=True, slots=True)
class ModeChange:
    """The mode of a model that runs with gradients changed; the first one is that of its first
    forward."""

    step: int
    model: int
    training: bool


@dataclass(frozen=True, slots=True)
class Load:
    """A call of ``Module.load_state_dict``."""

    line: str
    #: Parameters that it loaded.
    parameters: int
    #: At most 20 names of each.
    missing: tuple[Name, ...] = ()
    unexpected: tuple[Name, ...] = ()
    #: How many these are.
    counts: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter when FSDP2 sharded it."""

    #: The step whose check tells about it.
    step: int
    #: Fingerprint of a sample of the whole parameter.
    whole: str | None
    #: It had been loaded before.
    loaded: bool
    #: At the first check its shard was still the same.
    unchanged: bool


@dataclass(frozen=True, slots=True)
class RankLaws:
    """The laws' log of one rank."""

    checks: tuple[LawCheck, ...] = ()
    inputs: tuple[ModelInputs, ...] = ()
    norms: tuple[ClipNorm, ...] = ()
    declared: tuple[DeclaredTensor, ...] = ()
    models: tuple[ModelState, ...] = ()
    loads: tuple[Load, ...] = ()
    shards: Mapping[str, Shard] = field(default_factory=dict)
    cleared: tuple[Cleared, ...] = ()
    modes: tuple[Mode, ...] = ()
    #: At most 100 of a model.
    mode_changes: tuple[ModeChange, ...] = ()
    #: ``LAW`` or ``LAW:PATTERN``, as given.
    allowed: tuple[str, ...] = ()
    #: Kind -> events of all other kinds, as they were written.
    others: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    #: The first step after each save.
    kept: tuple[LawCheck, ...] = ()

    @property
    def pieces(self) -> list[LawPiece]:
        """Those of all checks."""
        return [piece for check in self.checks for piece in check.pieces]

    def values(self, key: str = "") -> dict[str, list[str | None]]:
        """The fingerprints of each parameter over the checks, of one optimizer or of all."""
        found: dict[str, list[str | None]] = {}
        for check in (one for one in self.checks if key in ("", one.key)):
            for piece, value in zip(check.pieces, check.params, strict=False):
                found.setdefault(piece.name, []).append(value)
        return found

    def of(self, kind: str, read: Callable[[Mapping[str, Any]], T]) -> tuple[T, ...]:
        """What ``read`` makes of each event of a kind that only one law knows, without events that
        it cannot read."""
        found = []
        for event in self.others.get(kind, ()):
            with suppress(*UNREADABLE):
                found.append(read(event))
        return tuple(found)

    def rows(self, kind: str, **fields: Callable[[Any], Any]) -> tuple[tuple[Any, ...], ...]:
        """The fields of these names of each event of a kind, each as its function reads it."""
        return self.of(kind, lambda event: tuple(read(event[n]) for n, read in fields.items()))


def plain_names(names: Iterable[Any]) -> tuple[str, ...]:
    """Names of parameters in an event, as users know them."""
    return tuple(map(plain_name, names))
