"""`moediag attach` on real jobs that were started without moediag, one of them by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moediag.launch.attach import found_jobs
from moediag.launch.attach.looking import asleep
from moediag.launch.attach.proc import Proc
from tests.e2e.launchers import PLAIN, TORCHRUN
from tests.victims.table import marked

pytestmark = pytest.mark.e2e

PROGRAM = Path(__file__).parents[1] / "victims" / "attached_jobs.py"
SAID = ["rank 0 is done", "rank 1 is done"]


class Running:
    """A job, and the file that lets it end."""

    def __init__(self, process: subprocess.Popen[str], end: Path) -> None:
        self.process = process
        self.end = end

    def states(self) -> list[tuple[str, float]]:
        """(state, seconds asleep) of each rank that has joined its group; [] until all have."""
        found = found_jobs.of_process(Proc(), self.process.pid)
        ranks = found[0].ranks if found else ()
        seen = [(Proc().seen(one.pid), asleep(Proc(), one.pid) or 0.0) for one in ranks]
        return [(one.state, at) for one, at in seen if one is not None]

    def attach(self, *of: str, **more: str) -> tuple[int, dict[str, Any]]:
        run = self.end.with_name("-".join(("run", *of)))
        done = subprocess.run(
            [sys.executable, "-m", "moediag", "attach", *(of or (str(self.process.pid),)), "--json",
             "--patience", "3", "--out", str(run)],
            capture_output=True, text=True, timeout=120, check=False, env=os.environ | more,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)["trials"][0]

    def pids(self) -> list[int]:
        (found,) = found_jobs.of_process(Proc(), self.process.pid)
        return [one.pid for one in found.ranks]

    def finish(self) -> tuple[int, list[str]]:
        """Lets the job end; returns its exit code and what it printed."""
        self.end.touch()
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, sorted(output.splitlines())


@contextmanager
def running(
    name: str, folder: Path, ready: Callable[[list[tuple[str, float]]], bool],
    launcher: tuple[str, ...] = PLAIN,
) -> Iterator[Running]:  # fmt: skip
    end = folder / "end"
    process = subprocess.Popen(
        [*launcher, "2", str(PROGRAM), name, str(end)], stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "SLURM_JOB_ID": str(os.getpid())},
    )  # fmt: skip
    job = Running(process, end)
    try:
        while len(states := job.states()) < 2 or not ready(states):
            assert process.poll() is None
            time.sleep(0.3)
        yield job
    finally:
        process.terminate()
        process.communicate(timeout=60)


def both_sleep(states: list[tuple[str, float]]) -> bool:
    return all(at > 2.0 for _, at in states)


def names_the_line(name: str, trial: dict[str, Any]) -> bool:
    return any(f"{line} " in str(trial["cause"]) for line in marked(name, PROGRAM)) or any(
        f"{line})" in str(trial["cause"]) for line in marked(name, PROGRAM)
    )


def slurm(folder: Path) -> str:
    """A PATH with a stand-in for a Slurm of two nodes: this machine, and one that is down."""
    tools = {
        "squeue": "echo 'n[1-2]'",
        "scontrol": "echo n1; echo n2",
        "srun": 'case "$*" in *list=n2*) echo "srun: error: the node is down" >&2; exit 1;; esac\n'
        'while [ "$1" != sh ]; do shift; done; exec "$@"',
    }
    for name, script in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_hang_with_a_condition_on_the_rank(tmp_path: Path) -> None:
    with running("condition", tmp_path, both_sleep, TORCHRUN) as job:
        before = job.states()
        found = [job.attach(), job.attach("--slurm", str(os.getpid()), PATH=slurm(tmp_path))]
        after = job.states()
    for code, trial in found:
        assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", [0]), trial["cause"]
        assert names_the_line("condition", trial), trial["cause"]
    assert found[1][1]["not_seen"] == ["n2: srun: error: the node is down"]
    # No look has woken a rank.
    assert all(late[1] > early[1] for early, late in zip(before, after, strict=True))


def test_a_job_that_computes(tmp_path: Path) -> None:
    with running("computes", tmp_path, lambda states: all(s == "R" for s, _ in states)) as job:
        code, trial = job.attach()
        ended = job.finish()
    assert (code, trial["verdict"], trial["culprits"]) == (0, "clean", []), trial["cause"]
    assert ended == (0, SAID)


@pytest.mark.wide
def test_a_slow_save(tmp_path: Path) -> None:
    def saving(states: list[tuple[str, float]]) -> bool:
        return states[1][1] > 2.0 and (tmp_path / "end.checkpoint").exists()

    with running("saves", tmp_path, saving) as job:
        code, trial = job.attach()
        ended = job.finish()
    assert (code, trial["verdict"], trial["culprits"]) == (0, "clean", []), trial["cause"]
    assert "writes end.checkpoint at" in str(trial["cause"])
    assert ended == (0, SAID)


def test_a_stopped_rank(tmp_path: Path) -> None:
    with running("stopped", tmp_path, lambda s: s[1][0] == "T" and s[0][1] > 2.0) as job:
        code, trial = job.attach()
        assert job.states()[1][0] == "T"  # nothing continued it
        os.kill(job.pids()[1], signal.SIGCONT)
        ended = job.finish()
    assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", [1]), trial["cause"]
    assert "SIGSTOP" in str(trial["cause"])
    assert names_the_line("stopped", trial), trial["cause"]
    assert ended == (0, SAID)


@pytest.mark.wide
def test_a_file_lock(tmp_path: Path) -> None:
    with running("locked", tmp_path, both_sleep) as job:
        code, trial = job.attach()
    # The rank that holds the lock may be as wrong as the one that waits for it.
    assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", []), trial["cause"]
    assert "the lock of the file end.lock, which rank 0 holds" in str(trial["cause"])
