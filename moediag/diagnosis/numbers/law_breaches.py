"""Which differences between replicas cannot occur in a healthy program, and the earliest reason.

Parameters that a reduction keeps equal must be equal whenever an optimizer is about to step. Other
differences explain it: of what differed at the compared step before, numbers of the optimizer come
before gradients, and gradients before the optimizer's state.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise

from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.numbers.law_splits import (
    GRADIENTS,
    HYPER,
    LOSS_SCALE,
    PARAMETERS,
    STATE,
    WRITTEN,
    History,
    Split,
    checks_of,
    histories,
    history_of,
)
from moediag.evidence.law_model import (
    LOCAL,
    PART,
    PLACED,
    PLAIN,
    REDUCED,
    LawPiece,
    trains,
)
from moediag.evidence.model import Evidence, recorded
from moediag.records import dataclass

_ENOUGH = 3  # checked steps


@dataclass(frozen=True, slots=True)
class Breach:
    """Replicas that differ."""

    history: History
    parameters: Split | None
    """The parameters that differ; None where only numbers of the optimizer do."""
    reason: Split | None
    """What differed before the parameters did; None if that is unknown, or nothing did."""
    before: int | None
    """The last compared step at which the parameters were equal; None: they never were."""
    counts: dict[int, int] | None = None
    """Rank -> calls of step() until then, where these differ."""

    @property
    def initial(self) -> bool:
        """The parameters differed before the first update."""
        return self.parameters is not None and self.before is None

    @property
    def step(self) -> int:
        """The step in which it shows first."""
        first = self.parameters if self.parameters is not None else self.reason
        return first.step if first is not None else 0

    @property
    def odd(self) -> tuple[int, ...]:
        """The single rank that differs from others that agree, or (). Before the first update, the
        rank that differs may be the only one that loaded the checkpoint; and what only the first
        rank does may be what the others should have done."""
        split = self.reason or self.parameters
        if split is None or self.initial or not split.same_sides or len(split.sides) != 2:
            return ()
        known = self.reason is not None or self.step - (self.before or 0) == 1
        if self.counts is not None:  # the rank that made another number of updates, alone
            known = {self.counts[r] for r in split.sides[0]}.isdisjoint(
                self.counts[r] for r in split.sides[1]
            )
        who = agreement.minority(split.sides)
        return who if known and len(who) == 1 and who != (min(self.history.ranks),) else ()


@dataclass(frozen=True, slots=True)
class Apart:
    """Parameters that were equal on all ranks at first and differ later, without a wrapper that
    keeps them equal."""

    names: tuple[str, ...]
    since: int
    """The first step in which they differ."""
    whole: bool
    """These are all matrices of the model or of a wrapper; otherwise the others stayed equal while
    they trained."""
    lone_group: bool = False
    """Each rank wrapped the model for data parallelism over itself alone."""
    still: tuple[int, ...] = ()
    """Ranks on which all of these kept their first values although they had gradients, while they
    changed on the others."""
    unsynchronised: bool = False
    """A wrapper was told not to reduce their gradients in some updates."""
    breach: Breach | None = None
    """What differed before the parameters of an optimizer did, if they are all of the model."""
    same_loss: bool = False
    """Before the first update the gradients of other matrices were equal on all ranks, and those of
    these were not: later all parameters may differ."""
    alone: bool = False
    """The other matrices differed from the beginning, as parts of a divided model do."""
    beside: bool = False
    """They are no matrices, and all matrices are DTensors or kept equal by a wrapper."""
    every: tuple[str, ...] = ()
    """All parameters that differ later; with ``same_loss`` more than ``names``."""


@dataclass(frozen=True, slots=True)
class LawFacts:
    """What the ranks' records say about the laws."""

    checked: int
    """Steps at which at least one replica set was compared; in a job of one rank, those that it
    recorded."""
    breach: Breach | None
    """The first difference that no healthy program has."""
    apart: Apart | None = None
    """Parameters that were equal on all ranks at first and differ later, and that no wrapper keeps
    equal."""
    apart_kept: Apart | None = None
    """The same without models that all ranks discarded during training, as copies that each rank
    adapts (MAML)."""
    numbers: Breach | None = None
    """Numbers of an optimizer that differ at the end between ranks whose parameters stay equal
    without a wrapper."""
    written: Breach | None = None
    """Parameters of wrappers that only the program writes, and that differ."""
    not_checked: tuple[str, ...] = ()


