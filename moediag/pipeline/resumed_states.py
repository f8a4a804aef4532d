"""Compares what a resumed run recorded with the interrupted run and with two uninterrupted ones.

The state that its first step begins with must be that of the interrupted run, bit for bit; later
steps must be those of the uninterrupted runs. What differs between these is noise: it is judged
only where the difference is much larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from moediag.protocol import recorded_state as words
from moediag.protocol.recorded_state import (
    Item,
    Lost,
    Recorded,
    RecordedStep,
    ResumedRun,
    Transfer,
    read_recorded,
)
from moediag.records import dataclass

_CLEARLY = 10.0  # times the noise
_NO_CAUSE = (words.FROZEN, words.MODE, words.LOSS)
_SCALARS = (words.COUNT, words.SETTING, words.SCHEDULER, words.SCALER)
ORDER = (
    words.PARAMETER, words.MAIN, words.BUFFER, words.STATE, words.COUNT, words.SCHEDULER,
    words.SETTING, words.SCALER, words.COPY, words.FROZEN, words.MODE, words.BATCH,
    words.GENERATOR, words.LOSS,
)  # fmt: skip

Key = tuple[str, str]  # kind and name
State = Mapping[Key, Item]


@dataclass(frozen=True, slots=True)
class Recording:
    """The recorded run of one command."""

    folder: Path
    ranks: Mapping[int, Recorded]

    @classmethod
    def read(cls, folder: Path) -> Recording:
        return cls(folder, read_recorded(folder))

    @property
    def made(self) -> int:
        """Steps that all ranks made."""
        return min((len(one.batches) for one in self.ranks.values()), default=0)

    def state(self, rank: int, step: int) -> State:
        """What ``rank`` began ``step`` with; empty if it was not recorded."""
        found = RecordedStep.read(self.folder, rank, step)
        items = found.items if found is not None else {}
        return {(kind, name): item for kind, own in items.items() for name, item in own.items()}


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs that are compared."""

    interrupted: Recording
    resumed: Recording
    straight: Recording
    again: Recording
    after: int
    """Steps before the save."""


def compared(runs: Runs) -> dict[int, ResumedRun]:
    """Returns the comparison of each rank."""
    common = sorted(set(runs.resumed.ranks) & set(runs.straight.ranks) & set(runs.again.ranks))
    at_save = {rank: _at_save(runs, rank) for rank in common}
    moved = _Moves.of(runs)
    return {rank: _of_rank(runs, rank, at_save, moved) for rank in common}


def _at_save(runs: Runs, rank: int) -> State:
    """The state that the next step of the interrupted run began with; of an uninterrupted run, if
    the interrupted one ended after its save."""
    found = runs.interrupted.state(rank, runs.after + 1)
    return found or runs.straight.state(rank, runs.after + 1)


