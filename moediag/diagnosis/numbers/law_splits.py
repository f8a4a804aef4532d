"""Compares what ranks recorded of one replica set: where values differ that must be equal.

Only complete comparisons count: every rank of the set checked the same step of the same optimizer,
after the same number of calls on the set's group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import field, replace

from moediag.diagnosis.numbers import agreement
from moediag.evidence.law_model import PLAIN, REDUCED, LawCheck, LawPiece
from moediag.evidence.model import Evidence, recorded
from moediag.protocol.tolerance import LARGE
from moediag.records import dataclass

PARAMETERS, HYPER, GRADIENTS, STATE = "parameters", "hyperparameters", "gradients", "state"
WRITTEN = "written"  # how parameters are kept that only the program writes: not at all
LOSS_SCALE = "loss_scale"  # the number of an optimizer whose steps a GradScaler makes
# The norm below which a gradient may be rounding alone, as a part of the largest one.
_LEAST_NORM = 1e-3
# Numbers of a parameter group that decide what an update does.
_DECIDING = frozenset(
    ("lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "amsgrad",
     "maximize", "alpha", "rho", "lr_decay", "etas", "step_sizes", "centered",
     LOSS_SCALE)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Split:
    """Values of one kind that differ between ranks at one step."""

    what: str
    """PARAMETERS, HYPER, GRADIENTS or STATE."""
    step: int
    names: tuple[str, ...]
    """Parameters; of HYPER the names of the numbers."""
    sides: tuple[tuple[int, ...], ...]
    """Ranks with equal values, of the first name; the largest side first."""
    values: Mapping[int, str] = field(default_factory=dict)
    """Of HYPER: each rank's value of the first name. Of STATE: what ranks after updates lack."""
    same_sides: bool = True
    """All names split the ranks in the same way."""
    large: tuple[str, ...] = ()
    """Of GRADIENTS that each rank computes itself: those that differ by more than rounding."""
    size: float = 0.0
    """The largest of these differences, as a part of the gradient's norm."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One compared step of a replica set."""

    step: int
    splits: Mapping[str, Split]
    """By PARAMETERS, HYPER, …; empty where everything is equal."""
    counts: Mapping[int, int]
    """Rank -> calls of the optimizer's step() before."""


@dataclass(frozen=True, slots=True)
class History:
    """The compared steps of the pieces that one set of ranks holds in one optimizer."""

    key: str
    optimizer: str
    ranks: tuple[int, ...]
    how: str
    moments: tuple[Moment, ...]
    line: str = ""
    """The user's line that calls the optimizer's step(), or ""."""

    def first(self, what: str) -> Split | None:
        """The first step in which ``what`` differs."""
        return next((m.splits[what] for m in self.moments if what in m.splits), None)

    def before(self, step: int) -> Moment | None:
        """The last compared step before ``step``."""
        return next((m for m in reversed(self.moments) if m.step < step), None)


Checks = Mapping[tuple[str, int], Mapping[int, LawCheck]]  # (optimizer, step) -> rank


def checks_of(evidence: Evidence) -> Checks:
    """All checks by optimizer and step, in order of the step. Optimizers of one model of which a
    rank has never two in a step are one that was made anew: another rank may have kept it."""
    found: dict[tuple[str, int], dict[int, LawCheck]] = defaultdict(dict)
    laws = recorded(evidence)
    of_ranks = {rank: laws[rank].checks if rank in laws else () for rank in sorted(evidence.ranks)}
    same = _same_optimizers(of_ranks)
    anew = _made_anew(of_ranks)
    for rank, checks in of_ranks.items():
        for check in checks:
            key = same.get((rank, check.key), check.key)
            if key.partition(".")[0] in anew:  # its count began again
                key = f"{key.partition('.')[0]}.0"
                found[key, check.step].setdefault(
                    rank, replace(check, key=key, count=check.step - 1)
                )
            found[key, check.step].setdefault(rank, check)
    return {place: found[place] for place in sorted(found, key=lambda place: place[1])}


def _made_anew(of_ranks: Mapping[int, Sequence[LawCheck]]) -> set[str]:
    """Models whose optimizer is another one on some rank than on another, one after the other."""
    keys: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    two: set[str] = set()
    seen: set[tuple[int, str, int]] = set()
    for rank, checks in of_ranks.items():
        for check in checks:
            model = check.key.partition(".")[0]
            keys[model][rank].add(check.key)
            two |= {model} if (rank, model, check.step) in seen else set()
            seen.add((rank, model, check.step))
    apart = {model for model, ranks in keys.items() if len({*map(frozenset, ranks.values())}) > 1}
    return {model for model in apart - two if len(keys[model]) == len(of_ranks)}


