"""Simulates jobs that send and receive, and records them as a watched job on gloo does.

A rank's program is a generator of calls. A send completes when its receive is posted, with the same
tag, and a collective when all ranks are in it; a rank that waits in a call yields it once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from moediag.evidence.model import Collective, Evidence, ExitStatus, Group, RankEvidence, Stall

Call = tuple[str, int | None, int, str, bool]  # op, peer, tag, site, waits
Program = Callable[[int, int], Iterator[Call]]


def send(peer: int, site: str, tag: int = 0, waits: bool = True) -> Call:
    return "send", peer, tag, site, waits


def recv(peer: int, site: str, tag: int = 0, waits: bool = True) -> Call:
    return "recv", peer, tag, site, waits


def everyone(op: str, site: str) -> Call:
    return op, None, 0, site, True


@dataclass
class _Made:
    call: Collective
    waits: bool


def run(program: Program, world: int) -> Evidence:
    """The evidence of ranks that run until all of them end or wait."""
    running = {rank: program(rank, world) for rank in range(world)}
    elsewhere: set[int] = set()
    made: dict[int, list[_Made]] = {rank: [] for rank in running}
    ended, step = set(), defaultdict(lambda: 1)
    for clock in range(100_000):
        going = [r for r in running if r not in ended | elsewhere]
        ready = [r for r in going if not _waits(made, r, world)]
        if not ready:
            break
        rank = ready[clock % len(ready)]
        if made[rank] and made[rank][-1].waits:  # it waited for all that it had posted
            for one in (o for o in made[rank] if not o.call.completed):
                one.call = replace(one.call, completed=True)
        try:
            op, peer, tag, site, waits = next(running[rank])
        except StopIteration:
            ended.add(rank)
            continue
        if op == "step":
            step[rank] += 1
            continue
        if op == "stop":
            elsewhere.add(rank)
            continue
        count = len(made[rank])
        call = Collective(
            index=count, group="0", position=count, op=op, numel_in=8, numel_out=8,
            dtype="float32", step=step[rank], peer=peer, tag=tag, site=site,
            callers=("train.py:9 main",), time=float(clock), asynchronous=op in ("send", "recv"),
        )  # fmt: skip
        made[rank].append(_Made(call, waits))
    return _evidence(made, ended, elsewhere, world)


def _waits(made: dict[int, list[_Made]], rank: int, world: int) -> bool:
    """Whether the rank's last call waits and it, or one posted with it, is not met."""
    if not made[rank] or not made[rank][-1].waits:
        return False
    return _unmet(made, rank, world) is not None


def _unmet(made: dict[int, list[_Made]], rank: int, world: int) -> _Made | None:
    opened = [one for one in made[rank] if not one.call.completed]
    return next((one for one in opened if not _met(made, rank, one.call, world)), None)


def _met(made: dict[int, list[_Made]], rank: int, call: Collective, world: int) -> bool:
    def own(of: int, op: str, peer: int | None, tag: int) -> list[int]:
        calls = (one.call for one in made[of])
        return [c.index for c in calls if (c.op, c.peer, c.tag) == (op, peer, tag)]

    if call.peer is not None:
        mine = own(rank, call.op, call.peer, call.tag).index(call.index)
        back = "recv" if call.op == "send" else "send"
        return len(own(call.peer, back, rank, call.tag)) > mine
    place = [one.call.index for one in made[rank] if one.call.peer is None].index(call.index)
    there = [[o.call for o in made[r] if o.call.peer is None] for r in range(world)]
    return all(len(calls) > place and calls[place].op == call.op for calls in there)


def _evidence(
    made: dict[int, list[_Made]], ended: set[int], elsewhere: set[int], world: int
) -> Evidence:
    ranks, group = {}, Group("0", tuple(range(world)), desc="world", backend="gloo")
    for rank, own in made.items():
        inside = _unmet(made, rank, world) if rank not in ended | elsewhere else None
        calls = [
            replace(o.call, asynchronous=False, completed=False) if o is inside else o.call
            for o in own
        ]
        ranks[rank] = RankEvidence(
            rank, tuple(calls), {"0": group}, versions={"torch": "2.13.0"},
            exit=ExitStatus(0) if rank in ended else ExitStatus(signal="SIGKILL", by_us=True),
            finished=rank in ended,
        )  # fmt: skip
    waiting = tuple(rank for rank in ranks if rank not in ended | elsewhere)
    stall = Stall(100.0, 3.0, waiting, tuple(sorted(elsewhere))) if waiting or elsewhere else None
    return Evidence(world, ranks, backend="gloo", stall=stall, watched=True)


