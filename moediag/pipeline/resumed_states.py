"""Compares what a resumed run recorded with the interrupted run and with two uninterrupted ones.

The state that its first step begins with must be that of the interrupted run, bit for bit; later
steps must be those of the uninterrupted runs. What differs between these is noise: it is judged
only where the difference is much larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field

from moediag.pipeline.recorded_runs import Key, Recording, Runs, State
from moediag.pipeline.resumed_reasons import Moves, Why, told
from moediag.protocol import recorded_state as words
from moediag.protocol.recorded_state import Item, Lost, Recorded, ResumedRun
from moediag.records import dataclass

_CLEARLY = 10.0  # times the noise
ORDER = (
    words.PARAMETER, words.MAIN, words.BUFFER, words.STATE, words.COUNT, words.SCHEDULER,
    words.SETTING, words.SCALER, words.COPY, words.FROZEN, words.MODE, words.BATCH,
    words.GENERATOR, words.LOSS,
)  # fmt: skip


def compared(runs: Runs) -> dict[int, ResumedRun]:
    """Returns the comparison of each rank; of rank 0 alone, with whole tensors, if other numbers of
    ranks saved and resumed."""
    if len(runs.resumed.ranks) != len(runs.interrupted.ranks):
        return {0: _of_other_layout(runs)}
    common = sorted(set(runs.resumed.ranks) & set(runs.straight.ranks) & set(runs.again.ranks))
    at_save = {rank: _at_save(runs, rank) for rank in common}
    moved = Moves.of(runs)
    return {rank: _of_rank(runs, rank, at_save, moved) for rank in common}


def _at_save(runs: Runs, rank: int) -> State:
    """The state that the next step of the interrupted run began with; of an uninterrupted run, if
    the interrupted one ended after its save."""
    found = runs.interrupted.state(rank, runs.after + 1)
    return found or runs.straight.state(rank, runs.after + 1)


def _of_other_layout(runs: Runs) -> ResumedRun:
    """Compares whole tensors at the first step. Sums over other ranks are rounded otherwise, so
    later steps differ."""
    step = runs.after + 1
    controls = [run.whole(step) for run in (runs.straight, runs.again)]
    states = [runs.interrupted.whole(step) or controls[0], runs.resumed.whole(1), *controls]
    unknown = {
        key
        for state in states
        for key, item in state.items()
        if item is None and key[0] != words.GENERATOR
    }
    expected, got, one, other = (
        {
            key: item
            for key, item in state.items()
            if item is not None and key not in unknown and key[0] != words.GENERATOR
        }
        for state in states
    )
    noise: dict[str, int] = {}
    moves = Moves.of(runs)
    found = _differing(expected, got, one, other, noise)
    why = Why({0: expected}, 0, moves, of_layout=True)
    here, control, again = map(_together, (runs.resumed, runs.straight, runs.again))
    batch = _batch(here, control, again, runs.after, 0, {})
    # Ranks may share their samples, so that no step has the same ones.
    batches = [batch if batch is not None and batch.why else None]
    loads = [load for rank in runs.resumed.ranks.values() for load in rank.loads]
    return ResumedRun(
        runs.after, 0, [len(runs.interrupted.ranks), len(runs.resumed.ranks)], found.compared,
        _grouped(_explained(found.differ, why), batches), noise=noise,
        not_known=sorted({f"{name} ({kind})" for kind, name in unknown}),
        files=[told(one) for one in moves.checkpoint],
        loaded=list(dict.fromkeys(map(told, loads))),
    )  # fmt: skip


def _together(run: Recording) -> Recorded:
    """The samples of all ranks."""
    steps = zip(*(one.batches for one in run.ranks.values()), strict=False)
    sums = [f"{sum(int(one, 16) for one in own):x}" if all(own) else "" for own in steps]
    return Recorded(0, 1, 0, batches=sums)


def _of_rank(runs: Runs, rank: int, at_save: Mapping[int, State], moved: Moves) -> ResumedRun:
    here, control = runs.resumed.ranks[rank], runs.straight.ranks[rank]
    again = runs.again.ranks[rank]
    after, number = runs.after, min(runs.resumed.made, runs.straight.made - runs.after)
    noise: dict[str, int] = {}
    found = _at(runs, rank, 1, at_save[rank], noise)
    why = Why(at_save, rank, moved)
    batches = [_batch(here, control, again, after + at, at, noise) for at in range(number)]
    lost = _grouped(_explained(found.differ, why), batches[:1])
    # A generator that differs from the start on is no consequence.
    known = {key for key, *_ in found.differ if key[0] == words.GENERATOR}
    later, later_lost = None, list[Lost]()
    for step in range(2, number + 1):
        expected = runs.straight.state(rank, after + step)
        own = _at(runs, rank, step, expected, noise)
        if not own.compared:
            number = step - 1  # the state of this step is not known
            break
        plain = [(key, e, g, "", "") for key, e, g in own.differ if key not in known]
        later_lost = _grouped(plain, batches[step - 1 : step])
        if later_lost:
            later = step + after
            break
    losses = [_loss(here, control, again, after + at, at) for at in range(number)]
    return ResumedRun(
        after, number, [], found.compared, lost, later, later_lost, losses, noise,
        files=[told(one) for one in moved.checkpoint], loaded=[told(one) for one in here.loads],
    )  # fmt: skip


# ------------------------------------------------------------------------ what differs


@dataclass(frozen=True, slots=True)
class _Found:
    compared: int
    differ: list[tuple[Key, Item | None, Item | None]] = field(default_factory=list)


def _at(runs: Runs, rank: int, step: int, expected: State, noise: dict[str, int]) -> _Found:
    """What the resumed run's ``step`` (from 1) begins with otherwise than ``expected``."""
    got = runs.resumed.state(rank, step)
    one, other = (run.state(rank, runs.after + step) for run in (runs.straight, runs.again))
    return _differing(expected, got, one, other, noise, step == 1)


