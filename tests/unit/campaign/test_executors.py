"""Jobs of an executor: their order, lost ones, cancelling, workers that do not fit, resuming."""

from __future__ import annotations

import functools
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moediag.errors import Interrupted, MachineError, MoediagError, StackError, UsageError
from moediag.lab.campaign.engine import Display, Header, Line, Records, Strategy, drive, opened
from moediag.lab.campaign.executors import Choice, Lost, Remote, choice, ray_tasks
from moediag.lab.campaign.executors.executor import Call, Executor, Job, Reply
from moediag.lab.campaign.executors.remote import TooLong
from moediag.lab.campaign.executors.worker import perform, unfit


class Fake(Executor):
    """Runs calls at once in this process. ``reply``: gets the place of a job, from 1, and what
    runs it."""

    def __init__(
        self, reply: Callable[[int, Callable[[], Reply]], Reply | None] = lambda _, run: run()
    ) -> None:
        self.answer = reply
        self.names: list[str] = []
        self.cancelled: list[str] = []
        self.closed = False
        self.starts = True
        self.lock = threading.Lock()
        self.avoided: list[str] = []

    def avoid(self, node: str, why: str) -> None:
        self.avoided.append(node)
        if not node.startswith("n"):
            super().avoid(node, why)

    def submit(self, name: str, call: Call) -> Job:
        with self.lock:
            self.names.append(name)
            return FakeJob(self, name, len(self.names), call)

    def close(self) -> None:
        self.closed = True


class FakeJob(Job):
    def __init__(self, executor: Fake, name: str, number: int, call: Call) -> None:
        self.executor, self.name, self.number, self.call = executor, name, number, call
        self.running = executor.starts

    def reply(self) -> Reply | None:
        return self.executor.answer(self.number, lambda: perform(*self.call.arguments))

    def cancel(self) -> None:
        self.executor.cancelled.append(self.name)


def losing(*numbers: int) -> Callable[[int, Callable[[], Reply]], Reply]:
    """Loses the jobs with these numbers."""

    def reply(number: int, run: Callable[[], Reply]) -> Reply:
        if number in numbers:
            raise Lost(f"node {number} failed")
        return run()

    return reply


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEDIAG_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def remote(tmp_path: Path, said: list[str]) -> Callable[..., Remote]:
    def make(executor: Executor, limit: float = 60.0, queue: float = 60.0) -> Remote:
        return Remote(executor, tmp_path, limit, said.append, poll=0.001, queue=queue)

    return make


def raising(error: Exception) -> None:
    raise error


# ------------------------------------------------------------------------ one call


def test_a_call_returns_what_its_work_returns(remote: Callable[..., Remote]) -> None:
    fake = Fake()
    assert remote(fake).call("seven", functools.partial(int, "7")) == 7
    assert fake.names == ["seven"] and not fake.cancelled


def test_errors_of_the_work_are_raised_here(remote: Callable[..., Remote]) -> None:
    error = StackError("no wheel", "Build it.")
    with pytest.raises(StackError, match="no wheel") as raised:
        remote(Fake()).call("a", functools.partial(raising, error))
    assert raised.value.help_text == "Build it."
    with pytest.raises(RuntimeError, match=r"on the worker, a:(.|\n)*ValueError: odd"):
        remote(Fake()).call("a", functools.partial(raising, ValueError("odd")))


def test_a_lost_job_is_submitted_once_more(remote: Callable[..., Remote], said: list[str]) -> None:
    fake = Fake(losing(1))
    assert remote(fake).call("a", functools.partial(int, "7")) == 7
    assert fake.names == ["a", "a"]
    assert said == ["a: its job was lost (node 1 failed); submitted again"]


def test_a_job_that_is_lost_twice_is_lost(remote: Callable[..., Remote]) -> None:
    fake = Fake(losing(1, 2, 3))
    with pytest.raises(
        Lost, match="not run, because its job was lost twice: node 1 failed; then node 2 failed"
    ):
        remote(fake).call("a", functools.partial(int, "7"))
    assert fake.names == ["a", "a"] and fake.cancelled == ["a", "a"]


def test_an_interrupted_worker_is_a_lost_job(remote: Callable[..., Remote]) -> None:
    with pytest.raises(Lost, match="interrupted on its worker"):
        remote(Fake()).call("a", functools.partial(raising, Interrupted("ended")))


def test_a_job_without_a_reply_is_cancelled_and_not_repeated(
    remote: Callable[..., Remote],
) -> None:
    fake = Fake(lambda _, run: None)
    with pytest.raises(TooLong, match=r"not decided: it gave no result within 0\.01 s"):
        remote(fake, limit=0.01).call("a", functools.partial(int, "7"))
    assert fake.names == fake.cancelled == ["a"]
    fake.starts = False
    with pytest.raises(TooLong, match=r"not run, because it waited 0\.02 s in the queue"):
        remote(fake, limit=0.01, queue=0.02).call("a", functools.partial(int, "7"))