# ------------------------------------------------------------------------ programs


@dataclass(frozen=True)
class Fault:
    """What one rank does in step 3."""

    what: str = ""
    rank: int = -1
    step: int = 3

    def hits(self, what: str, rank: int, step: int) -> bool:
        return (what, rank, step) == (self.what, self.rank, self.step)


def ring(fault: Fault, steps: int = 4) -> Program:
    """Each rank sends to the next and receives from the one before, once less than there are
    ranks; then all reduce."""

    def program(rank: int, world: int) -> Iterator[Call]:
        yield everyone("broadcast", "train.py:1 main")
        for step in range(1, steps + 1):
            less = fault.hits("less", rank, step)
            more = fault.hits("more", rank, step)
            for turn in range(world - 1 - less + more):
                if turn == 1 and fault.hits("stop", rank, step):
                    yield everyone("stop", "")
                to, of, tag = (rank + 1) % world, (rank - 1) % world, 0
                if turn == 0:
                    to = (rank + 2) % world if fault.hits("neighbour", rank, step) else to
                    of = (rank + 2) % world if fault.hits("source", rank, step) else of
                    tag = 7 if fault.hits("tag", rank, step) else tag
                yield send(to, "ring.py:5 move", tag, waits=False)
                yield recv(of, "ring.py:6 move", tag)
                if not (fault.hits("barrier", rank, step) and turn == 0):
                    yield everyone("barrier", "ring.py:8 move")
            yield everyone("all_reduce", "train.py:20 main")
            yield everyone("step", "")

    return program


def pipeline(fault: Fault, schedule: str = "gpipe", batches: int = 4, steps: int = 4) -> Program:
    """Activations go to the next stage and gradients come back; then all reduce."""

    def program(rank: int, world: int) -> Iterator[Call]:
        def forward(step: int, batch: int) -> Iterator[Call]:
            if rank:
                yield recv(rank - 1, "pipe.py:3 forward")
            if batch == 2 and fault.hits("stop", rank, step):
                yield everyone("stop", "")
            if rank < world - 1 and not (batch == 2 and fault.hits("no-send", rank, step)):
                yield send(rank + 1, "pipe.py:4 forward", waits=schedule == "gpipe")

        def backward(step: int, batch: int) -> Iterator[Call]:
            if rank < world - 1:
                yield recv(rank + 1, "pipe.py:7 backward")
            if rank and not (batch == 2 and fault.hits("no-gradient", rank, step)):
                yield send(rank - 1, "pipe.py:8 backward", waits=schedule == "gpipe")

        for step in range(1, steps + 1):
            count = batches - fault.hits("less", rank, step) + fault.hits("more", rank, step)
            ahead = count if schedule == "gpipe" else min(world - 1 - rank, count)
            for batch in range(ahead):
                yield from forward(step, batch)
            for batch in range(count - ahead):
                yield from forward(step, ahead + batch)
                yield from backward(step, batch)
            for batch in range(ahead):
                yield from backward(step, count - ahead + batch)
            yield everyone("all_reduce", "train.py:20 main")
            if not fault.hits("barrier", rank, step):
                yield everyone("barrier", "train.py:21 main")
            yield everyone("step", "")

    return program


def gossip(fault: Fault, steps: int = 4) -> Program:
    """Ranks exchange with the one whose number differs in one bit, another one in each step."""

    def program(rank: int, world: int) -> Iterator[Call]:
        bits = (world - 1).bit_length()
        for step in range(1, steps + 1):
            peer = rank ^ (1 << (step % bits))
            if fault.hits("neighbour", rank, step):
                peer = rank ^ (1 << ((step + 1) % bits))
            if fault.hits("stop", rank, step):
                yield everyone("stop", "")
            if not fault.hits("less", rank, step):
                yield send(peer, "gossip.py:4 mix", waits=False)
                yield recv(peer, "gossip.py:5 mix")
            yield everyone("all_reduce", "train.py:20 main")
            yield everyone("step", "")

    return program
