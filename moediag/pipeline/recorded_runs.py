"""The recorded runs of `moediag resume` and their states, of one rank or of all together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from moediag.protocol.recorded_state import Item, Recorded, RecordedStep, read_recorded
from moediag.records import dataclass

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

    def whole(self, step: int) -> dict[Key, Item | None]:
        """The state that ``step`` began with, put together from all ranks. None: a value of which
        ranks hold other plain values, or not all parts are known."""
        states = [self.state(rank, step) for rank in self.ranks]
        keys = dict.fromkeys(key for state in states for key in state)
        return {key: _whole([state[key] for state in states if key in state]) for key in keys}

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


def _whole(items: Sequence[Item]) -> Item | None:
    """What the ranks that have one value hold together; None: it is not known."""
    parts = {item.part: item for item in items if item.part is not None and item.part.value}
    if not parts:
        plain = all(item.part is None and not item.sketch for item in items)
        return items[0] if plain and len({item.value for item in items}) == 1 else None
    # Ranks that hold the same part must have the same values.
    once = len({part.places for part in parts}) == len(parts)
    if not once or sum(part.elements for part in parts) != next(iter(parts)).all:
        return None
    total = sum(int(part.value, 16) for part in parts) % 2**64
    if any(part.first is None for part in parts):
        return Item(f"{total:x}")
    in_order = sorted(parts, key=lambda part: (part.first or 0, part.elements))
    return Item(f"{total:x}", rows=[row for part in in_order for row in parts[part].rows])