def _same_optimizers(of_ranks: Mapping[int, Sequence[LawCheck]]) -> dict[tuple[int, str], str]:
    """(rank, key) -> the key of the same optimizer on a rank before. A key is made of the names of
    all parameters, and ranks with experts or tables of their own have other ones; an optimizer is
    the same if it alone holds replicas of the same parameters."""
    first = {
        rank: {check.key: check for check in reversed(checks)} for rank, checks in of_ranks.items()
    }
    if len({frozenset(own) for own in first.values()}) < 2:
        return {}
    same: dict[tuple[int, str], str] = {}
    known: dict[_Kept, str] = {}
    for rank, own in first.items():
        kept = {key: _kept(check, rank) for key, check in own.items()}
        for key, replicas in kept.items():
            if replicas is None or list(kept.values()).count(replicas) > 1:
                continue
            other = known.setdefault(replicas, key)
            if other not in own:
                same[rank, key] = other
    return same


# The class of an optimizer, and the parameters that it shares with the most ranks.
_Kept = tuple[str, tuple[int, ...], frozenset[str]]


def _kept(check: LawCheck, rank: int) -> _Kept | None:
    of = [piece for piece in check.pieces if len(piece.ranks) > 1 and rank in piece.ranks]
    ranks = max((piece.ranks for piece in of), key=len, default=())
    names = frozenset(piece.name for piece in of if piece.ranks == ranks)
    return (check.optimizer, ranks, names) if of else None


def histories(checks: Checks) -> tuple[History, ...]:
    """The history of each replica set and optimizer, of steps that could be compared."""
    found: dict[tuple[str, tuple[int, ...], str], list[Moment]] = defaultdict(list)
    of_key: dict[str, LawCheck] = {}
    placed: dict[int, _Placed] = {}
    own = _written(checks)
    for (key, step), by_rank in checks.items():
        for (ranks, how), members in _sets(by_rank, placed, own):
            found[key, ranks, how].append(_moment(step, members))
        of_key[key] = next(iter(by_rank.values()))
    return tuple(
        History(key, of_key[key].optimizer, ranks, how, tuple(moments), of_key[key].line)
        for (key, ranks, how), moments in found.items()
    )


def _written(checks: Checks) -> set[str]:
    """Parameters of wrappers that train nothing and that the program writes itself, as a memory of
    each rank's own samples: they never have a gradient, though others do, and change. Averages
    of others are none: they begin equal, change on all ranks, and have the names of these in
    another part of the model."""
    values: dict[tuple[int, str], set[str | None]] = defaultdict(set)
    firsts: dict[str, set[str | None]] = defaultdict(set)
    trained: set[str] = set()
    for by_rank in checks.values():
        for rank, check in by_rank.items():
            graded = [one for one in check.grads if one is not None]
            rows = zip(check.pieces, check.params, check.grads, strict=False)
            for piece, value, gradient in rows if graded else ():
                firsts[piece.name] |= set() if values[rank, piece.name] else {value}
                values[rank, piece.name].add(value)
                frozen = gradient is None and piece.how == REDUCED and check.optimizer
                trained |= set() if frozen else {piece.name}
    moved = Counter(name for (_, name), of in values.items() if len(of) > 1)
    every, parts = len({rank for rank, _ in values}), {n.partition(".")[2] for n in trained} - {""}
    begun = (n for n in moved if moved[n] == every and len(firsts[n]) == 1)
    return moved.keys() - trained - {n for n in begun if n.partition(".")[2] in parts}


def history_of(checks: Checks, names: Set[str]) -> History | None:
    """The history of parameters that no wrapper keeps equal, of the first optimizer that has some
    of ``names`` on all ranks."""
    ranks = {rank for by_rank in checks.values() for rank in by_rank}
    for key in dict.fromkeys(key for key, _ in checks):
        moments, line = [], ""
        for step, by_rank in ((s, found) for (k, s), found in checks.items() if k == key):
            members = {rank: (check, _named(check, names)) for rank, check in by_rank.items()}
            if members.keys() == ranks and all(at for _, at in members.values()):
                first = next(iter(by_rank.values()))
                optimizer, line = first.optimizer, first.line
                moments.append(_moment(step, members))
        if moments:
            return History(key, optimizer, tuple(sorted(ranks)), PLAIN, tuple(moments), line)
    return None


def _named(check: LawCheck, names: Set[str]) -> _Positions:
    pieces = enumerate(check.pieces)
    return {(piece.name, piece.part): at for at, piece in pieces if piece.name in names}


# The pieces of a set on one rank: the check, and the positions of (name, part) in it.
_Positions = dict[tuple[str, str], int]
_Member = tuple[LawCheck, _Positions]
_Set = tuple[tuple[int, ...], str]
_Placed = dict[_Set, _Positions]  # of one list of pieces, which the checks of a rank share


def _sets(
    by_rank: Mapping[int, LawCheck], placed: dict[int, _Placed], own: Set[str]
) -> Iterator[tuple[_Set, dict[int, _Member]]]:
    """Each set of ranks, how it is kept equal, and its members; only complete ones."""
    found: dict[_Set, dict[int, _Member]] = defaultdict(dict)
    for rank, check in by_rank.items():
        if id(check.pieces) not in placed:
            placed[id(check.pieces)] = _positions(check, rank, own)
        for one, positions in placed[id(check.pieces)].items():
            found[one][rank] = check, positions
    for (ranks, how), members in found.items():
        if set(members) == set(ranks) and _aligned(members):
            yield (ranks, how), members


