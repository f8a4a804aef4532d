"""Workers of Slurm without Slurm: how many, for which items, and how they wait and end."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moediag
from moediag.errors import MachineError
from moediag.lab.campaign.executors import pilot, slurm
from moediag.lab.campaign.executors.executor import Call, Lost, Reply, TooLong
from moediag.lab.campaign.executors.slurm import Slurm, SlurmJob
from moediag.lab.campaign.executors.squeue import Queue, parse

ALIVE = ("PENDING", "RUNNING")
CALL = Call(pickle.dumps(functools.partial(int, "7")), moediag.__version__, {}, {})


class Cluster:
    """Answers Slurm's commands. ``jobs``: id -> (state, reason, node)."""

    def __init__(self) -> None:
        self.jobs: dict[str, tuple[str, str, str]] = {}
        self.begins = ("PENDING", "Resources", "")
        self.refuses = ""
        self.prints = "{}\n"
        self.lists = True
        self.away = False
        self.asked = 0
        self.scripts: list[str] = []
        self.cancelled: list[str] = []

    def __call__(self, name: str, *words: str, said: str = "") -> Any:
        if self.away:
            return subprocess.CompletedProcess((), 1, "", "Unable to contact slurm controller")
        if name == "squeue":
            self.asked += 1
            jobs = self.jobs.items() if self.lists else ()
            lines = (f"{job}|{'|'.join(words)}" for job, words in jobs)
            return subprocess.CompletedProcess((), 0, "\n".join(lines), "")
        if name == "scancel":
            alive = (job for job, (state, *_) in self.jobs.items() if state in ALIVE)
            every = [job for job in alive if job not in self.cancelled]
            self.cancelled += every if words[0].startswith("--name=moediag-") else words
        if name == "sbatch":
            if self.refuses:
                return subprocess.CompletedProcess((), 1, "", f"sbatch: error: {self.refuses}")
            self.scripts.append(said)
            self.jobs[str(len(self.scripts))] = self.begins
            return subprocess.CompletedProcess((), 0, self.prints.format(len(self.scripts)), "")
        return subprocess.CompletedProcess((), 0, "", "")

    def becomes(self, state: str, job: str = "1", reason: str = "None", node: str = "n1") -> None:
        self.jobs[job] = (state, reason, node)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def engine(
    cluster: Cluster, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Slurm]:
    monkeypatch.setattr(slurm, "GLANCE", 0.0)
    monkeypatch.setattr(slurm, "PATIENCE", 0.0)
    monkeypatch.setattr(slurm, "SILENCE", 0.0)

    def make(**arguments: str) -> Slurm:
        return Slurm(arguments, tmp_path, 120.0, said.append, cluster, pace=0.0)

    return make


def submitted(engine: Slurm, name: str = "a") -> SlurmJob:
    job = engine.submit(name, CALL)
    assert isinstance(job, SlurmJob)
    return job


def takes(engine: Slurm, job: SlurmJob, worker: str = "1", number: int = 1) -> Path:
    """A worker takes the call."""
    taken = engine.folder / f"{job.key}.{worker}.{number}.taken"
    return (engine.folder / f"{job.key}.call").rename(taken)


# ------------------------------------------------------------------------ workers and items


def test_a_worker_for_each_item_that_is_open(
    engine: Callable[..., Slurm], cluster: Cluster
) -> None:
    one = engine(partition="cpu", exclusive="true", time="3")
    jobs = [submitted(one, name) for name in "ab"]
    assert [job.reply() for job in jobs] == [None, None]
    assert len(cluster.scripts) == 2
    script = cluster.scripts[0].splitlines()
    assert {"#SBATCH --partition=cpu", "#SBATCH --exclusive", "#SBATCH --time=3",
            "#SBATCH --no-requeue"} <= set(script)  # fmt: skip
    assert "signal" not in cluster.scripts[0] and script[-1].endswith(f"{one.folder} 180")
    cluster.becomes("RUNNING", "1")
    cluster.becomes("RUNNING", "2")
    pilot.put(one.folder, jobs[0].key, Reply(7))
    assert jobs[0].reply() == Reply(7)
    submitted(one, "c")
    assert len(cluster.scripts) == 2, "the first worker is free"
    cluster.becomes("COMPLETED", "1")
    jobs[1].reply()
    assert len(cluster.scripts) == 3, "it ended, and two items are open"
    one.close()
    assert sorted(cluster.cancelled) == ["2", "3"]


