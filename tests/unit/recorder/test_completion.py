"""When operations without a wait are recorded as completed; events and works are fakes, because
there is no accelerator here."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moediag.recorder import flight
from moediag.recorder.capturing import Captures
from moediag.recorder.completion import Completion, Native, Thread
from moediag.recorder.patches import Patches

HERE = Thread.current()


class Log:
    def __init__(self) -> None:
        self.noted: list[int] = []
        self.errors: dict[int, str] = {}

    def done(self, number: int) -> None:
        self.noted.append(number)

    def failed(self, number: int, error: BaseException) -> None:
        self.errors[number] = str(error)


class Work:
    """Completed at the ``looks``-th query, with ``error`` if it has one."""

    def __init__(self, looks: int, error: str = "") -> None:
        self.left = looks
        self.error = error

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left <= 0

    def wait(self) -> bool:
        assert self.left <= 0, "it would block"
        if self.error:
            raise RuntimeError(self.error)
        return True


def made(**works: Any) -> tuple[Completion, Log]:
    log = Log()
    completion = Completion(log)  # type: ignore[arg-type]
    completion._native = {int(n[1:]): Native(w, True, HERE) for n, w in works.items()}
    return completion, log


def test_a_late_completion_is_recorded_at_the_end() -> None:
    completion, log = made(n3=Work(4), n5=Work(1))
    completion.poll()
    assert log.noted == [5]
    completion.settle()
    assert log.noted == [5, 3]


def test_a_call_that_never_completes_stays_open_without_blocking() -> None:
    completion, log = made(n3=Work(10**9), n4=Work(1), n7=None)
    completion.settle(0.01)
    assert log.noted == [4]
    assert sorted(completion._native) == [3, 7]


def test_work_that_ended_with_an_error_is_not_completed() -> None:
    completion, log = made(n3=Work(1, "Connection closed by peer"), n5=Work(1))
    completion.poll()
    assert (log.noted, log.errors) == ([5], {3: "Connection closed by peer"})


def test_work_that_fails_after_the_end_is_left_open() -> None:
    """A peer that ended first closed its connections; nobody waited for that operation."""
    completion, log = made(n3=Work(1, "Connection closed by peer"))
    completion.settle()
    assert (log.noted, log.errors) == ([], {})


def test_an_error_on_an_accelerator_is_not_asked_for() -> None:
    """Waiting there would order streams of the job."""
    completion, log = made()
    completion._native = {3: Native(Work(1, "not asked for"), False, HERE)}
    completion.poll()
    assert (log.noted, log.errors) == ([3], {})


def test_settle_returns_immediately_without_operations() -> None:
    completion, log = made(n7=None)
    completion.settle(1e9)
    assert (log.noted, log.errors) == ([], {})


# ------------------------------------------------------------------------ on a device


class DeviceEvent:
    """Replaces torch.cuda.Event: done once the device has reached it."""

    def __init__(self, place: int, device: Device) -> None:
        self.place, self.device = place, device

    def query(self) -> bool:
        self.device.asked += 1
        return self.place < self.device.reached


class Device:
    def __init__(self, reached: int = 0) -> None:
        self.reached, self.asked = reached, 0


class DeviceWork:
    """Replaces NCCL's Work: ``is_completed`` queries its end event."""

    def __init__(self, done: bool = False, failed: bool = False) -> None:
        self.done, self.failed = done, failed

    def is_completed(self) -> bool:
        return self.done or self.failed

    def exception(self) -> object:
        return object() if self.failed else None


def behind(device: Device, *numbers: int) -> tuple[Completion, Log, Captures]:
    """Operations with a wait: an event follows each on the stream."""
    log, captures = Log(), Captures()
    completion = Completion(log, captures)  # type: ignore[arg-type]
    for number in numbers:
        completion._device.append((number, DeviceEvent(number, device)))
    return completion, log, captures


def test_the_recorders_thread_queries_a_stopped_rank() -> None:
    device = Device(reached=2)
    completion, log, _ = behind(device, 0, 1, 2, 3)
    thread = threading.Thread(target=completion.look)
    thread.start()
    thread.join()
    assert log.noted == [0, 1]
    device.reached = 4
    completion.look()
    assert log.noted == [0, 1, 2, 3]


def test_no_query_while_a_graph_is_captured() -> None:
    device = Device(reached=9)
    completion, log, captures = behind(device, 0)
    captures._running = 1
    completion.look()
    assert (log.noted, device.asked) == ([], 0)
    captures._running = 0
    completion.look()
    assert log.noted == [0]


