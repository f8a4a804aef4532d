"""The programs of a Megatron-like job: which rank calls what on which group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

P2P = ("send", "recv")
P2P_LINES = (10, 40)  # of a receive and of the send it meets, in each direction


@dataclass(frozen=True)
class Layout:
    """Group sizes. Ranks are numbered by tensor, then data (divided by experts), then pipeline."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    def place(self, rank: int) -> tuple[int, int, int]:
        """Returns (pipeline stage, data, tensor)."""
        return rank // (self.tp * self.dp), rank // self.tp % self.dp, rank % self.tp

    def rank(self, stage: int, data: int, tensor: int) -> int:
        return (stage * self.dp + data) * self.tp + tensor

    def groups(self) -> dict[str, list[tuple[int, ...]]]:
        """Returns all groups with more than one member, by axis."""
        found: dict[str, dict[Any, list[int]]] = {
            "world": {0: list(range(self.world))}, "tp": {}, "dp": {}, "ep": {}, "pp": {},
        }  # fmt: skip
        for rank in range(self.world):
            stage, data, tensor = self.place(rank)
            found["tp"].setdefault((stage, data), []).append(rank)
            found["dp"].setdefault((stage, tensor), []).append(rank)
            found["ep"].setdefault((stage, tensor, data // self.ep), []).append(rank)
            found["pp"].setdefault((data, tensor), []).append(rank)
        return {
            axis: [tuple(ranks) for ranks in of.values() if len(ranks) > 1]
            for axis, of in found.items()
        }


@dataclass(frozen=True)
class Op:
    """One call. ``numel`` is that of the whole tensor, ``peer`` a rank of the world (send,
    recv)."""

    axis: str
    op: str
    numel: int
    line: int
    peer: int | None = None


@dataclass
class Job:
    """A simulated job, healthy or with one kind of fault on one or more ranks."""

    layout: Layout
    programs: list[list[Op]]  # one list of calls per rank
    fault: str = "none"
    culprits: tuple[int, ...] = ()  # the ranks that a diagnosis must name
    at: dict[int, int] = field(default_factory=dict)  # culprit -> the place of its fault
    stuck: dict[int, int] = field(default_factory=dict)  # rank -> call its program never issues
    dead_device: dict[int, int] = field(default_factory=dict)  # rank -> call it never begins
    silent: frozenset[int] = frozenset()  # ranks that leave no dump
    lines: tuple[int, ...] = ()  # a diagnosis must name one: where the culprit left the others
    # The job still runs: dumped after this many completed calls, in an order drawn by ``chance``.
    until: int | None = None
    chance: int = 0


def healthy(layout: Layout, steps: int, micro_batches: int = 2, layers: int = 2) -> Job:
    ranks = range(layout.world)
    return Job(layout, [list(_step(layout, r, micro_batches, layers)) * steps for r in ranks])


def _step(layout: Layout, rank: int, micro: int, layers: int) -> Iterator[Op]:
    stage, data, tensor = layout.place(rank)
    first, last = stage == 0, stage == layout.pp - 1
    before = None if first else layout.rank(stage - 1, data, tensor)
    after = None if last else layout.rank(stage + 1, data, tensor)
    hidden = 4096
    for backward in (False, True):
        source, target = (after, before) if backward else (before, after)
        base = 100 if backward else 0
        for _ in range(micro):
            if source is not None:
                yield Op("pp", "recv", hidden, base + P2P_LINES[0], source)
            for layer in range(layers):
                yield Op("tp", "all_gather", hidden * layout.tp, base + 20)
                yield Op("tp", "reduce_scatter", hidden * layout.tp, base + 21)
                if layer % 2:
                    yield Op("ep", "all_to_all", hidden * layout.ep, base + 30)
                    yield Op("ep", "all_to_all", hidden * layout.ep, base + 31)
            if target is not None:
                yield Op("pp", "send", hidden, base + P2P_LINES[1], target)
    for bucket in range(2):
        yield Op("dp", "reduce_scatter", 1024 * layout.dp * (bucket + 1), 200 + bucket)
    yield Op("world", "all_reduce", 1, 210)
    for bucket in range(2):
        yield Op("dp", "all_gather", 1024 * layout.dp * (bucket + 1), 220 + bucket)
