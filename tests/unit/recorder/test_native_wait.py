"""When a thread waits in C++ for a call that C++ issued; threads and works are fakes."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from moediag.protocol import Heartbeat
from moediag.recorder.capturing import Captures
from moediag.recorder.completion import Completion, Native, Thread
from moediag.recorder.heartbeat import HeartbeatWriter
from moediag.recorder.native_wait import DeviceWait, NativeWait, asleep

TORCH = str(Path(torch.__file__).parent)
ENGINE = f"{TORCH}/autograd/graph.py"
RANK = Thread(1, 11)


class Work:
    def __init__(self, done: bool = False) -> None:
        self.done = done

    def is_completed(self) -> bool:
        return self.done


class Recorder:
    def done(self, number: int) -> None:
        raise AssertionError(f"{number} did not complete")


class Rank:
    """A rank with one open call from C++; its thread sleeps below autograd's engine."""

    def __init__(self, folder: Path, file: str = ENGINE) -> None:
        self.path = folder / "beat"
        self.heartbeat = HeartbeatWriter(str(self.path))
        self.heartbeat.beat()
        self.completion = Completion(Recorder())  # type: ignore[arg-type]
        self.completion._native = {8: Native(Work(), True, RANK)}
        self.file = file
        self.state, self.switches = "S (sleeping)", 50
        self.proc = folder / "task"
        (self.proc / "11").mkdir(parents=True)
        self.wait = NativeWait(self.heartbeat, self.completion, self.frames, self.asleep)

    def frames(self) -> dict[int, FrameType]:
        found: list[FrameType] = []
        code = compile("f(sys._getframe())", self.file, "exec")
        exec(code, {"f": found.append, "sys": sys})
        return {1: found[0]}

    def asleep(self, thread: int) -> tuple[str, ...] | None:
        assert thread == RANK.native
        text = f"Name:\tpython\nState:\t{self.state}\nvoluntary_ctxt_switches:\t{self.switches}\n"
        text += "nonvoluntary_ctxt_switches:\t3\n"
        (self.proc / "11" / "status").write_text(text)
        return asleep(thread, str(self.proc))

    def told(self, looks: int = 2) -> tuple[str, int]:
        for _ in range(looks):
            self.wait.look()
        beat = Heartbeat.read(self.path)
        assert beat is not None
        return beat.state, beat.collective


WAITS, MOVES = ("in-collective", 8), ("running", -1)


@pytest.mark.parametrize(
    "file",
    [
        ENGINE,
        f"{TORCH}/autograd/__init__.py",
        f"{TORCH}/distributed/utils.py",
        f"{TORCH}/nn/parallel/distributed.py",
    ],
)
def test_a_sleeping_thread_below_torch_waits_for_its_open_call(tmp_path: Path, file: str) -> None:
    rank = Rank(tmp_path, file)
    assert rank.told() == WAITS


def test_one_look_proves_nothing(tmp_path: Path) -> None:
    assert Rank(tmp_path).told(looks=1) == MOVES


@pytest.mark.parametrize(
    "file",
    ["/home/me/train.py", f"{TORCH}/utils/data/dataloader.py", "/lib/python3.11/selectors.py"],
)
def test_an_open_call_alone_is_no_wait(tmp_path: Path, file: str) -> None:
    """A call may stay open while the rank waits for data."""
    assert Rank(tmp_path, file).told() == MOVES


