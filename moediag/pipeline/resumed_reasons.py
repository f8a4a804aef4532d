"""Why a value of a resumed run is not as it was at the save, by what calls wrote and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from moediag.pipeline.recorded_runs import Key, Runs, State
from moediag.protocol import recorded_state as words
from moediag.protocol.recorded_state import Item, Transfer
from moediag.records import dataclass

_NO_CAUSE = (words.FROZEN, words.MODE, words.LOSS)
_SCALARS = (words.COUNT, words.SETTING, words.SCHEDULER, words.SCALER)


@dataclass(frozen=True, slots=True)
class Moves:
    """What the checkpoint holds, and what the resumed run did with it, on any rank."""

    checkpoint: tuple[Transfer, ...]
    saved: frozenset[str]
    loaded: frozenset[str]
    put: Mapping[str, str]
    """Fingerprint -> the user's line that put it back."""
    drawn: frozenset[str]
    """States of a generator after numbers were drawn since it was put back."""
    saved_scalars: Mapping[str, frozenset[str]]
    loaded_scalars: Mapping[str, frozenset[str]]
    put_scalars: Mapping[tuple[str, str], str]
    """Name and value -> the user's line."""

    @classmethod
    def of(cls, runs: Runs) -> Moves:
        ranks = runs.interrupted.ranks.values()
        saves = [one for rank in ranks for one in rank.saves if one.step == runs.after]
        loads = [one for rank in runs.resumed.ranks.values() for one in rank.loads]
        every = [one for rank in runs.resumed.ranks.values() for one in rank.puts if not one.step]
        puts = [one for one in every if one.what != words.DRAWN]
        return cls(
            tuple({(one.what, one.path, one.where): one for one in saves}.values()),
            frozenset(value for one in saves for value in one.values),
            frozenset(value for one in loads for value in one.values),
            {value: one.where for one in puts for value in one.values},
            frozenset(v for one in every if one.what == words.DRAWN for v in one.values),
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


class Why:
    """Why a value of one rank is not as it was at the save: a word, and what it is instead."""

    def __init__(
        self, at_save: Mapping[int, State], rank: int, moves: Moves, of_layout: bool = False
    ) -> None:
        """``of_layout``: the tensors are whole, those that were saved and loaded are parts."""
        self._at_save, self._rank, self._moves = at_save, rank, moves
        self._of_layout = of_layout
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
        if self._of_layout and kind not in _SCALARS:
            return "", ""
        if kind in _SCALARS or (not expected.sketch and kind != words.GENERATOR):
            return self._of_scalar("step" if kind == words.COUNT else name, expected.value)
        # Of a value that two tensors have in common it is not known which of them was moved.
        known = self._telling and expected.value not in self._several
        found = self._of_tensor(expected.value) if known else ("", "")
        drawn = kind == words.GENERATOR and got is not None and got.value in self._moves.drawn
        return (words.DRAWN, found[1]) if drawn and found[0] == words.RESET else found

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


def told(one: Transfer) -> str:
    """``ckpt.pt by torch.save at train.py:12 save``."""
    name = "/".join(Path(one.path).parts[-2:]) if one.path else "a stream"
    return f"{name} by {one.what}" + (f" at {one.where}" if one.where else "")
