"""Simulates jobs: Megatron-like schedules over pipeline, data, tensor and expert groups with one
fault, and the Flight Recorder dumps that such a job leaves on NCCL.

The device of each rank runs its calls in order; a call completes when all its members run it and
it matches. The program runs some calls ahead of the device, as on a GPU. So the dumps have the
same calls completed, begun and scheduled as those of the real recorder.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

P2P = ("send", "recv")
P2P_LINES = (10, 40)  # of a receive and of the send it meets, in each direction
NEW_LINES = {"extra": 900, "op": 901}  # where the culprit makes a call that nobody else makes
FAULTS = ("skip", "extra", "op", "size", "order", "stuck", "killed", "device", "skip-p2p")
BEGAN = 1_700_000_000 * 10**9


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
    """A simulated job with at most one fault."""

    layout: Layout
    programs: list[list[Op]]  # one list of calls per rank
    fault: str = "none"
    culprits: tuple[int, ...] = ()  # the ranks that a diagnosis must name
    stuck: dict[int, int] = field(default_factory=dict)  # rank -> call its program never issues
    dead_device: dict[int, int] = field(default_factory=dict)  # rank -> call it never begins
    silent: frozenset[int] = frozenset()  # ranks that leave no dump
    lines: tuple[int, ...] = ()  # a diagnosis must name one: where the culprit left the others
    # The job still runs: dumped after this many completed calls, in an order drawn by ``chance``.
    until: int | None = None
    chance: int = 0


def healthy(layout: Layout, steps: int, micro_batches: int = 2, layers: int = 2) -> Job:
    programs = [
        list(_program(layout, r, steps, micro_batches, layers)) for r in range(layout.world)
    ]
    return Job(layout, programs)


def _program(layout: Layout, rank: int, steps: int, micro: int, layers: int) -> Iterator[Op]:
    stage, data, tensor = layout.place(rank)
    first, last = stage == 0, stage == layout.pp - 1
    before = None if first else layout.rank(stage - 1, data, tensor)
    after = None if last else layout.rank(stage + 1, data, tensor)
    hidden = 4096
    for _ in range(steps):
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


def faulty(job: Job, fault: str, seed: int) -> Job:
    """Returns ``job`` with one fault on one rank in its second half. Raises ValueError if this
    layout cannot have that fault."""
    chance = random.Random(f"{fault} {seed} {job.layout}")  # noqa: S311 - repeatable
    rank = chance.randrange(job.layout.world)
    sizes = {axis: [r for r in of if rank in r] for axis, of in job.layout.groups().items()}
    program = list(job.programs[rank])
    wanted = [
        at
        for at, op in enumerate(program)
        if at > len(program) // 2
        and sizes[op.axis]
        and (op.op in P2P) == (fault == "skip-p2p")
        and (fault != "order" or _swappable(job, rank, at, sizes))
    ]
    if not wanted:
        raise ValueError(f"{job.layout} has no place for {fault}")
    at = chance.choice(wanted)
    op = program[at]
    programs = list(job.programs)
    made = replace(job, fault=fault, culprits=(rank,), programs=programs, lines=(op.line,))
    if fault == "order":
        made.lines = (op.line, program[at + 1].line)
    elif fault == "skip-p2p":  # the peer waits at the other end of the channel
        made.lines = tuple(op.line // 100 * 100 + end for end in P2P_LINES)
    elif fault in NEW_LINES:
        made.lines = (NEW_LINES[fault],)
    if fault in ("skip", "skip-p2p"):
        del program[at]
    elif fault == "extra":
        program.insert(at, replace(op, numel=op.numel * 3, line=NEW_LINES[fault]))
    elif fault == "op":
        new = "broadcast" if op.op != "broadcast" else "all_reduce"
        program[at] = replace(op, op=new, line=NEW_LINES[fault])
    elif fault == "size":
        program[at] = replace(op, op="all_reduce" if op.op == "all_to_all" else op.op,
                              numel=op.numel * 2)  # fmt: skip
    elif fault == "order":
        program[at], program[at + 1] = program[at + 1], program[at]
    elif fault in ("stuck", "killed"):
        made.stuck = {rank: at}
        made.silent = frozenset({rank} if fault == "killed" else ())
    elif fault == "device":
        made.dead_device = {rank: at}
    programs[rank] = program
    return made


def running(job: Job, seed: int) -> Job:
    """Returns ``job`` dumped while it runs, somewhere in its second half."""
    chance = random.Random(f"running {seed} {job.layout}")  # noqa: S311 - repeatable
    calls = Run(job).met
    return replace(job, until=chance.randrange(calls // 2, calls - 1), chance=seed)


def _swappable(job: Job, rank: int, at: int, groups: dict[str, list[tuple[int, ...]]]) -> bool:
    """Whether two neighbouring collectives of different groups share two ranks, so that swapping
    them makes each wait for the other's group."""
    program = job.programs[rank]
    if at + 1 >= len(program) or program[at + 1].op in P2P:
        return False
    a, b = program[at].axis, program[at + 1].axis
    if a == b or not groups[a] or not groups[b]:
        return False
    return len(set(groups[a][0]) & set(groups[b][0])) > 1


# ------------------------------------------------------------------------ running it


