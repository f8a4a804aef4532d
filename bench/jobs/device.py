"""The devices of a simulated job. The device of each rank runs its calls in order; a call completes
when all its members run it and it matches. The program runs some calls ahead of the device."""

from __future__ import annotations

import random

from bench.jobs.schedules import P2P, Job, Op


class Run:
    """Runs a job. Counts, per rank, completed (``done``) and ``issued`` calls; ``met`` counts each
    completed call once. ``ended``: when each completed, in milliseconds; every call takes one."""

    def __init__(self, job: Job, ahead: int = 4) -> None:
        self.job, self.ahead = job, ahead
        self.group: dict[tuple[int, str], tuple[int, ...]] = {}
        for axis, of in job.layout.groups().items():
            for ranks in of:
                self.group.update(((rank, axis), ranks) for rank in ranks)
        world = range(job.layout.world)
        # A group of one communicates with nobody and is not recorded.
        self.programs = [
            [op for op in job.programs[rank] if (rank, op.axis) in self.group] for rank in world
        ]
        cut = {rank: self._kept(rank, at) for rank, at in job.stuck.items()}
        dead = {rank: self._kept(rank, at) for rank, at in job.dead_device.items()}
        self.dead = dead
        self.done = [0 for _ in world]
        self.met = 0
        self.late: dict[tuple[int, ...], int] = {}
        self.ended: list[list[int]] = [[] for _ in world]
        self._run(cut)
        self.issued = [
            min(cut.get(r, len(self.programs[r])), self.done[r] + 1 + ahead) for r in world
        ]

    def waiting_for(self, *culprits: int) -> tuple[int, ...]:
        """Returns the lines in which other ranks wait for a call of one of ``culprits``."""
        lines = set()
        for rank, (done, program) in enumerate(zip(self.done, self.programs, strict=True)):
            if rank not in culprits and done < len(program):
                op = program[done]
                members = self.group[rank, op.axis] if op.peer is None else (op.peer,)
                if not set(culprits).isdisjoint(members):
                    lines.add(op.line)
        return tuple(sorted(lines))

    def place(self, rank: int) -> int | None:
        """Returns the place of the rank's first open call in its program."""
        recorded = [
            at for at, op in enumerate(self.job.programs[rank]) if (rank, op.axis) in self.group
        ]
        return recorded[self.done[rank]] if self.done[rank] < len(recorded) else None

    def reached(self) -> bool:
        """Whether the device of each culprit came to its fault."""
        return all(self.done[rank] >= self._kept(rank, at) for rank, at in self.job.at.items())

    def created(self, rank: int, at: int) -> float:
        """Returns when the program issued a call, in milliseconds: it waits for the device when it
        is ``ahead`` of it."""
        before = at - 1 - self.ahead
        return (self.ended[rank][before] if before >= 0 else 0) + 0.01 * (at % (self.ahead + 1))

    def _kept(self, rank: int, at: int) -> int:
        before = self.job.programs[rank][:at]
        return sum((rank, op.axis) in self.group for op in before)

    def _run(self, cut: dict[int, int]) -> None:
        """Runs the job until nothing can move, or until its dump."""
        chance = random.Random(self.job.chance)  # noqa: S311 - repeatable
        ready = list(range(len(self.programs)))
        while ready:
            if self.job.until is not None:  # the ranks of a running job advance together
                at = chance.randrange(len(ready))
                ready[at], ready[-1] = ready[-1], ready[at]
            rank = ready.pop()
            while (met := self._meets(rank, cut)) is not None:
                now = 1 + max(self.ended[other][-1] if self.ended[other] else 0 for other in met)
                for other in met:
                    self.done[other] += 1
                    self.ended[other].append(now)
                ready += [other for other in met if other != rank]
                self.met += 1
                if self.met == self.job.until:
                    return

    def _at(self, rank: int, cut: dict[int, int]) -> Op | None:
        at = self.done[rank]
        if at >= min(
            len(self.programs[rank]), cut.get(rank, 1 << 60), self.dead.get(rank, 1 << 60)
        ):
            return None
        return self.programs[rank][at]

    def _meets(self, rank: int, cut: dict[int, int]) -> tuple[int, ...] | None:
        """Returns the members of this rank's current call if all have come and it matches."""
        op = self._at(rank, cut)
        if op is None:
            return None
        if op.op in P2P:
            other = self._at(op.peer or 0, cut)
            pair = {op.op, other.op} == {*P2P} if other is not None else False
            if other is None or not pair or other.peer != rank or other.numel != op.numel:
                return None
            return rank, op.peer or 0
        members = self.group[rank, op.axis]
        late = self.late.get(members, rank)  # the one that was missing last time often still is
        for member in (late, *members):
            other = self._at(member, cut)
            if (
                other is None
                or (other.axis, other.op) != (op.axis, op.op)
                or (other.numel != op.numel and op.op != "all_to_all")
            ):
                self.late[members] = member
                return None
        return members
