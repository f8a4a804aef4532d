"""`moediag check --script`: runs the user's program as a few simulated ranks, one after the other.

Each is a process of its own with the environment that torchrun would give it. Only calls before the
first read of data that other ranks would have sent are compared: from there on a rank may take
another branch than it would in the job.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from moediag.diagnosis import diagnose
from moediag.errors import UsageError
from moediag.evidence.model import Collective, Evidence, RankEvidence
from moediag.evidence.trial_folder import read_trial
from moediag.lab.launch import simulated_program
from moediag.lab.launch.simulated_program import RankRun
from moediag.lab.stacks import environment
from moediag.pipeline import watch as watcher
from moediag.pipeline.run_folder import run_folder
from moediag.protocol import (
    ROOT_FILES,
    TRIAL_FILE,
    SimulatedRank,
    Trial,
    WatchTask,
    attempt_folder,
    write_json,
)
from moediag.records import dataclass
from moediag.result import FAILURES, Diagnosis
from moediag.result.answer_blocks import AnswerState

RESULT = "check.json"
MOST = 6  # simulated ranks
PER_NODE = 8
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "srun", "mpirun")
_ROOTED_SENDERS = ("broadcast", "scatter")  # their root waits for nobody
_ROOTED_RECEIVERS = ("reduce", "gather")  # only their root waits


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """The question."""

    script: str
    """The program and its arguments, as torchrun would get them."""
    world: int
    per_node: int | None = None
    """Ranks of a node; None: 8, or all."""
    steps: int = 2
    """Optimizer steps after which a rank ends."""
    stack: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 600.0
    """Seconds for all ranks together."""
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class RankRead:
    """One simulated rank: how far it came, and which of its calls can be compared."""

    rank: int
    answer: SimulatedRank | None
    """None: it created no process group."""
    calls: int
    """Recorded calls."""
    compared: int
    """Those that a real rank makes as well."""
    raised: str
    """The exception that ended it, with the user's line; "" if none."""
    code: int | None
    """Exit code; None: the time limit ended it."""

    @property
    def problem(self) -> str:
        """Why less than one optimizer step of this rank can be compared; "" if more can be."""
        if self.answer is None:
            ended = f"it ended with {self.raised}" if self.raised else "it created no process group"
            return ended if self.code is not None else "the time limit ended it before that"
        if self.answer.problem:
            return self.answer.problem
        if self.answer.read:
            return "" if self.answer.read_after else self.unseen
        return self.unseen or ("" if self.calls else "none of its calls was recorded")

    @property
    def unseen(self) -> str:
        """Why not all of its calls are comparable, or ""."""
        answer = self.answer
        if answer is None:
            return ""
        if answer.read:
            return f"its program read data of other ranks, which are not real: {answer.read}"
        if self.raised:
            return f"it ended with {self.raised}"
        if self.code is None:
            return "the time limit ended it"
        return f"it ended with exit code {self.code}" if self.code else ""

    @property
    def whole(self) -> bool:
        """Whether the program ended by itself, so that it makes no further call."""
        known = self.answer is not None and self.answer.ended != "steps" and self.code == 0
        return known and not self.unseen


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """Everything that the simulated ranks showed."""

    script: str
    world: int
    ranks: tuple[RankRead, ...]
    diagnosis: Diagnosis | None
    """None: nothing was recorded."""
    versions: Mapping[str, str | None]
    folder: Path

    @property
    def failing(self) -> bool:
        found = self.diagnosis
        return (
            found is not None and found.verdict in FAILURES and found.first_divergence is not None
        )

    @property
    def undecided(self) -> str:
        """Returns why nothing can be said, "" if something can."""
        for one in self.ranks:
            if one.problem:
                return f"rank {one.rank}: {one.problem}"
        return ""

    @property
    def state(self) -> AnswerState:
        return AnswerState.of(self.failing, self.undecided, AnswerState.NO_FAILURE)


def check_script(options: ScriptOptions, tell: Callable[[str, float | None], None]) -> ScriptResult:
    """Returns what was found; ``check.json`` in its folder has the same. Raises UsageError and
    StackError."""
    stack = environment.ensure(options.stack, tell) if options.stack else None
    words = program(options.script, str(stack.python) if stack else sys.executable)
    folder = run_folder(options.out, f"check-{watcher.title(words)}")
    path = [*map(str, stack.pythonpath if stack else ()), os.environ.get("PYTHONPATH", "")]
    ranks, evidence, compared = simulate(Simulation(
        words, options.world, min(options.per_node or PER_NODE, options.world), options.steps,
        options.timeout, os.pathsep.join(filter(None, path)),
    ), folder, tell)  # fmt: skip
    recorded = any(seen.collectives for seen in compared.ranks.values())
    found = evidence.ranks[0].versions
    result = ScriptResult(
        options.script, options.world, ranks, diagnose(compared) if recorded else None,
        {name: found[name] for name in found if found[name]}, folder,
    )  # fmt: skip
    write_json(folder / RESULT, to_json(result))
    return result


@dataclass(frozen=True, slots=True)
class Simulation:
    """A program and the job that it believes to be in."""

    words: Sequence[str]
    world: int
    per_node: int
    steps: int
    timeout: float
    """Seconds for all ranks together."""
    pythonpath: str
    ranks: tuple[int, ...] = ()
    """Which to simulate beside rank 0; (): one of each class."""