class Run:
    """Runs a job. Counts, per rank, completed (``done``) and ``issued`` calls; ``met`` counts each
    completed call once."""

    def __init__(self, job: Job, ahead: int = 4) -> None:
        self.job = job
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
        self._run(cut)
        self.issued = [
            min(cut.get(r, len(self.programs[r])), self.done[r] + 1 + ahead) for r in world
        ]

    def waiting_for(self, culprit: int) -> tuple[int, ...]:
        """Returns the lines in which other ranks wait for a call of ``culprit``."""
        lines = set()
        for rank, (done, program) in enumerate(zip(self.done, self.programs, strict=True)):
            if rank != culprit and done < len(program):
                op = program[done]
                if culprit in (self.group[rank, op.axis] if op.peer is None else (op.peer,)):
                    lines.add(op.line)
        return tuple(sorted(lines))

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
                for other in met:
                    self.done[other] += 1
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
        for member in members:
            other = self._at(member, cut)
            if other is None or (other.axis, other.op) != (op.axis, op.op):
                return None
            if other.numel != op.numel and op.op != "all_to_all":
                return None
        return members


# ------------------------------------------------------------------------ what it leaves

_NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}
_DESC = {"world": "default_pg", "tp": "TENSOR_MODEL_PARALLEL_GROUP",
         "dp": "DATA_PARALLEL_GROUP", "ep": "EXPERT_MODEL_PARALLEL_GROUP",
         "pp": "PIPELINE_MODEL_PARALLEL_GROUP"}  # fmt: skip


def dumps(
    job: Job, ring: int = 2000, frames: bool = True, local_names: bool = False, ahead: int = 4,
    states: bool = True,
) -> Iterator[tuple[int, dict[str, Any]]]:  # fmt: skip
    """Yields (rank, its dump as plain data). With ``local_names`` every process numbers its own
    groups, as in jobs whose ranks create only theirs."""
    run = Run(job, ahead)
    counter = itertools.count(1)
    numbers = {
        (axis, ranks): 0 if axis == "world" else next(counter)
        for axis, of in job.layout.groups().items()
        for ranks in of
    }
    for rank, program in enumerate(run.programs):
        if rank not in job.silent:
            own = [key for key in numbers if rank in key[1]]
            names = {key: str(i if local_names else numbers[key]) for i, key in enumerate(own)}
            yield rank, _dump(run, rank, program, names, ring, frames, states)


def _dump(
    run: Run, rank: int, program: list[Op], names: dict[Any, str], ring: int, frames: bool,
    states: bool,
) -> dict[str, Any]:  # fmt: skip
    counts: dict[str, int] = {}
    sends: dict[str, int] = {}
    entries = []
    stacks: dict[int, list[dict[str, Any]]] = {}
    for index, op in enumerate(program[: run.issued[rank]]):
        ranks = run.group[rank, op.axis]
        name = names[op.axis, ranks]
        p2p = op.op in P2P
        of = sends if p2p else counts
        of[name] = of.get(name, 0) + 1
        done = index < run.done[rank]
        running = not done and index == run.done[rank] and index != run.dead.get(rank)
        into, out = _sizes(op, len(ranks))
        entry = {
            "record_id": index,
            "pg_id": int(name),
            "process_group": (name, _DESC[op.axis]),
            "collective_seq_id": counts.get(name, 0),
            "p2p_seq_id": sends.get(name, 0),
            "op_id": counts.get(name, 0) + sends.get(name, 0),
            "profiling_name": f"nccl:{_profiled(op, rank, ranks)}",
            "time_created_ns": BEGAN + index * 1_000_000 + rank,
            "input_sizes": [[into]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[out]],
            "output_dtypes": ["BFloat16"],
            "state": "completed" if done else "started" if running else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": BEGAN + index * 1_000_000 + 500 if done else None,
            "retired": done,
            "timeout_ms": 600_000,
            "is_p2p": p2p,
        }
        if not states:
            entry |= {"state": "scheduled", "time_discovered_completed_ns": None, "retired": False}
        if frames:
            if op.line not in stacks:
                stacks[op.line] = _frames(op)
            entry["frames"] = stacks[op.line]
        entries.append(entry)
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.3",
        "pg_config": {
            name: {"name": name, "desc": _DESC[axis], "ranks": str(list(ranks))}
            for (axis, ranks), name in names.items()
        },
        "pg_status": {},
        "entries": entries[-ring:],
    }


def _sizes(op: Op, members: int) -> tuple[int, int]:
    if op.op == "all_gather":
        return op.numel // members, op.numel
    if op.op == "reduce_scatter":
        return op.numel, op.numel // members
    return op.numel, op.numel


def _profiled(op: Op, rank: int, ranks: tuple[int, ...]) -> str:
    if op.op == "send":
        return f"send {ranks.index(rank)}->{ranks.index(op.peer or 0)}"
    if op.op == "recv":
        return f"recv {ranks.index(rank)}<-{ranks.index(op.peer or 0)}"
    return _NAMES.get(op.op, op.op)


def _frames(op: Op) -> list[dict[str, Any]]:
    library = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    return [
        {"name": op.op, "filename": library, "line": 4000},
        {"name": "training_step", "filename": "/job/train.py", "line": op.line},
        {"name": "<module>", "filename": "/job/train.py", "line": 1000},
    ]


def write(job: Job, folder: Path, form: str = "pickle", **options: Any) -> Path:
    """Writes one file per rank, named as by NCCL's own writer. The file of a running job is as old
    as its newest call."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, raw in dumps(job, **options):
        path = folder / f"nccl_trace_rank_{rank}"
        if form == "pickle":
            path.write_bytes(pickle.dumps(raw))
        else:
            path.write_text(json.dumps(raw))
        if job.until is not None:
            newest = (raw["entries"] or [{"time_created_ns": BEGAN}])[-1]["time_created_ns"] / 1e9
            os.utime(path, (newest, newest))
    return folder