def test_stop_cancels_running_jobs_and_starts_no_other(remote: Callable[..., Remote]) -> None:
    running = threading.Event()

    def never(number: int, run: Callable[[], Reply]) -> None:
        running.set()

    fake = Fake(never)
    one = remote(fake)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            one.call("a", functools.partial(int, "7"))
        except Interrupted as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert running.wait(60)
    one.stop()
    thread.join(60)
    assert [str(error) for error in raised] == ["interrupted during a"]
    assert fake.cancelled == ["a"]
    with pytest.raises(Interrupted, match="stopped before b"):
        one.call("b", functools.partial(int, "7"))
    assert fake.names == ["a"]


# ------------------------------------------------------------------------ workers that do not fit


def test_a_worker_with_another_release_is_refused(
    remote: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(number: int, run: Callable[[], Reply]) -> Reply:
        monkeypatch.setattr("moediag.__version__", "0.0.1")
        return run()

    with pytest.raises(MachineError, match=r"has moediag 0\.0\.1, this machine has ") as raised:
        remote(Fake(older)).call("a", functools.partial(int, "7"))
    assert "same release of moediag" in raised.value.help_text
    assert raised.value.exit_code == 4


def test_a_worker_must_see_the_shared_folders(
    remote: Callable[..., Remote], tmp_path: Path
) -> None:
    def unseen(number: int, run: Callable[[], Reply]) -> Reply:
        for path in tmp_path.glob(".seen-by-workers-*"):
            path.unlink()
        return run()

    with pytest.raises(MachineError, match=f"does not see the folder {tmp_path}"):
        remote(Fake(unseen)).call("a", functools.partial(int, "7"))


def test_an_unfit_node_costs_no_attempt(remote: Callable[..., Remote]) -> None:
    def unfit(number: int, run: Callable[[], Reply]) -> Reply:
        return Reply(unfit="no cache", node=f"n{number}") if number < 4 else run()

    fake = Fake(unfit)
    assert remote(fake).call("a", functools.partial(int, "7")) == 7
    assert fake.avoided == ["n1", "n2", "n3"]
    with pytest.raises(MachineError, match="no cache"):
        remote(Fake(lambda *_: Reply(unfit="no cache", node="last"))).call(
            "a", functools.partial(int, "7")
        )


def test_a_token_with_other_content_is_another_folder(tmp_path: Path) -> None:
    import moediag

    token = tmp_path / "token"
    token.write_text("other", encoding="utf-8")
    assert "does not see" in unfit(moediag.__version__, {str(token): "mine"})
    assert unfit(moediag.__version__, {str(token): "other"}) == ""


def test_close_leaves_no_file(remote: Callable[..., Remote], tmp_path: Path) -> None:
    fake = Fake()
    one = remote(fake)
    assert len([*tmp_path.rglob(".seen-by-workers-*")]) == 2
    one.close()
    assert fake.closed and not [*tmp_path.rglob(".seen-by-workers-*")]
    remote(Fake())  # killed
    remote(Fake()).close()
    assert not [*tmp_path.rglob(".seen-by-workers-*")]


# ------------------------------------------------------------------------ makers on the worker


class Maker:
    made = 0
    closed = 0

    def __init__(self, base: int) -> None:
        Maker.made += 1
        self.base = base

    def add(self, number: int) -> int:
        return self.base + number

    def close(self) -> None:
        Maker.closed += 1


def test_a_worker_keeps_its_makers(remote: Callable[..., Remote]) -> None:
    Maker.made = Maker.closed = 0
    one = remote(Fake())
    makers = [pickle.dumps(functools.partial(Maker, base)) for base in (10, 20, 30)]
    assert [one.on_maker("a", make, "add", 1) for make in (*makers[:2], *makers[:2])] == [
        11, 21, 11, 21,
    ]  # fmt: skip
    assert (Maker.made, Maker.closed) == (2, 0)
    assert one.on_maker("a", makers[2], "add", 1) == 31
    assert (Maker.made, Maker.closed) == (3, 1)


# ------------------------------------------------------------------------ a campaign


class Sums(Strategy[int, int]):
    """Adds one to each number below ``size``, elsewhere."""

    def __init__(self, size: int, remote: Remote, journal: Any) -> None:
        self.size = size
        self.remote = remote
        self.records = Records(journal, "sum", int, int)
        self.recorded = threading.Event()

    def wanted(self, most: int) -> list[int]:
        return [n for n in range(self.size) if self.name(n) not in self.records][:most]

    def name(self, item: int) -> str:
        return str(item)

    def make(self, item: int) -> int:
        return self.remote.call(self.name(item), functools.partial(int.__add__, item, 1))

    def taken(self, item: int, value: int) -> None:
        self.recorded.set()

    def line(self, value: int) -> Line:
        return Line(str(value))

    def done(self) -> str:
        return f"{len(self.records)} sums"

    def stop(self) -> None:
        self.remote.stop()


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_campaign_is_interrupted_and_resumed(
    remote: Callable[..., Remote], tmp_path: Path, jobs: int
) -> None:
    def interrupted(number: int, run: Callable[[], Reply]) -> Reply:
        if number == 3:
            assert first.recorded.wait(60)
            raise KeyboardInterrupt
        return run()

    header = Header("sums", {"what": "one"}, command=("moediag", "sums"))
    fake = Fake(interrupted)
    folder = tmp_path / "out"
    with (
        opened(header, folder, False, "sums") as journal,
        pytest.raises(Interrupted, match="interrupted after"),
    ):
        first = Sums(6, remote(fake), journal)
        drive(first, journal, Display(), jobs)
    assert fake.names[2] in fake.cancelled
    again = Fake(losing(1))
    with opened(header, folder, True, "sums") as journal:
        sums = Sums(6, remote(again), journal)
        before = [*sums.records.values()]
        drive(sums, journal, Display(), jobs)
        assert sorted(sums.records.values()) == [1, 2, 3, 4, 5, 6]
    assert before and len(again.names) == 6 - len(before) + 1  # one was lost


def test_the_order_of_one_job_at_a_time(remote: Callable[..., Remote], tmp_path: Path) -> None:
    fake = Fake(losing(2))
    with opened(Header("sums", {}), tmp_path / "out", False, "sums") as journal:
        drive(Sums(3, remote(fake), journal), journal, Display())
    assert fake.names == ["0", "1", "1", "2"]


def test_a_worker_that_does_not_fit_ends_the_campaign(
    remote: Callable[..., Remote], tmp_path: Path
) -> None:
    fake = Fake(lambda _, run: Reply(unfit="the worker on far has moediag 1"))
    with (
        opened(Header("sums", {}), tmp_path / "out", False, "sums") as journal,
        pytest.raises(MachineError, match="the worker on far has moediag 1"),
    ):
        drive(Sums(3, remote(fake), journal), journal, Display())
    assert fake.names == ["0"]


# ------------------------------------------------------------------------ the command line


def test_arguments_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_missing", lambda kind: "")
    chosen = Choice.parse(
        "ray", ["num_cpus=2", "jobs=8", "limit=600", "queue=5", "address=ray://a:1"]
    )
    assert dict(chosen.arguments) == {"num_cpus": "2", "address": "ray://a:1"}
    assert (chosen.limit, chosen.queue, chosen.at_once(3)) == (600.0, 5.0, 8)
    assert Choice.parse("local", []).at_once(3) == 3


@pytest.mark.parametrize(
    ("kind", "texts", "message"),
    [
        ("ray", ["partition=a"], "--executor-arg partition=a: ray takes KEY=VALUE with one of"),
        ("ray", ["num_cpus"], "--executor-arg num_cpus: ray takes KEY=VALUE"),
        ("ray", ["num_cpus=1", "num_cpus=2"], "gives num_cpus twice: 1 and 2"),
        ("ray", ["limit=soon"], "limit=soon: give a number from 1 on"),
        ("ray", ["jobs=0"], "jobs=0: give a number from 1 on"),
        ("local", ["jobs=2"], "--executor-arg jobs=2: the local executor has no arguments"),
    ],
)
def test_unknown_arguments_are_refused(
    kind: str, texts: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_missing", lambda kind: "")
    with pytest.raises(UsageError, match=message):
        Choice.parse(kind, texts)


def test_a_missing_package_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MachineError, match="--executor ray needs the package ray") as raised:
        Choice.parse("ray", [])
    assert "pip install 'moediag[ray]'" in raised.value.help_text
    assert isinstance(raised.value, MoediagError) and raised.value.exit_code == 4


# ------------------------------------------------------------------------ what Ray can never run


def test_a_cluster_that_wants_a_token_is_told() -> None:
    """As in Ray 2.60, where the cause's text has the cause's traceback."""
    error = ConnectionError("Failed to connect to Ray cluster at a:1")
    error.__cause__ = RuntimeError("Failed to connect to GCS.\nRPC error: InvalidAuthToken: …")
    found = ray_tasks._unreached("a:1", error)
    assert "requires a token" in found.message and "RAY_AUTH_MODE=token" in found.help_text
    assert "token" not in ray_tasks._unreached("a:1", ConnectionError("refused")).message


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"CPU": 2.0}, ""),
        ({"CPU": 64.0}, r"CPU 64 \(the largest has 2\)"),
        ({"CPU": 2.0, "GPU": 1.0}, r"CPU 2 \(the largest has 2\), GPU 1 \(the largest has 1\)"),
    ],
)
def test_a_task_that_fits_on_no_node_is_told_at_once(asked: dict[str, float], says: str) -> None:
    nodes: list[dict[str, Any]] = [{"Resources": {"CPU": 2.0}},
                                   {"Resources": {"CPU": 1.0, "GPU": 1.0}}]  # fmt: skip
    found = ray_tasks.lacking(asked, nodes)
    assert re.search(f"{says}$", found) and bool(found) == bool(says)
    grows = [{**node, "Labels": {"ray.io/node-group": "workers"}} for node in nodes]
    assert ray_tasks.lacking(asked, grows) == ""