def law_facts(evidence: Evidence) -> LawFacts:
    checks = checks_of(evidence)
    found = histories(checks)
    breaches = [b for b in map(_breach, found) if b is not None]
    written = [b for b in breaches if b.history.how == WRITTEN]
    breaches = [b for b in breaches if b not in written]
    compared = {m.step for h in found if h.how in (REDUCED, PLACED) for m in h.moments}
    if evidence.world_size == 1:
        compared = {step for _, step in checks}
    plain = _plain(evidence, frozenset())
    compared |= {*plain.steps} if plain.kept else set()
    return LawFacts(
        checked=len(compared),
        breach=min(breaches, key=lambda b: (b.step, b.history.ranks), default=None),
        apart=_apart(evidence, plain),
        apart_kept=_apart(evidence, _plain(evidence, _discarded(evidence))),
        numbers=_numbers_apart(evidence, plain) if plain.kept and not plain.apart else None,
        written=written[0] if written else None,
        not_checked=_not_checked(evidence, found, {*plain.kept} == plain.matrices),
    )


def _breach(history: History) -> Breach | None:
    parameters, first = None, history.moments[0]
    if history.how in (REDUCED, WRITTEN):
        parameters = history.first(PARAMETERS)
    # Later each rank computes the update itself, and rounding may differ between ranks.
    elif history.how == PLACED and not any(first.counts.values()):
        parameters = first.splits.get(PARAMETERS)
    if parameters is not None:
        return _of_parameters(history, parameters)
    if history.how == PLACED and (large := _large(history)) is not None:
        return large
    if (scales := _scales(history)) is not None:
        return scales
    last = history.moments[-1]
    hyper = last.splits.get(HYPER)
    if len(set(last.counts.values())) > 1:
        return None  # at different points of a schedule
    if hyper is None or history.how not in (REDUCED, PLACED, PART):
        return None
    first_hyper = history.first(HYPER)
    return Breach(history, None, first_hyper, None)


def _scales(history: History) -> Breach | None:
    """Losses that were multiplied by different scales in two compared steps, before gradients of
    them were added. A rank that skipped a step has counted one call less."""
    splits = [m.splits[HYPER] for m in history.moments if HYPER in m.splits]
    apart = [split for split in splits if split.names[0] == LOSS_SCALE]
    if len(apart) < 2 or history.how not in (REDUCED, PLACED, PART):
        return None
    return Breach(history, None, apart[0], None)


def _large(history: History) -> Breach | None:
    """Gradients of equal parameters that differ by more than rounding, after which the parameters
    differ, too."""
    for moment, later in pairwise(history.moments):
        split = moment.splits.get(GRADIENTS)
        if split is None or PARAMETERS in moment.splits or PARAMETERS not in later.splits:
            continue
        if split.large and len(set(moment.counts.values())) == 1:
            return Breach(history, later.splits[PARAMETERS], split, moment.step)
    return None


def _of_parameters(history: History, parameters: Split) -> Breach:
    earlier = history.before(parameters.step)
    if earlier is None:
        return Breach(history, parameters, None, None)
    reason = next(
        (earlier.splits[what] for what in (HYPER, GRADIENTS, STATE) if what in earlier.splits),
        None,
    )
    moment = next(m for m in history.moments if m.step == parameters.step)
    if reason is None and HYPER in moment.splits and parameters.step - earlier.step > 1:
        reason = moment.splits[HYPER]
    if reason is not None and not reason.large:
        first = history.first(reason.what)
        reason = first if first is not None and first.sides == reason.sides else reason
    counts = dict(moment.counts) if len(set(moment.counts.values())) > 1 else None
    return Breach(history, parameters, reason, earlier.step, counts)


def _discarded(evidence: Evidence) -> Set[str]:
    """The models that all ranks discarded while they trained others."""
    rows = (own.rows("discarded", model=str) for own in recorded(evidence).values())
    every = [{model for (model,) in of} for of in rows]
    return set.intersection(*every) if every else set()