def test_the_limit_counts_from_the_start(engine: Callable[..., Slurm], cluster: Cluster) -> None:
    one = engine()
    job = submitted(one)
    assert job.reply() is None and not job.running
    takes(one, job)
    cluster.becomes("RUNNING")
    assert job.reply() is None and job.running


def test_slurm_is_asked_for_all_jobs_at_once_and_seldom(cluster: Cluster) -> None:
    cluster.becomes("RUNNING")
    queue = Queue("name", cluster, pace=3600.0)
    assert [queue.jobs()["1"].state for _ in range(50)] == ["RUNNING"] * 50
    queue.submitted("2")
    assert queue.jobs()["2"].waiting
    assert cluster.asked == 1


def test_a_controller_that_is_away_ends_nothing(
    engine: Callable[..., Slurm], cluster: Cluster, said: list[str]
) -> None:
    one = engine()
    job = submitted(one)
    takes(one, job)
    cluster.becomes("RUNNING")
    assert job.reply() is None
    cluster.away = True
    assert job.reply() is None
    assert submitted(one, "b").reply() is None
    assert "sbatch does not accept more jobs now" in said[-1]
    cluster.away = False
    one.provide()
    assert len(cluster.scripts) == 2


def test_what_sbatch_prints_beside_the_id(engine: Callable[..., Slurm], cluster: Cluster) -> None:
    cluster.prints = "Welcome to the cluster\n{};physics\n"
    one = engine()
    submitted(one)
    assert one.queue.jobs().keys() == {"1"}
    cluster.prints = "Welcome to the cluster\n"
    with pytest.raises(MachineError, match="sbatch printed no job id: Welcome to the cluster"):
        submitted(one, "b")
    one.close()
    assert cluster.cancelled == ["1", "2"]


def test_jobs_that_squeue_never_lists_are_not_submitted_for_ever(
    engine: Callable[..., Slurm], cluster: Cluster
) -> None:
    cluster.lists = False
    one = engine()
    submitted(one)
    with pytest.raises(MachineError, match="squeue lists none of the jobs 1, 2, 3, which sbatch"):
        for _ in range(9):
            one.provide()
    assert len(cluster.scripts) == 3
    one.close()
    assert sorted(cluster.cancelled) == ["1", "2", "3"]


# ------------------------------------------------------------------------ how a worker ends


@pytest.mark.parametrize("state", ["CANCELLED", "PREEMPTED", "NODE_FAIL", "FAILED", ""])
def test_the_item_of_a_worker_that_ended_is_lost(
    engine: Callable[..., Slurm], cluster: Cluster, state: str
) -> None:
    one = engine()
    job = submitted(one)
    (one.folder / "1.up").touch()
    taken = takes(one, job)
    (one.folder / "1.log").write_text("one\nKilled\n")
    if state:
        cluster.becomes(state)
    else:
        cluster.jobs.clear()
        one.queue.jobs()
        one.queue.jobs()
    ended = f"ended as {state}" if state else "is gone from squeue"
    with pytest.raises(Lost, match=f"Slurm job 1 {ended}, 1.log ends: Killed") as raised:
        while job.reply() is None:
            pass
    assert not isinstance(raised.value, TooLong) and not taken.exists()


def test_a_reply_of_a_worker_that_ended_counts(
    engine: Callable[..., Slurm], cluster: Cluster
) -> None:
    one = engine()
    job = submitted(one)
    takes(one, job)
    cluster.becomes("TIMEOUT")
    pilot.put(one.folder, job.key, Reply(7))
    assert job.reply() == Reply(7)
    assert not [*one.folder.glob("*.reply")]


def test_the_end_of_the_time_limit_is_not_decided(
    engine: Callable[..., Slurm], cluster: Cluster
) -> None:
    one = engine(time="2")
    job = submitted(one)
    takes(one, job)
    cluster.becomes("RUNNING")
    job.reply()
    cluster.becomes("TIMEOUT")
    with pytest.raises(TooLong, match=r"not decided: ran 0 s of 120 s in Slurm job 1 on n1"):
        job.reply()


