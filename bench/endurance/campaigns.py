"""Campaigns of cheap items on a real Slurm of three nodes and a real Ray of two, with a random kill
every so many seconds: a worker, a node, or the command itself, which then resumes.

Checked: the results are those of a campaign on this machine, no item is in the journal twice, and
no process, job or file of the executor is left. Needs what :mod:`tests.cluster` needs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from bench.endurance import cases, cheap_items
from moediag.errors import ExitCode
from tests import cluster

LOCAL, RAY, SLURM = "local", "ray", "slurm"
JOBS = "2"  # at once
LIMIT = 900.0  # seconds for a campaign
AGAIN = 10.0  # seconds after which a killed node comes back
LEFT = 60.0  # seconds after which nothing may be left
KINDS = ("worker", "node", "moediag")
_PILOT = "moediag.lab.campaign.executors.pilot"
_COUNTED = '#!/bin/sh\necho {name} >> {log}\nexec {program} "$@"\n'


@dataclass
class Round:
    """One campaign."""

    engine: str
    items: int
    rest: float
    load: float
    """Of the machine, before it."""
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    performed: int = 0
    """How often an item ended on a worker."""
    calls: Counter[str] = field(default_factory=Counter)
    """Of the scheduler's commands."""
    failures: list[str] = field(default_factory=list)


def run(
    items: int, every: float, rounds: int = 1, rest: float = 0.0, only: str = "", seed: int = 0
) -> Iterator[Round]:
    """Yields each campaign of ``items``, which sleep for ``rest`` seconds; ``every`` 0: no kill."""
    expected = _results(items)
    for engine in (LOCAL, RAY, SLURM):
        if only not in engine:
            continue
        with TemporaryDirectory(prefix="c-") as name, _engine(engine, Path(name)) as environment:
            for number in range(rounds):
                chance = random.Random(f"{seed} {engine} {number}")  # noqa: S311 - repeatable
                found = Round(engine, items, rest, os.getloadavg()[0])
                with cases.folder() as place:
                    _Campaign(found, place, environment, every, chance).run(expected)
                yield found


def _results(items: int) -> dict[int, str]:
    with TemporaryDirectory() as name:
        worker = cheap_items.Worker(Path(name), 0.0)
        return {number: worker.make(number).value for number in range(items)}


@contextmanager
def _engine(name: str, place: Path) -> Iterator[Mapping[str, str]]:
    """Starts it; yields what its commands need in their environment."""
    if name == LOCAL:
        yield {}
    elif name == RAY:
        with cluster.ray(place, {"PYTHONPATH": str(cases.ROOT)}, AGAIN) as environment:
            yield environment
    else:
        with cluster.slurm(place, again=AGAIN) as environment:
            yield environment