@dataclass(frozen=True, slots=True)
class _Plain:
    """Parameters that no wrapper keeps equal, in the steps that all ranks recorded."""

    steps: tuple[int, ...]
    equal: Set[str]
    """Those that were equal on all ranks at first."""
    apart: Mapping[str, int]
    """Of these, the ones that differ later, with the first step."""
    matrices: Set[str]
    """Only matrices count as equal by more than chance: biases of zeros and norms of ones are equal
    on ranks that hold different parts of a model."""
    divided: Set[str]
    """The modules of matrices that are DTensors of which ranks have different parts."""
    zeros: Set[str]
    """Matrices that had only zeros at first, as the last ones of adapters have."""
    values: Mapping[str, Sequence[Mapping[int, str | None]]]
    """The values by rank in each step."""
    grads: Mapping[str, Sequence[set[str | None]]]

    @property
    def kept(self) -> list[str]:
        """Matrices that stayed equal although they changed."""
        return list(filter(self.moved, (self.equal & self.matrices) - self.apart.keys()))

    def moved(self, name: str) -> bool:
        """Whether it had several values, as a frozen one has not."""
        return len({value for row in self.values[name] for value in row.values()}) > 1


def _plain(evidence: Evidence, without: Set[str]) -> _Plain:
    """Leaves out the parameters of the models ``without``."""
    found: list[tuple[int, str, dict[int, str | None]]] = []
    shapes: dict[str, str] = {}
    grads: dict[str, list[set[str | None]]] = defaultdict(list)
    local, divided = _unsynchronised(evidence), set[str]()
    for (key, step), by_rank in checks_of(evidence).items():
        if len(by_rank) < max(evidence.world_size, 2) or key.partition(".")[0] in without:
            continue
        first = next(iter(by_rank.values()))
        if any(check.key != first.key for check in by_rank.values()):
            continue  # a rank has experts of its own
        for at, piece in enumerate(first.pieces):
            row = {rank: check.params[at] for rank, check in by_rank.items()}
            pieces = [check.pieces[at] for check in by_rank.values()]
            shards = len({one.part for one in pieces}) > 1  # of FSDP2, which may begin equal
            plain = piece.name in local or all(map(_alone, pieces))
            if shards and "x" in piece.shape and "=" in piece.part:
                divided.add(piece.name.rpartition(".")[0])
            if plain and not shards and None not in row.values():
                found.append((step, piece.name, row))
                shapes.setdefault(piece.name, piece.shape)
                grads[piece.name].append({check.grads[at] for check in by_rank.values()})
    values: dict[str, list[dict[int, str | None]]] = defaultdict(list)
    apart: dict[str, int] = {}
    for step, name, row in found:
        values[name].append(row)
        if len({*values[name][0].values()}) == 1 < len({*row.values()}):
            apart.setdefault(name, step)
    firsts = {name: {*rows[0].values()} for name, rows in values.items()}
    equal = {name for name, of in firsts.items() if len(of) == 1}
    sizes = {n: math.prod(map(int, s.split("x"))) for n, s in shapes.items() if "x" in s}
    matrices, zeros = sizes.keys(), {n for n, size in sizes.items() if firsts[n] == {f"{size:x}"}}
    # A bias is a slice, too, where the matrix of its layer is: all biases begin with zeros.
    slices = {name.rpartition(".")[0] for name in matrices - equal}
    apart = {n: s for n, s in apart.items() if n in matrices or n.rpartition(".")[0] not in slices}
    steps = tuple(dict.fromkeys(step for step, _, _ in found))
    return _Plain(steps, equal, apart, matrices, divided, zeros, values, grads)