def test_an_item_behind_others_starts_anew_in_a_worker_of_its_own(
    engine: Callable[..., Slurm], cluster: Cluster
) -> None:
    one = engine()
    job = submitted(one)
    takes(one, job, number=2)
    cluster.becomes("TIMEOUT")
    assert job.reply() is None and not job.running
    assert [path.name for path in one.folder.glob("*.call")] == [f"{job.key}.alone.call"]
    assert job.reply() is None and len(cluster.scripts) == 2


# ------------------------------------------------------------------------ the queue


def test_what_waits_is_told_and_each_change(
    engine: Callable[..., Slurm], cluster: Cluster, said: list[str]
) -> None:
    one = engine()
    job = submitted(one)
    for reason in ("Resources", "Resources", "ReqNodeNotAvail, UnavailableNodes:n2"):
        cluster.becomes("PENDING", reason=reason, node="")
        job.reply()
    assert said == [
        "waiting in the queue of Slurm: Resources",
        "waiting in the queue of Slurm: ReqNodeNotAvail, UnavailableNodes:n2",
    ]


def test_a_short_wait_is_not_told(
    engine: Callable[..., Slurm], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "SILENCE", 30.0)
    submitted(engine()).reply()
    assert not said


@pytest.mark.parametrize("reason", ["PartitionTimeLimit", "QOSMaxWallDurationPerJobLimit"])
def test_a_request_that_is_never_met_ends_the_campaign(
    engine: Callable[..., Slurm], cluster: Cluster, reason: str
) -> None:
    one = engine()
    job = submitted(one)
    cluster.becomes("PENDING", reason=reason, node="")
    with pytest.raises(MachineError, match=f"Slurm will not start job 1: {reason}") as raised:
        job.reply()
    assert raised.value.exit_code == 4


def test_a_full_queue_is_tried_again_and_a_refusal_ends_the_campaign(
    engine: Callable[..., Slurm], cluster: Cluster, said: list[str]
) -> None:
    cluster.refuses = "Job violates accounting/QOS policy (job submit limit, user's size)"
    one = engine()
    job = submitted(one)
    assert job.reply() is None and len(said) == 1
    cluster.refuses = ""
    assert job.reply() is None and len(cluster.scripts) == 1
    cluster.refuses = "invalid partition specified: none"
    with pytest.raises(MachineError, match=r"does not accept the job: .*invalid partition"):
        submitted(one, "b")


# ------------------------------------------------------------------------ nodes


def test_a_node_where_no_worker_starts_is_named_and_avoided(
    engine: Callable[..., Slurm], cluster: Cluster, said: list[str]
) -> None:
    one = engine(exclude="n9")
    job = submitted(one)
    (one.folder / "1.log").write_text("No module named moediag")
    cluster.becomes("FAILED", node="n2")
    assert job.reply() is None
    why = "the worker on n2 did not start, its log 1.log ends: No module named moediag"
    assert said == [f"{why}; this node is avoided"]
    assert "#SBATCH --exclude=n9,n2" in cluster.scripts[-1]
    cluster.becomes("FAILED", "2", node="n1")
    cluster.refuses = "Requested node configuration is not available"
    with pytest.raises(MachineError, match="no node can run it: the worker on n2 did not start"):
        job.reply()
    one.close()
    assert said[-2:] == [f"not used: {why}", said[-1]]


def test_an_unfit_node_is_avoided_until_none_is_left(
    engine: Callable[..., Slurm], cluster: Cluster
) -> None:
    one = engine()
    one.avoid("n1", "the worker on n1 does not see the folder /x of this machine")
    submitted(one)
    assert "#SBATCH --exclude=n1" in cluster.scripts[0]
    with pytest.raises(MachineError, match="no node can run it"):
        one.avoid("", "the worker on far has moediag 1")


# ------------------------------------------------------------------------ after a kill


def test_what_still_runs_or_has_finished_is_adopted(
    engine: Callable[..., Slurm], cluster: Cluster
) -> None:
    killed = engine()
    jobs = [submitted(killed, name) for name in ("finished", "running", "waiting")]
    takes(killed, jobs[0]).unlink()
    pilot.put(killed.folder, jobs[0].key, Reply(1))
    takes(killed, jobs[1], "2")
    cluster.becomes("RUNNING", "1")
    cluster.becomes("RUNNING", "2")
    again = engine()
    assert cluster.cancelled == ["3"], "it waits in the queue, maybe of another partition"
    assert submitted(again, "finished").reply() == Reply(1)
    adopted = submitted(again, "running")
    assert adopted.reply() is None and adopted.running
    assert len(cluster.scripts) == 3, "two workers run already"
    pilot.put(again.folder, adopted.key, Reply(2))
    assert adopted.reply() == Reply(2)
    again.close()
    assert cluster.cancelled == ["3", "1", "2"]


