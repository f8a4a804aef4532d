"""Jobs with periodic events and one rank that deviates.

``python -m tests.unit.periodic_jobs 40`` counts how often the diagnosis names that rank, no rank,
or another one, in 40 jobs of each kind."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moediag.diagnosis import diagnose
from moediag.evidence.model import Collective, Evidence
from tests.unit.evidence_builder import Job, Op

# What one rank does otherwise than the others, from one step on.
KINDS = (
    "leaves out an event",  # its condition is false once
    "makes an event early",  # its condition is true once more
    "counts steps apart",  # its events come one step late or early from then on
    "leaves out a call",
    "repeats a call",
    "leaves out a step",  # an empty batch
    "makes one step more",
    "makes a new call",  # `if rank == 0:`
    "changes a size",
    "swaps two calls",
    "ends early",
)


@dataclass(frozen=True)
class Event:
    """Calls that all ranks make every ``every`` steps: an evaluation, a checkpoint, a log line."""

    calls: tuple[Op, ...]
    every: int
    first: int
    # Also at the end of every this many steps: an epoch, or the last step of all. 0: never.
    also: int = 0

    def due(self, step: int) -> bool:
        return (step >= self.first and (step - self.first) % self.every == 0) or (
            self.also > 0 and step % self.also == 0
        )


@dataclass(frozen=True)
class Plan:
    """A job and what goes wrong in it."""

    world: int
    step: tuple[Op, ...]  # the calls of every step
    events: tuple[Event, ...]
    steps: int
    kind: str
    rank: int
    at: int  # the step in which the rank deviates
    pick: int  # chooses the call or event that is concerned
    pairs: bool = False  # the calls of a step are in groups of two ranks

    def evidence(self) -> Evidence:
        world = tuple(range(self.world))
        groups: dict[str, tuple[tuple[int, ...], str | None]] = {"world": (world, "dp")}
        if self.pairs:
            groups |= {f"pair{n}": (world[n : n + 2], "tp") for n in range(0, self.world, 2)}
        job = Job(groups, [list(self._program(rank)) for rank in world])
        found = job.run()
        ranks = {
            rank: replace(
                seen, collectives=tuple(replace(c, site=self._site(c)) for c in seen.collectives)
            )
            for rank, seen in found.ranks.items()
        }
        return replace(found, ranks=ranks, watched=True)

    def _site(self, call: Collective) -> str:
        return f"train.py:{max(call.numel_in, call.numel_out) // 1000} train"

    def _program(self, rank: int) -> Iterator[Op]:
        odd = rank == self.rank
        for step in range(1, self.steps + 1):
            here = odd and step == self.at
            if here and self.kind == "ends early":
                return
            for _ in range({"leaves out a step": 0, "makes one step more": 2}.get(self.kind, 1)
                           if here else 1):  # fmt: skip
                yield from (self._in(rank, op, step) for op in self._step(here))
            counted = (
                step - 1 if odd and self.kind == "counts steps apart" and step >= self.at else step
            )
            for number, event in enumerate(self.events):
                due = event.due(counted)
                if here and number == self.pick % len(self.events):
                    due = {"leaves out an event": False, "makes an event early": True}.get(
                        self.kind, due
                    )
                if due:
                    yield from (replace(op, step=step) for op in event.calls)

    def _step(self, here: bool) -> list[Op]:
        calls, at = list(self.step), self.pick % len(self.step)
        if not here:
            return calls
        if self.kind == "leaves out a call":
            del calls[at]
        elif self.kind == "repeats a call":
            calls.insert(at, calls[at])
        elif self.kind == "makes a new call":
            calls.insert(at, Op("world", "all_reduce", 900_000))
        elif self.kind == "changes a size":
            calls[at] = replace(calls[at], numel=calls[at].numel + 8)
        elif self.kind == "swaps two calls" and len(calls) > 1:
            other = (at + 1) % len(calls)
            calls[at], calls[other] = calls[other], calls[at]
        return calls

    def _in(self, rank: int, op: Op, step: int) -> Op:
        group = f"pair{rank // 2 * 2}" if self.pairs and op.group != "world" else "world"
        return replace(op, group=group, step=step)


def plan(chance: random.Random, world: int, kind: str, twice: bool = False) -> Plan:
    """A random job. ``twice``: its events also come at the end of each epoch."""
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    lines = iter(range(1, 100))

    def some(number: int, group: str) -> tuple[Op, ...]:
        return tuple(
            Op(group, chance.choice(kinds), 1000 * next(lines) + 8 * chance.randrange(20))
            for _ in range(number)
        )

    pairs = world > 2 and world % 2 == 0 and chance.random() < 0.5
    step = some(chance.randint(1, 4), "pair" if pairs else "world")
    step += some(chance.randint(0, 1), "world")
    steps = chance.randint(6, 60)
    events = []
    for _ in range(chance.randint(1, 3)):
        every = chance.randint(2, 12)
        also = chance.randint(5, 20) if twice else 0
        first = chance.randint(1, every)
        events.append(Event(some(chance.randint(1, 3), "world"), every, first, also))
    rank, at, pick = chance.randrange(world), chance.randint(2, steps), chance.randrange(100)
    return Plan(world, step, tuple(events), steps, kind, rank, at, pick, pairs)


def main(number: int = 40) -> None:
    for twice in (False, True):
        for two in (True, False):
            print(f"{'2 ranks' if two else '3 to 8 ranks'}{', events twice' if twice else ''}")
            for kind in KINDS:
                count: Counter[str] = Counter()
                for seed in range(number):
                    chance = random.Random(f"{kind} {seed} {two} {twice}")
                    made = plan(chance, 2 if two else chance.randint(3, 8), kind, twice)
                    count[answer(made)] += 1
                print(f"  {kind:24}", ", ".join(f"{k} {n}" for k, n in sorted(count.items())))


def answer(made: Plan) -> str:
    """``right``, ``none`` or ``wrong``; ``no deviation`` where the ranks did the same after all."""
    found = diagnose(made.evidence())
    if found.verdict == "clean":
        return "no deviation"
    named = set(found.culprits)
    return "wrong" if named - {made.rank} else f"right, {found.confidence}" if named else "none"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