def _of_rank(runs: Runs, rank: int, at_save: Mapping[int, State], moved: _Moves) -> ResumedRun:
    here, control = runs.resumed.ranks[rank], runs.straight.ranks[rank]
    again = runs.again.ranks[rank]
    after, number = runs.after, min(runs.resumed.made, runs.straight.made - runs.after)
    noise: dict[str, int] = {}
    found = _at(runs, rank, 1, at_save[rank], noise)
    why = _Why(at_save, rank, moved)
    batches = [_batch(here, control, again, after + at, at, noise) for at in range(number)]
    lost = _grouped(_explained(found.differ, why), batches[:1])
    later, later_lost = None, list[Lost]()
    for step in range(2, number + 1):
        expected = runs.straight.state(rank, after + step)
        own = _at(runs, rank, step, expected, noise)
        if not own.compared:
            number = step - 1  # the state of this step is not known
            break
        plain = [(key, e, g, "", "") for key, e, g in own.differ]
        later_lost = _grouped(plain, batches[step - 1 : step])
        if later_lost:
            later = step + after
            break
    losses = [_loss(here, control, again, after + at, at) for at in range(number)]
    return ResumedRun(
        after, number, found.compared, lost, later, later_lost, losses, noise,
        [_told(one) for one in moved.checkpoint], [_told(one) for one in here.loads],
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
        controls = (one.get(key), other.get(key), *((e,) if step == 1 else ()))
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


# ------------------------------------------------------------------------ why


@dataclass(frozen=True, slots=True)
class _Moves:
    """What the checkpoint holds, and what the resumed run did with it, on any rank."""

    checkpoint: tuple[Transfer, ...]
    saved: frozenset[str]
    loaded: frozenset[str]
    put: Mapping[str, str]
    """Fingerprint -> the user's line that put it back."""
    saved_scalars: Mapping[str, frozenset[str]]
    loaded_scalars: Mapping[str, frozenset[str]]
    put_scalars: Mapping[tuple[str, str], str]
    """Name and value -> the user's line."""

    @classmethod
    def of(cls, runs: Runs) -> _Moves:
        ranks = runs.interrupted.ranks.values()
        saves = [one for rank in ranks for one in rank.saves if one.step == runs.after]
        loads = [one for rank in runs.resumed.ranks.values() for one in rank.loads]
        puts = [one for rank in runs.resumed.ranks.values() for one in rank.puts if not one.step]
        return cls(
            tuple({(one.what, one.path, one.where): one for one in saves}.values()),
            frozenset(value for one in saves for value in one.values),
            frozenset(value for one in loads for value in one.values),
            {value: one.where for one in puts for value in one.values},
            _scalars(saves),
            _scalars(loads),
            {
                (name, value): one.where
                for one in puts for name, own in one.scalars.items() for value in own
            },
        )  # fmt: skip


def _scalars(transfers: Iterable[Transfer]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for one in transfers:
        for name, values in one.scalars.items():
            found[name] = found.get(name, frozenset()) | frozenset(values)
    return found


class _Why:
    """Why a value of one rank is not as it was at the save: a word, and what it is instead."""

    def __init__(self, at_save: Mapping[int, State], rank: int, moves: _Moves) -> None:
        self._at_save, self._rank, self._moves = at_save, rank, moves
        own = at_save[rank]
        self._names: dict[tuple[str, str], str] = {}  # kind and value -> its only name
        for (kind, name), item in own.items():
            known = self._names.get((kind, item.value))
            self._names[kind, item.value] = name if known is None else ""
        times = Counter(item.value for item in own.values())
        self._several = {value for value, number in times.items() if number > 1}
        # Parameter -> a state that the optimizer keeps beside its step count.
        self._moments = {
            name.partition(" of ")[2]: item.value
            for (kind, name), item in own.items()
            if kind == words.STATE and item.sketch
        }
        # Files of whole tensors say nothing of the parts that ranks hold.
        values = {item.value for (kind, _), item in own.items() if kind == words.PARAMETER}
        self._telling = bool(values & moves.saved)

    def __call__(self, key: Key, expected: Item | None, got: Item | None) -> tuple[str, str]:
        kind, name = key
        if kind in _NO_CAUSE:
            return "", ""
        if expected is None:
            return words.INVENTED, ""
        if got is not None and kind not in (*_SCALARS, words.GENERATOR):
            found = self._instead(key, expected, got)
            if found[0]:
                return found
        if not self._moves.checkpoint:
            return "", ""
        if kind == words.COUNT and name in self._moments and self._telling:
            # Programs count their own steps, too: a key of that name may be theirs.
            found = self._of_tensor(self._moments[name])
            if found[0] in (words.NOT_SAVED, words.NOT_LOADED):
                return found
        if kind in _SCALARS or (not expected.sketch and kind != words.GENERATOR):
            return self._of_scalar("step" if kind == words.COUNT else name, expected.value)
        # Of a value that two tensors have in common it is not known which of them was moved.
        known = self._telling and expected.value not in self._several
        return self._of_tensor(expected.value) if known else ("", "")

    def _instead(self, key: Key, expected: Item, got: Item) -> tuple[str, str]:
        """What a tensor holds that other tensors held at the save."""
        kind, name = key
        if got.rows != expected.rows and sorted(got.rows) == sorted(expected.rows):
            return words.MOVED, _rows(expected.rows, got.rows)
        other = self._names.get((kind, got.value))
        if other and other != name:
            return words.ELSEWHERE, other
        for rank, state in self._at_save.items():
            item = state.get(key)
            if rank != self._rank and item is not None and item.value == got.value:
                return words.FROM_RANK, f"rank {rank}"
        return "", ""

    def _of_tensor(self, value: str) -> tuple[str, str]:
        moves = self._moves
        if value not in moves.saved:
            return words.NOT_SAVED, ""
        if value not in moves.loaded:
            return words.NOT_LOADED, ""
        where = moves.put.get(value)
        return (words.NOT_PUT, "") if where is None else (words.RESET, where)

    def _of_scalar(self, name: str, value: str) -> tuple[str, str]:
        leaf, moves = name.partition(" of ")[0], self._moves
        saved = moves.saved_scalars.get(leaf, frozenset())
        if value not in saved:
            one = next(iter(saved)) if len(saved) == 1 else ""
            return words.NOT_SAVED, one
        if value not in moves.loaded_scalars.get(leaf, frozenset()):
            return words.NOT_LOADED, ""
        where = moves.put_scalars.get((leaf, value))
        return (words.NOT_PUT, "") if where is None else (words.RESET, where)


def _rows(expected: Sequence[str], got: Sequence[str]) -> str:
    """``row 0 is where row 2 was, …`` of the first rows that moved."""
    pieces = [
        f"row {at} is row {expected.index(value)} of the save"
        for at, value in enumerate(got)
        if value != expected[at]
    ]
    return ", ".join(pieces[:2]) + (", …" if len(pieces) > 2 else "")


_Explained = tuple[Key, Item | None, Item | None, str, str]


def _explained(
    differ: Iterable[tuple[Key, Item | None, Item | None]], why: _Why
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
    return sorted(found, key=lambda lost: ORDER.index(lost.kind))


def _told(one: Transfer) -> str:
    """``ckpt.pt by torch.save at train.py:12 save``."""
    name = "/".join(Path(one.path).parts[-2:]) if one.path else "a stream"
    return f"{name} by {one.what}" + (f" at {one.where}" if one.where else "")
