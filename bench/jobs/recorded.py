"""What each rank's Flight Recorder (torch 2.13, format 2.10) holds of a simulated job: the fields,
types and order that it writes.

A group has three names: ``process_group`` (the same in all processes unless ``local_names``),
``pg_id`` (the n-th group of this process) and a description. ``pg_status`` goes by ``pg_id``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.jobs.device import Run
from bench.jobs.schedules import P2P, Job, Op

BEGAN = 1_700_000_000 * 10**9
TIMEOUT = 600_000  # milliseconds, NCCL's default
MILLISECOND = 1_000_000

_NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}
_DESC = {"world": "default_pg", "tp": "TENSOR_MODEL_PARALLEL_GROUP",
         "dp": "DATA_PARALLEL_GROUP", "ep": "EXPERT_MODEL_PARALLEL_GROUP",
         "pp": "PIPELINE_MODEL_PARALLEL_GROUP"}  # fmt: skip


def dumps(
    job: Job, ring: int = 2000, frames: bool = True, local_names: bool = False, ahead: int = 4,
    states: bool = True, timing: bool = True, active_only: bool = False, run: Run | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:  # fmt: skip
    """Yields (rank, its dump as plain data).

    ``local_names``: every process numbers its own groups, as in jobs whose ranks create only
    theirs. ``states``: completion is recorded. ``timing``: so is the start of a call
    (TORCH_NCCL_ENABLE_TIMING). ``active_only``: completed calls are left out
    (TORCH_INCLUDE_ONLY_ACTIVE). ``run``: that of this job, if it exists already.
    """
    run = run or Run(job, ahead)
    counter = itertools.count(1)
    numbers = {
        (axis, ranks): 0 if axis == "world" else next(counter)
        for axis, of in job.layout.groups().items()
        for ranks in of
    }
    of_rank: dict[int, list[Any]] = {rank: [] for rank in range(job.layout.world)}
    for key in numbers:
        for rank in key[1]:
            of_rank[rank].append(key)
    at = int(taken(run) * 1e9)
    for rank, own in of_rank.items():
        if rank not in job.silent:
            names = {key: str(i if local_names else numbers[key]) for i, key in enumerate(own)}
            recorder = _Recorder(run, rank, names, at, states, timing)
            yield rank, recorder.dump(ring, frames, active_only)


def taken(run: Run) -> float:
    """Returns when a job's dumps were written, in seconds of the wall clock: of one that hangs, by
    its watchdog, when the oldest call in progress timed out; of another, at its newest call."""
    ranks = range(len(run.programs))
    opened = [run.created(r, run.done[r]) for r in ranks if run.done[r] < run.issued[r]]
    newest = max(run.created(r, run.issued[r] - 1) for r in ranks if run.issued[r])
    if run.job.culprits and opened:
        newest = max(min(opened) + TIMEOUT, newest) + 1000
    return BEGAN / 1e9 + newest / 1e3


class _Recorder:
    def __init__(
        self, run: Run, rank: int, names: dict[Any, str], at: int, states: bool, timing: bool
    ) -> None:
        self.run, self.rank, self.names = run, rank, names
        self.states, self.timing = states, timing
        self.ids = {name: number for number, name in enumerate(names.values())}
        self.taken = at
        self.counts: dict[str, int] = {}
        self.sends: dict[str, int] = {}
        self.status: dict[int, dict[str, int]] = {}
        self.kept: dict[int, _Kept] = {}  # by the identity of an Op

    def dump(self, ring: int, frames: bool, active_only: bool) -> dict[str, Any]:
        program = self.run.programs[self.rank][: self.run.issued[self.rank]]
        entries = [self.entry(at, op, frames) for at, op in enumerate(program)][-ring:]
        if active_only:
            entries = [e for e in entries if e["time_discovered_completed_ns"] is None]
        return {
            "version": "2.10",
            "pg_config": {
                name: {"name": name, "desc": _DESC[axis], "ranks": str(list(ranks))}
                for (axis, ranks), name in sorted(self.names.items(), key=lambda item: item[1])
                if self.ids[name] in self.status
            },
            "comm_lib_version": "2.27.3",
            "pg_status": {str(number): self.status[number] for number in sorted(self.status)},
            "entries": entries,
        }

    def entry(self, at: int, op: Op, frames: bool) -> dict[str, Any]:
        run, rank = self.run, self.rank
        ranks = run.group[rank, op.axis]
        name = self.names[op.axis, ranks]
        of = self.sends if op.op in P2P else self.counts
        of[name] = of.get(name, 0) + 1
        count, sends = self.counts.get(name, 0), self.sends.get(name, 0)
        done = self.states and at < run.done[rank]
        begun = self.timing and self.states and at <= run.done[rank] and at != run.dead.get(rank)
        created = BEGAN + int(run.created(rank, at) * MILLISECOND)
        ended = BEGAN + run.ended[rank][at] * MILLISECOND if done else None
        # The recorder looks when the watchdog retires the call, and when a dump is written.
        started = (ended or self.taken) if begun else None
        self.note(self.ids[name], of[name], started is not None, done)
        kept = self.kept.get(id(op))
        if kept is None:
            kept = self.kept[id(op)] = _Kept(
                {"frames": _frames(op)} if frames else {},
                (name, _DESC[op.axis]),
                f"nccl:{_profiled(op, rank, ranks)}",
                *_sizes(op, len(ranks)),
            )
        timed = started is not None and ended is not None
        return {
            **kept.frames,
            "record_id": at,
            "pg_id": self.ids[name],
            "process_group": kept.group,
            "thread_name": "pt_main_thread",
            "thread_id": "140735340871680",
            "collective_seq_id": count,
            "p2p_seq_id": sends,
            "op_id": count + sends,
            "profiling_name": kept.profiled,
            "time_created_ns": created,
            **({"duration_ms": 1.0} if timed else {}),
            "input_sizes": [[kept.into]],
            "input_dtypes": ["BFloat16"],
            "output_sizes": [[kept.out]],
            "output_dtypes": ["BFloat16"],
            "state": "completed" if done else "started" if begun else "scheduled",
            "time_discovered_started_ns": started,
            "time_discovered_completed_ns": ended,
            "retired": done,
            "timeout_ms": TIMEOUT,
            "is_p2p": op.op in P2P,
        }

    def note(self, group: int, seq: int, started: bool, done: bool) -> None:
        """Counts a call in ``pg_status``; a group is in it once it has recorded one. Collectives
        and point-to-point calls have their own numbers, and the newest is kept."""
        status = self.status.setdefault(group, dict.fromkeys(_STAGES, -1))
        for stage, reached in zip(_STAGES, (True, started, done), strict=True):
            if reached:
                status[stage] = seq


@dataclass(frozen=True)
class _Kept:
    """What all entries of one ``Op`` have in common. The frames of equal stacks are one object, as
    in torch's pickles."""

    frames: dict[str, Any]
    group: tuple[str, str]
    profiled: str
    into: int
    out: int


_STAGES = tuple(f"last_{stage}_collective" for stage in ("enqueued", "started", "completed"))


def as_json(raw: dict[str, Any]) -> dict[str, Any]:
    """The dump as the recorder's JSON writer has it: without stacks, numbers of ``pg_status`` as
    text, 0 for a time that is not known, no ``entries`` if there are none."""
    zero = ("time_discovered_started_ns", "time_discovered_completed_ns")
    entries = [
        {key: 0 if key in zero and value is None else value for key, value in sorted(entry.items())
         if key != "frames"}
        for entry in raw["entries"]
    ]  # fmt: skip
    status = {
        group: {key: str(value) for key, value in of.items()}
        for group, of in raw["pg_status"].items()
    }
    whole = raw | {"pg_status": status, "entries": entries}
    return {key: whole[key] for key in sorted(whole) if key != "entries" or entries}


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