class _Campaign:
    def __init__(
        self, found: Round, place: Path, environment: Mapping[str, str], every: float,
        chance: random.Random,
    ) -> None:  # fmt: skip
        self.found = found
        self.place = place
        self.every = every
        self.chance = chance
        self.mark = cases.new_mark()
        self.out = place / "out"
        self.log = place / "calls.txt"
        self.environment = {**environment, "PATH": _counting(place, self.log)}

    def run(self, expected: Mapping[int, str]) -> None:
        found, begun = self.found, time.monotonic()
        process, killed = self._start(), begun
        while (code := process.poll()) != ExitCode.OK:
            now = time.monotonic()
            if now - begun > LIMIT:
                found.failures.append(f"not finished after {LIMIT:.0f} s")
                process.kill()
                break
            if code not in (None, -signal.SIGKILL, ExitCode.INCONCLUSIVE):
                found.failures.append(f"exit code {code}: {self._said()}")
                break
            if code is not None:
                found.resumed += 1
                process = self._start("--resume")
            elif self.every and now - killed > self.every:
                self._kill(process.pid)
                killed = now
            time.sleep(0.1)
        process.wait()
        found.seconds = time.monotonic() - begun
        found.calls = Counter(_lines(self.log))
        found.performed = len(_lines(self.out / cheap_items.PERFORMED))
        self._check(expected)

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        found = self.found
        words = [*cheap_items.COMMAND, "out", str(found.items), found.engine, "--rest",
                 str(found.rest), "--jobs", JOBS, *more]  # fmt: skip
        return cases.start(words, self.place, self.mark, **self.environment)

    def _kill(self, command: int) -> None:
        kind = self.chance.choice(KINDS) if self.found.engine != LOCAL else "moediag"
        if kind == "moediag":
            hit = [command]
        elif self.found.engine == RAY:
            hit = _of_ray(kind, self.chance)
        else:
            hit = _of_slurm(kind, self.chance, self.mark)
        for pid in hit:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.found.kills[kind if hit else "none"] += 1

    def _check(self, expected: Mapping[int, str]) -> None:
        failures = self.found.failures
        lines = [json.loads(line) for line in _lines(self.out / "journal.jsonl")]
        values = [line["value"] for line in lines if line["e"] == "item"]
        if len({value["number"] for value in values}) < len(values):
            failures.append("an item is in the journal twice")
        if {value["number"]: value["value"] for value in values} != expected:
            failures.append(f"{len(values)} results, which are not the local ones")
        left: list[str] = []
        if cases.gone(self.mark, LEFT, left) is None:
            failures.append(f"processes are left: {left}")
        if tasks := _tasks():
            failures.append(f"tasks are left: {tasks}")
        kept = {".up", ".log"}
        places = [*self.out.glob(".seen-*"), *self.out.glob("ray/*"), *self.out.glob("slurm/*")]
        if files := [path.name for path in places if path.suffix not in kept]:
            failures.append(f"files are left: {files}")

    def _said(self) -> str:
        return (self.place / "output.txt").read_text(errors="replace")[-400:]


def _of_slurm(kind: str, chance: random.Random, mark: str) -> list[int]:
    """The processes of a random worker, or of a node with all that runs on it."""
    workers = [pid for pid in cases.marked(mark) if _PILOT in _words(pid)]
    if kind == "worker":
        return [chance.choice(workers)] if workers else []
    daemons = [p for p in psutil.Process().children() if "slurmd" in _words(p.pid)]
    if not daemons:  # all were killed
        return []
    node = chance.choice(daemons)
    name = _words(node.pid)[2]
    hit = [node.pid]
    for pid in workers:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get("SLURMD_NODENAME") == name:
                hit += [process.ppid(), pid]
    return hit


def _of_ray(kind: str, chance: random.Random) -> list[int]:
    if kind == "worker":
        workers = _tasks()
        return [chance.choice(workers)] if workers else []
    words = ((p, _words(p.pid)) for p in psutil.Process().children())
    nodes = [p for p, said in words if "start" in said and "--head" not in said]
    return [one.pid for p in nodes for one in (p, *p.children(recursive=True))]


def _tasks() -> list[int]:
    """The workers of Ray that run an item."""
    every = psutil.Process().children(recursive=True)
    return [p.pid for p in every if " ".join(_words(p.pid)).startswith("ray::item")]


def _words(pid: int) -> Sequence[str]:
    with suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return ()


def _counting(place: Path, log: Path) -> str:
    """Returns a PATH in which the commands of Slurm write their name to ``log`` first."""
    folder = place / "counted"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "sinfo"):
        if program := shutil.which(name):
            (folder / name).write_text(_COUNTED.format(name=name, log=log, program=program))
            (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def row(found: Round) -> Sequence[object]:
    """A row of the report's table."""
    kills = ", ".join(f"{count} {kind}" for kind, count in sorted(found.kills.items()))
    calls = 60 * sum(found.calls.values()) / max(found.seconds, 1.0)
    return (
        found.engine, found.items, f"{found.rest:g} s", f"{found.seconds:.0f} s",
        f"{found.load:.1f}", kills or "none", found.resumed, found.performed, f"{calls:.0f}",
        "; ".join(found.failures) or "none",
    )  # fmt: skip


HEAD = (
    "executor", "items", "sleep", "time", "load before", "kills", "resumed", "performed",
    "scheduler calls a minute", "failures",
)  # fmt: skip