def _apart(evidence: Evidence, plain: _Plain) -> Apart | None:
    """Parameters that nothing keeps equal, and that all ranks had in common at first."""
    matrices, apart, grads = plain.matrices & plain.equal, dict(plain.apart), plain.grads
    # A norm that a plan of tensor parallelism leaves out: all matrices are DTensors. Or a scalar
    # that a wrapper does not have.
    pieces = [piece for own in recorded(evidence).values() for piece in own.pieces]
    kept = {(piece.how, len(piece.ranks)) for piece in pieces}
    wrapped = kept == {(REDUCED, evidence.world_size), (PLAIN, 0)}
    parts = plain.divided and not any("expert" in piece.name.lower() for piece in pieces)
    if parts and not plain.matrices:  # a bias of a part is a part, too
        apart = {n: s for n, s in apart.items() if n.rpartition(".")[0] not in plain.divided}
    placed = any(piece.how == PLACED for piece in pieces)
    beside = not plain.matrices and bool(wrapped or placed or parts)
    if not apart or not (matrices or beside):
        return None
    whole = set(filter(plain.moved, plain.matrices)) <= apart.keys() and not beside
    alike = [n for n in matrices if len(grads[n][0]) == 1 and trains(grads[n][0])]
    unlike = [name for name in apart if len(grads[name][0]) > 1]
    alone = not whole and not plain.kept
    every = tuple(apart)
    if not plain.kept and alike and unlike:
        whole, alone = False, False
        apart = {name: apart[name] for name in unlike}
    local = _unsynchronised(evidence).intersection(apart)
    if local:
        whole, alone = True, False
        apart = {name: apart[name] for name in apart if name in local}
    if alone and not beside:
        # Parts of what is divided may begin with zeros, and replicas may become equal again.
        last = {n: len(set(plain.values[n][-1].values())) for n in apart}
        apart = {n: s for n, s in apart.items() if n not in plain.zeros and last[n] > 1}
        if not matrices & apart.keys():
            return None
        every = tuple(apart)
    groups = {piece.ranks for piece in pieces if piece.ranks}
    still = {_still(plain.values[n]) if all(map(trains, grads[n])) else () for n in apart}
    return Apart(
        names=tuple(apart),
        since=min(apart.values()),
        whole=whole,
        lone_group=whole and bool(groups) and all(len(one) == 1 for one in groups),
        still=still.pop() if len(still) == 1 and plain.kept else (),
        unsynchronised=bool(local),
        breach=None if plain.kept else _why_apart(evidence, {*every}),
        same_loss=not (plain.kept or whole or alone),
        alone=alone,
        beside=beside,
        every=every,
    )


def _why_apart(evidence: Evidence, names: Set[str]) -> Breach | None:
    history = history_of(checks_of(evidence), names)
    parameters = history.first(PARAMETERS) if history is not None else None
    if history is None or parameters is None:
        return None
    return _of_parameters(history, parameters)


def _numbers_apart(evidence: Evidence, plain: _Plain) -> Breach | None:
    history = history_of(checks_of(evidence), {*plain.kept})
    last = history.moments[-1] if history is not None else None
    if history is None or last is None or len(set(last.counts.values())) > 1:
        return None
    return Breach(history, None, history.first(HYPER), None) if HYPER in last.splits else None


def _unsynchronised(evidence: Evidence) -> set[str]:
    """Parameters whose wrapper did not reduce gradients in some updates until their last check."""
    every = (piece for own in recorded(evidence).values() for piece in own.pieces)
    hows = {piece.name: piece.how for piece in every}
    return {name for name, how in hows.items() if how == LOCAL}


def _still(rows: Sequence[Mapping[int, str | None]]) -> tuple[int, ...]:
    """The ranks that keep their first value over several steps, if the others do not."""
    moved = {rank: len({row[rank] for row in rows}) for rank in rows[0]}
    still = tuple(rank for rank, many in moved.items() if many == 1)
    return still if len(rows) >= _ENOUGH and len(still) < len(moved) else ()


def _alone(piece: LawPiece) -> bool:
    """Whether no wrapper keeps it equal on another rank."""
    return piece.how == PLAIN or (piece.how in (REDUCED, LOCAL) and len(piece.ranks) == 1)


def _not_checked(evidence: Evidence, found: tuple[History, ...], kept: bool) -> tuple[str, ...]:
    """``kept``: all parameters without a wrapper stayed equal on all ranks."""
    every = recorded(evidence).values()
    if every and not any(own.checks for own in every):
        return ("laws: no optimizer of torch stepped on parameters of a model that was seen",)
    hows = {piece.how for own in every for piece in own.pieces}
    unseen = REDUCED in hows and all(history.how != REDUCED for history in found)
    texts = {
        "whether replicas are equal (the program steps inside no_sync, or a communication hook "
        "replaces the reduction)": LOCAL in hows,
        "whether plain parameters must be equal on other ranks (no wrapper declares it)":
            PLAIN in hows and evidence.world_size > 1 and not kept,
        "whether replicas are equal (no step was recorded by all of their ranks)": unseen,
        "small differences of Replicate placements after the first update (each rank computes "
        "them, and rounding may differ)": PLACED in hows,
    }  # fmt: skip
    return tuple(f"laws: {text}" for text, told in texts.items() if told)