def _positions(check: LawCheck, rank: int, own: Set[str]) -> _Placed:
    found: _Placed = defaultdict(dict)
    for at, piece in enumerate(check.pieces):
        if len(piece.ranks) > 1 and rank in piece.ranks:
            how = WRITTEN if piece.name in own else piece.how
            found[piece.ranks, how][piece.name, piece.part] = at
    return found


def _aligned(members: Mapping[int, _Member]) -> bool:
    """Whether the ranks are at the same point of the program."""
    clocks = set()
    for check, positions in members.values():
        sets = {check.pieces[at].replica_set for at in positions.values()}
        clocks.add(tuple(check.clocks[one] for one in sorted(sets) if one < len(check.clocks)))
    return len(clocks) == 1


def _moment(step: int, members: Mapping[int, _Member]) -> Moment:
    splits = {}
    for what, rows in (
        (PARAMETERS, {r: check.params for r, (check, _) in members.items()}),
        (GRADIENTS, {r: check.grads for r, (check, _) in members.items()}),
    ):
        if differing := _differing(members, rows):
            splits[what] = _split(what, step, differing)
    if GRADIENTS in splits:
        sizes = _sizes(members, splits[GRADIENTS].names)
        if sizes:
            most = max(sizes.values())
            splits[GRADIENTS] = replace(splits[GRADIENTS], large=tuple(sizes), size=most)
    if (hyper := _hyper(step, members)) is not None:
        splits[HYPER] = hyper
    state: dict[str, tuple[tuple[int, ...], ...]] = {}
    checks = {rank: check for rank, (check, _) in members.items()}
    held = [set(check.state) for check in checks.values() if check.state]
    kinds = sorted(set.intersection(*held)) if held else []
    for kind in kinds:
        rows = {r: one.state.get(kind, ("none",) * len(one.params)) for r, one in checks.items()}
        state = {**_differing(members, rows), **state}
    if state:
        none = {r: ", ".join(kinds) for r, one in checks.items() if one.count and not one.state}
        splits[STATE] = replace(_split(STATE, step, state), values=none)
    return Moment(step, splits, {rank: check.count for rank, (check, _) in members.items()})


def _differing(
    members: Mapping[int, _Member], rows: Mapping[int, tuple[str | None, ...]]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The sides of each piece that all ranks have and whose values differ."""
    (first, (_, positions)), *others = members.items()
    if all(at == positions and rows[r] == rows[first] for r, (_, at) in others):
        return {}  # the usual case, fast
    found = {}
    for name, part in positions:
        if all((name, part) in at for _, (_, at) in others):
            values = {r: rows[r][at[name, part]] for r, (_, at) in members.items()}
            if sides := _sides(values):
                found[name] = sides
    return found


def _sides(values: Mapping[int, str | None]) -> tuple[tuple[int, ...], ...]:
    """Ranks by value, the largest side first; () if all are equal or one is unknown."""
    found = agreement.sides(values)
    if None in found or len(found) == 1:
        return ()
    return tuple(sorted(found.values(), key=lambda side: (-len(side), side)))


def _split(what: str, step: int, differing: Mapping[str, tuple[tuple[int, ...], ...]]) -> Split:
    sides = list(differing.values())
    same = len(set(sides)) == 1
    return Split(what, step, tuple(differing), sides[0], same_sides=same)


def _sizes(members: Mapping[int, _Member], names: tuple[str, ...]) -> dict[str, float]:
    """How much gradients differ, where that is far above rounding. A gradient whose true value is
    zero is only rounding: one of a norm far below the others' does not count."""
    norms = [norm for check, _ in members.values() for _, norm in check.sketches.values()]
    least = max(norms, default=0.0) * _LEAST_NORM
    found: dict[str, float] = {}
    for name in names:
        own = [
            check.sketches[at]
            for check, positions in members.values()
            for (fqn, _), at in positions.items()
            if fqn == name and at in check.sketches
        ]
        if len(own) < len(members) or min(norm for _, norm in own) <= least:
            continue
        if (size := agreement.far(own)) > LARGE:
            found[name] = size
    return found


def _hyper(step: int, members: Mapping[int, _Member]) -> Split | None:
    """The first number that differs, of the parameter groups that the pieces are in."""
    of_ranks: dict[int, dict[str, tuple[str, ...]]] = {}
    for rank, (check, positions) in members.items():
        pieces: list[LawPiece] = [check.pieces[at] for at in positions.values()]
        groups = [check.hyper[g] for g in sorted({p.group for p in pieces}) if g < len(check.hyper)]
        names = {name for group in groups for name in group} & _DECIDING
        of_ranks[rank] = {name: tuple(g.get(name, "") for g in groups) for name in names}
    shared = set.intersection(*(set(one) for one in of_ranks.values()))
    differing = {}
    values: dict[int, str] = {}
    for name in sorted(shared, key=lambda name: (name != "lr", name)):
        texts = {rank: ", ".join(dict.fromkeys(one[name])) for rank, one in of_ranks.items()}
        if sides := _sides(texts):
            differing[name] = sides
            values = values or texts
    if not differing:
        return None
    return replace(_split(HYPER, step, differing), values=values)