def test_a_computing_backward_does_not_wait(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.state = "R (running)"
    assert rank.told() == MOVES


def test_a_thread_that_ran_between_two_looks_does_not_wait(tmp_path: Path) -> None:
    """It executes Python and sleeps during each look, for the interpreter's lock."""
    rank = Rank(tmp_path)
    for _ in range(3):
        rank.switches += 1
        assert rank.told(looks=1) == MOVES
    assert rank.told(looks=1) == WAITS


def test_the_switches_of_a_thread_are_read_from_this_system(tmp_path: Path) -> None:
    if not Path("/proc/self/task").is_dir():
        pytest.skip("no /proc")
    ready, done = threading.Event(), threading.Event()

    def sleep() -> None:
        ready.set()
        done.wait()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    try:
        assert ready.wait(60) and sleeper.native_id is not None
        ends = time.monotonic() + 60
        while (found := asleep(sleeper.native_id)) is None:
            assert time.monotonic() < ends
        assert len(found) == 2
    finally:
        done.set()
        sleeper.join()
    assert asleep(threading.get_native_id()) is None, "this thread runs"
    assert asleep(1, str(tmp_path)) is None


@pytest.mark.parametrize(
    "native",
    [
        {},
        {8: Native(None, True, RANK)},  # this torch does not give the work
        {8: Native(Work(), False, RANK)},  # on a device: its wait does not block the thread
        {8: Native(Work(), True, Thread(2, 12))},  # a thread that is gone
    ],
)
def test_nothing_is_assumed_without_a_known_open_call(tmp_path: Path, native: Any) -> None:
    rank = Rank(tmp_path)
    rank.completion._native = native
    assert rank.told() == MOVES


def test_the_oldest_open_call_is_named(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.completion._native = {n: Native(Work(), True, RANK) for n in (9, 7, 8)}
    assert rank.told() == ("in-collective", 7)


def test_without_proc_nothing_is_assumed(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.wait = NativeWait(rank.heartbeat, rank.completion, rank.frames, lambda _: None)
    assert rank.told() == MOVES


def test_a_wait_ends_with_the_next_event_or_look(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    assert rank.told() == WAITS
    rank.heartbeat.beat()
    assert rank.told(looks=0) == MOVES
    assert rank.told() == WAITS
    rank.file = "/home/me/train.py"
    assert rank.told(looks=1) == MOVES


def test_an_entered_call_is_kept(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.heartbeat.enter(9)
    assert rank.told() == ("in-collective", 9)
    rank.heartbeat.leave()
    assert rank.told() == WAITS
    assert rank.heartbeat.enter(10) == -1, "an assumed wait is not a call to return to"


def test_a_wait_is_no_progress(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    before = Heartbeat.read(rank.path)
    assert rank.told() == WAITS
    after = Heartbeat.read(rank.path)
    assert before is not None and after is not None
    assert (before.progress, before.time) == (after.progress, after.time)


# ------------------------------------------------------------------------ the device


STUCK = {("0", "7", "nccl:_reduce_scatter_base")}


class Device:
    """A device that executes ``running`` for a rank that has recorded ``progress`` events."""

    def __init__(self, running: set[tuple[str, str, str]]) -> None:
        self.running, self.progress, self.now, self.asked = running, 5, 0.0, 0
        self.captures = Captures()
        self.wait = DeviceWait(self, self.captures, self.executing, lambda: self.now)  # type: ignore[arg-type]

    def executing(self) -> frozenset[tuple[str, str, str]]:
        self.asked += 1
        return frozenset(self.running)

    def waits(self, seconds: float) -> bool:
        """What the last look of ``seconds`` finds; there are two in a second."""
        found = False
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            found = self.wait.look()
        return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return Device(STUCK)


def test_a_device_that_stays_in_one_call_waits_in_it(device: Device) -> None:
    assert not device.waits(5), "asked once"
    assert device.waits(5)
    assert device.asked <= 3, "a dump of the Flight Recorder takes the interpreter's lock"
    device.progress += 1
    assert not device.waits(0.5)


def test_a_device_that_moves_or_computes_does_not_wait(device: Device) -> None:
    for number in range(10):
        device.running = {("0", str(number), "nccl:all_reduce")}
        assert not device.waits(3)
    device.running = set()
    assert not device.waits(20)


def test_a_rank_that_issues_calls_is_not_asked_about(device: Device) -> None:
    for _ in range(20):
        device.progress += 1
        assert not device.waits(2.5)
    assert device.asked == 0


def test_no_device_is_asked_during_a_capture_or_before_its_first_use(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with device.captures.question() as allowed:
        assert allowed
        assert not device.waits(10)
    device.captures._running = 1
    assert not device.waits(10)
    device.captures._running = 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not device.waits(10)
    assert device.asked == 0


def test_the_heartbeat_shows_that_the_device_waits(tmp_path: Path) -> None:
    rank, waits = Rank(tmp_path, "/home/me/train.py"), True
    assert rank.told() == MOVES
    rank.wait._device = lambda: waits
    assert rank.told() == ("in-collective", -1)
    waits = False
    assert rank.told() == MOVES
    waits = True
    assert rank.told() == ("in-collective", -1)
    rank.heartbeat.beat()
    assert rank.told(looks=0) == MOVES