def simulate(
    asked: Simulation, folder: Path, tell: Callable[[str, float | None], None]
) -> tuple[tuple[RankRead, ...], Evidence, Evidence]:
    """Returns the simulated ranks, everything that they left in ``folder``, and what of it can be
    compared. Raises UsageError."""
    place = folder / attempt_folder(0)
    waiting, runs, left = [0], [], asked.timeout
    while waiting:
        rank = waiting.pop(0)
        tell(f"running as rank {rank} of {asked.world}", None)
        variables = of_torchrun(rank, asked.world, asked.per_node)
        variables["PYTHONPATH"] = asked.pythonpath
        done = simulated_program.run(asked.words, folder, variables, asked.steps, left)
        left = max(1.0, left - done.seconds)
        runs.append(done)
        if rank == 0:
            waiting = list(asked.ranks) or others(asked.world, asked.per_node, _groups(place))
    for path in place.glob(ROOT_FILES):
        path.unlink()  # what roots broadcast, for the ranks after them
    if not (place / TRIAL_FILE).exists():
        Trial(
            name=place.name, scenario=watcher.title(asked.words), variant="simulated",
            task=WatchTask(), world_size=asked.world, backend="", launcher="",
        ).write(place)  # fmt: skip
    evidence = read_trial(place)
    ranks = tuple(_read(run, evidence.ranks[run.rank], place) for run in runs)
    return ranks, evidence, comparable(evidence, ranks)


def program(script: str, python: str) -> list[str]:
    """Returns the command of ``script``, which may begin with an interpreter. Raises UsageError for
    a launcher."""
    words = shlex.split(script)
    if not words or Path(words[0]).name in _LAUNCHERS:
        raise UsageError(
            f"--script {script!r} is not a program that one rank runs",
            "Give what torchrun gets, without the launcher: --script 'train.py --config c.yaml'",
        )
    return [python, *words] if words[0].endswith(".py") or words[0] == "-m" else words


def of_torchrun(rank: int, world: int, per_node: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for ``rank``."""
    node, local = divmod(rank, per_node)
    nodes = -(-world // per_node)
    values = {
        "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": min(per_node, world - node * per_node), "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": "localhost", "MASTER_PORT": 29500, "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": "none",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        # A compiled step makes the same calls; under a simulation it is not compiled.
        "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    return {name: str(value) for name, value in values.items()}


def others(world: int, per_node: int, groups: Iterable[Sequence[int]]) -> list[int]:
    """Returns which ranks to simulate beside rank 0: the second and the last one, the first one of
    the second node, and the next one along each axis of rank 0's groups."""
    found = [1, world - 1, per_node]
    for ranks in sorted(groups, key=len):
        found += list(ranks)[1:2]
    return sorted(dict.fromkeys(rank for rank in found if 0 < rank < world).keys())[: MOST - 1]


def _groups(place: Path) -> list[tuple[int, ...]]:
    """Returns the members of rank 0's groups."""
    return [group.ranks for group in read_trial(place).ranks[0].groups.values()]


def _read(run: RankRun, seen: RankEvidence, place: Path) -> RankRead:
    answer = SimulatedRank.of(place, run.rank)
    error = seen.error
    raised = ""
    if error is not None and run.code:
        text = " ".join(error.message.split())[:300]
        raised = f"{error.type}: {text}{f' at {error.where}' if error.where else ''}"
    calls = len(seen.collectives)
    end = error.time if error is not None and error.time > 0 else float("inf")
    known = answer.known if answer is not None and answer.known is not None else calls
    compared = sum(call.index < known and call.time <= end for call in seen.collectives)
    return RankRead(run.rank, answer, calls, compared, raised, run.code)


def comparable(evidence: Evidence, ranks: Iterable[RankRead]) -> Evidence:
    """Returns the calls that real ranks make as well. A rank waits in them as on real ranks."""
    return dataclasses.replace(
        evidence,
        ranks={one.rank: _until(evidence.ranks[one.rank], one) for one in ranks},
        stall=None, timed_out=False, launch_error="", deaths=(), backend="", watched=True,
    )  # fmt: skip


def _until(seen: RankEvidence, read: RankRead) -> RankEvidence:
    calls = tuple(_waiting(call, seen) for call in seen.collectives[: read.compared])
    return dataclasses.replace(
        seen, collectives=calls, finished=read.whole, error=None, exit=None, alone=None, laws=None,
        outcome=None,
    )  # fmt: skip


def _waiting(call: Collective, seen: RankEvidence) -> Collective:
    """Returns the call as one that the rank waits in if it waited at all: no simulated call takes
    time. A root that only sends need not wait, nor does the sender of a message."""
    group = seen.groups.get(call.group)
    root = call.peer == seen.rank
    alone = group is not None and len(group.ranks) == 1
    sends = (call.op in _ROOTED_SENDERS and root) or (call.op in _ROOTED_RECEIVERS and not root)
    never = call.op in ("send", "recv") or sends or alone
    waited = call.completed or not call.asynchronous
    return dataclasses.replace(call, completed=never or not waited, failed="")


def to_json(result: ScriptResult) -> dict[str, Any]:
    found = result.diagnosis
    first = found.first_divergence if found is not None and result.failing else None
    return {
        "schema_version": 1,
        "script": result.script,
        "world_size": result.world,
        "versions": dict(result.versions),
        **result.state.to_json(),
        "undecided": result.undecided,
        "cause": found.cause if found is not None and result.failing else "",
        "next_step": found.next_step if found is not None and result.failing else "",
        "culprits": list(found.culprits) if found is not None and result.failing else [],
        "first_divergence": dataclasses.asdict(first) if first is not None else None,
        "ranks": [
            {**dataclasses.asdict(one), "unseen": one.unseen, "problem": one.problem}
            for one in result.ranks
        ],
    }