def _differing(
    expected: State, got: State, one: State, other: State, noise: dict[str, int], first: bool = True
) -> _Found:
    """``one``, ``other``: what the uninterrupted runs had."""
    if not got or not expected or not one or not other:
        return _Found(0)
    copies = _copies(expected, got)
    differ = []
    count = 0
    for key in dict.fromkeys((*expected, *got)):
        e, g = expected.get(key), got.get(key)
        if key[0] == words.COPY:
            if e is None or key not in copies:
                continue  # a copy that only one of the runs keeps
            g = copies[key]
        count += 1
        if e is not None and g is not None and e.value == g.value:
            continue
        controls = (one.get(key), other.get(key), *((e,) if first else ()))
        if _within_noise(e, g, controls):
            noise[key[0]] = noise.get(key[0], 0) + 1
        else:
            differ.append((key, e, g))
    return _Found(count, differ)


def _copies(expected: State, got: State) -> dict[Key, Item]:
    """For each copy of the weights at the save the item of the copy that the resumed run has of it:
    an equal one wherever it is, else the one in the same place, if there are not fewer."""
    of_save, of_resumed = _by_copy(expected), _by_copy(got)
    found: dict[Key, Item] = {}
    for number, own in of_save.items():
        wanted = {name: item.value for name, item in own.items()}
        equal = [
            copy
            for copy in of_resumed.values()
            if {name: item.value for name, item in copy.items()} == wanted
        ]
        same = equal[0] if equal else of_resumed.get(number, {})
        if equal or len(of_resumed) == len(of_save):
            found.update(
                ((words.COPY, f"{number}: {name}"), same[name]) for name in own if name in same
            )
    return found


def _by_copy(state: State) -> dict[str, dict[str, Item]]:
    found: dict[str, dict[str, Item]] = {}
    for (kind, name), item in state.items():
        if kind == words.COPY:
            number, _, own = name.partition(": ")
            found.setdefault(number, {})[own] = item
    return found


def _within_noise(expected: Item | None, got: Item | None, controls: Sequence[Item | None]) -> bool:
    """Whether runs that must be equal differ in this value about as much."""
    values = {item.value if item is not None else None for item in controls}
    if len(values) == 1:
        return False
    sizes = [distance(controls[0], other) for other in controls[1:]]
    known = [size for size in sizes if size is not None]
    far = distance(expected, got)
    return far is None or len(known) < len(sizes) or far <= _CLEARLY * max(known)


def distance(one: Item | None, other: Item | None) -> float | None:
    """About how far two tensors are apart, relative to the larger norm; None: not known."""
    if one is None or other is None or len(one.sketch) != 2 or len(other.sketch) != 2:
        return None
    try:
        (a, norm_a), (b, norm_b) = (map(float, item.sketch) for item in (one, other))
    except ValueError:
        return None
    size = max(norm_a, norm_b)
    far = max(abs(a - b), abs(norm_a - norm_b))
    return far / size if size else 0.0


def _batch(
    here: Recorded, control: Recorded, again: Recorded, at: int, own: int, noise: dict[str, int]
) -> Lost | None:
    """What the resumed run's step ``own`` (from 0) trained on, if not on the samples of the
    uninterrupted run's step ``at``."""
    got, expected = here.batches[own], control.batches[at]
    if not expected or not got or got == expected:
        return None
    if again.batches[at : at + 1] != [expected]:
        noise[words.BATCH] = noise.get(words.BATCH, 0) + 1
        return None
    if got not in control.batches:
        return Lost(words.BATCH, ["samples"])
    step = control.batches.index(got) + 1
    return Lost(words.BATCH, ["samples"], words.RESTARTED, other=f"step {step}")


def _loss(here: Recorded, control: Recorded, again: Recorded, at: int, own: int) -> float | None:
    lists = [one.losses[at : at + 1] for one in (control, again)]
    if not all(lists) or lists[0] != lists[1]:
        return None
    expected, got = lists[0][0], here.losses[own] if own < len(here.losses) else []
    if len(expected) != len(got) or not expected:
        return None
    return max(abs(a - b) for a, b in zip(expected, got, strict=True))


_Explained = tuple[Key, Item | None, Item | None, str, str]


def _explained(
    differ: Iterable[tuple[Key, Item | None, Item | None]], why: Why
) -> Iterator[_Explained]:
    for key, expected, got in differ:
        yield (key, expected, got, *why(key, expected, got))


def _grouped(differ: Iterable[_Explained], batches: Iterable[Lost | None]) -> list[Lost]:
    """One entry for each kind and reason, in the order of ORDER."""
    groups: dict[tuple[str, str], list[_Explained]] = {}
    for one in differ:
        groups.setdefault((one[0][0], one[3]), []).append(one)
    found = [lost for lost in batches if lost is not None]
    for (kind, why), own in groups.items():
        _, expected, got, _, other = own[0]
        sizes = [size for one in own if (size := distance(one[1], one[2])) is not None]
        plain = not sizes
        found.append(
            Lost(
                kind, [one[0][1] for one in own], why, max(sizes, default=None),
                expected.value if plain and expected is not None else "",
                got.value if plain and got is not None else "", other,
            )
        )  # fmt: skip
    return sorted(found, key=lambda lost: (*ORDER, lost.kind).index(lost.kind))