def test_a_hanging_query_does_not_block() -> None:
    completion, log, captures = behind(Device(reached=9), 0)
    with captures.asking:  # the query of the other thread does not return
        completion.poll()
        completion.look()
    assert log.noted == []


def test_works_without_a_wait_are_queried_only_by_the_recorder_thread() -> None:
    log = Log()
    completion = Completion(log)  # type: ignore[arg-type]
    works = [DeviceWork(done=True), DeviceWork(), DeviceWork(failed=True), DeviceWork(done=True)]
    for number, work in enumerate(works):
        completion.expect(work, (number,), device=number != 3)
    completion.poll()
    assert log.noted == []
    completion.look()
    assert log.noted == [0]  # 1 runs, 2 failed, 3 is on the CPU: its wait() reports it
    completion.waited(works[0], completion.of_work(works[1]))  # type: ignore[arg-type]
    assert log.noted == [0], "noted once"


def test_a_rank_without_accelerator_operations_queries_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("CUDA was touched")

    for name in ("init", "_lazy_init", "is_current_stream_capturing", "Event"):
        monkeypatch.setattr(torch.cuda, name, never)
    completion, log, captures = behind(Device())
    captures.asking = None  # type: ignore[assignment] - not even the lock is taken
    completion.expect(DeviceWork(done=True), (0,), device=False)
    completion.look()
    assert log.noted == []


class Graph:
    """Replaces torch.cuda.CUDAGraph."""

    def __init__(self, captures: Captures) -> None:
        self.captures, self.seen = captures, []

    def capture_begin(self, fails: bool = False) -> None:
        self.seen.append((self.captures.running, self.captures.asking.locked()))
        if fails:
            raise RuntimeError("no capture")

    def capture_end(self) -> None:
        self.seen.append((self.captures.running, self.captures.asking.locked()))


def test_captures_are_counted_and_begin_between_two_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    patches, captures = Patches(), Captures()
    captures.install(patches)
    graph = Graph(captures)
    graph.capture_begin()
    assert (captures.running, captures.asking.locked()) == (True, False)
    graph.capture_end()
    assert not captures.running
    with pytest.raises(RuntimeError):
        graph.capture_begin(fails=True)
    assert not captures.running
    assert graph.seen == [(True, True), (True, False), (True, True)]
    patches.restore()
    assert Graph.capture_begin.__name__ == "capture_begin"
    graph.capture_end()
    assert not captures.running


# ------------------------------------------------------------------------ the Flight Recorder


@pytest.mark.parametrize(
    ("nccl", "others", "kept"),
    [([{"a": 1}], [{"b": 1}], "nccl"), ([], [{"b": 1}], "others"), ([], [], "nccl")],
)
def test_the_flight_recorder_with_entries_is_dumped(
    monkeypatch: pytest.MonkeyPatch, nccl: list[Any], others: list[Any], kept: str
) -> None:
    """On NCCL torch has two Flight Recorders in one process."""

    def of(entries: list[Any], name: str) -> Any:
        return lambda **_: json.dumps({"entries": entries, "from": name}).encode()

    fake = SimpleNamespace(
        _dump_nccl_trace_json=of(nccl, "nccl"), _dump_fr_trace_json=of(others, "others")
    )
    monkeypatch.setattr(torch._C, "_distributed_c10d", fake)
    made = flight.dump()
    assert made is not None and json.loads(made.text)["from"] == kept
    assert made.recorded == bool(nccl or others)


def test_no_dump_without_a_flight_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_distributed_c10d", None)
    assert flight.dump() is None
    assert flight.executing() == frozenset()


def test_what_the_device_executes_is_asked_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    states = ("completed", "started", "scheduled")
    entries = [
        {"pg_id": 0, "collective_seq_id": n, "profiling_name": "nccl:all_reduce", "state": s}
        for n, s in enumerate(states)
    ]

    def dumped(includeCollectives: bool, onlyActive: bool) -> bytes:
        assert includeCollectives and onlyActive
        return json.dumps({"entries": entries[1:]}).encode()

    entries.append(entries[1] | {"collective_seq_id": 7, "is_p2p": True})  # posted early
    fake = SimpleNamespace(_dump_nccl_trace_json=dumped)
    monkeypatch.setattr(torch._C, "_distributed_c10d", fake)
    assert flight.executing() == {("0", "1", "nccl:all_reduce")}