def test_a_reply_of_another_release_is_not_adopted(
    engine: Callable[..., Slurm], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = engine()
    job = submitted(killed)
    with monkeypatch.context() as older:
        older.setattr("moediag.__version__", "0.0.1")
        pilot.put(killed.folder, job.key, Reply(1))
    again = submitted(engine())
    assert again.reply() is None
    assert [path.name for path in killed.folder.glob("*.call")] == [f"{job.key}.call"]


def test_a_cancelled_item_is_not_taken_and_its_worker_ends(
    engine: Callable[..., Slurm], cluster: Cluster
) -> None:
    one = engine()
    waiting, running = submitted(one, "a"), submitted(one, "b")
    takes(one, running, "2")
    for job in (waiting, running):
        job.cancel()
    assert cluster.cancelled == ["2"]
    assert not [*one.folder.glob("*.call")] and not [*one.folder.glob("*.taken")]


# ------------------------------------------------------------------------ the worker


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def served(
    folder: Path, calls: dict[str, float], seconds: float = 1000.0, reply: Reply | None = None
) -> list[str]:
    """Returns the calls that one worker performs, in order. ``calls``: name -> what each takes."""
    for name in calls:
        (folder / name).write_bytes(pickle.dumps((name,)))
    time, done = Time(), []

    def perform(name: str) -> Reply:
        done.append(name)
        time.now += calls[name]
        return reply or Reply(name)

    pilot.serve(folder, "12", seconds, perform, lambda: time.now, time.sleep)
    return done


def test_a_worker_performs_all_calls_and_ends_when_none_comes(tmp_path: Path) -> None:
    calls = {f"{name}.call": 5.0 for name in "abc"}
    assert served(tmp_path, calls) == [*calls]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["12.up", "a.reply", "b.reply", "c.reply"]


def test_a_worker_takes_no_call_that_may_not_end_in_time(tmp_path: Path) -> None:
    calls = {f"{name}.call": 40.0 for name in "abcd"}
    assert len(served(tmp_path, calls, seconds=120.0)) == 2
    assert served(tmp_path, {"c.call": 110.0}, seconds=120.0) == ["c.call"], "the first one always"


def test_a_call_of_its_own_is_for_a_worker_that_has_performed_none(tmp_path: Path) -> None:
    calls = {"a.call": 5.0, "b.alone.call": 5.0}
    assert served(tmp_path, calls) == ["a.call"]
    assert served(tmp_path, {"b.alone.call": 5.0}) == ["b.alone.call"]


def test_a_worker_on_an_unfit_node_ends_with_its_first_call(tmp_path: Path) -> None:
    calls = {"a.call": 0.0, "b.call": 0.0}
    assert served(tmp_path, calls, reply=Reply(unfit="no cache")) == ["a.call"]


def test_a_result_that_cannot_be_sent_is_reported(tmp_path: Path) -> None:
    pilot.put(tmp_path, "a", Reply(lambda: None))
    _, reply = pickle.loads((tmp_path / "a.reply").read_bytes())
    assert "pickle" in reply.bug


def test_a_call_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "a.call").touch()
    assert pilot._take(tmp_path, "a.call", "1", 1) == tmp_path / "a.1.1.taken"
    assert pilot._take(tmp_path, "a.call", "2", 1) is None


def test_lines_of_squeue_are_read() -> None:
    found = parse("12|PENDING|(Resources)|\n13|RUNNING|None|n1\nslurm_load_jobs error\n")
    assert [(job.state, job.reason, job.node) for job in found.values()] == [
        ("PENDING", "Resources", ""), ("RUNNING", "None", "n1"),
    ]  # fmt: skip


def test_names_of_items_are_names_of_files() -> None:
    assert slurm.key_of("a b/c") != slurm.key_of("a b c")
    assert os.sep not in slurm.key_of("a/../b") and "." not in slurm.key_of("4.53.0")
