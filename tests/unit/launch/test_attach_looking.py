"""What looks at a rank say that it did."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moediag.evidence import looks, rank_stacks
from moediag.evidence.attached_job import stall_of
from moediag.evidence.looks import Looks, RankLook, merged
from moediag.evidence.rank_stacks import parse_pyspy, stand
from moediag.launch.attach import held, spy
from moediag.launch.attach.looking import Looker, LookingJob, One, Target, judge
from moediag.launch.attach.proc import Proc, Seen
from moediag.launch.capture.activity import Activity
from moediag.launch.capture.collect import in_collective
from moediag.launch.processes import Process

C10D = ("/venv/site-packages/torch/distributed/distributed_c10d.py", "all_reduce", 9)
TRAIN, OTHER = ("/home/me/train.py", "main", 12), ("/home/me/train.py", "main", 20)
SAVED = ("/run/model.pt", True)


def dump(*frames: tuple[str, str, int], step: str = "3") -> bytes:
    made = [
        {"filename": f, "name": n, "line": line, "locals": [{"name": "step", "repr": step}]}
        for f, n, line in frames
    ]
    return json.dumps([{"thread_name": "MainThread", "frames": made}]).encode()


def look(
    at: float, found: bytes, cpu: float = 0.0, main: float = 0.0, asleep: float | None = None,
    state: str = "S", wrote: int = 0, sent: int = 0, child: float = 0.0,
) -> One:  # fmt: skip
    seen = Seen(7, 1, state, cpu, 99)
    active = Activity(at, {SAVED: wrote}, children=child, connections={5: (sent, 0)})
    return One(at, seen, asleep, main, spy.Dump(found), active)


WAIT, OUTSIDE = dump(C10D, TRAIN), dump(TRAIN)
CHILD = dump(("/usr/lib/python3.11/subprocess.py", "_wait", 2011), TRAIN)


@pytest.mark.parametrize(
    ("taken", "states", "does", "still"),
    [
        ([look(0, WAIT), look(4, WAIT)], "SS", looks.WAITS, 4.0),
        ([look(0, WAIT, asleep=90), look(4, WAIT, asleep=94)], "SS", looks.WAITS, 94.0),
        # A slow network: its main thread sleeps, and bytes flow.
        ([look(0, WAIT, asleep=90), look(4, WAIT, asleep=94, sent=10**6)], "SS", looks.WORKS, 0.0),
        ([look(0, WAIT, asleep=90), look(4, WAIT, asleep=94, sent=10**4)], "SS", looks.WAITS, 94.0),
        # A GPU's rank spins: only its main thread uses a CPU, and nothing tells since when.
        ([look(0, WAIT), look(4, WAIT, 4.0, 4.0, 0.0, "R")], "RR", looks.WAITS, 4.0),
        ([look(0, WAIT), look(4, WAIT, 4.0, 1.0)], "SS", looks.WORKS, 0.0),
        ([look(0, WAIT), look(4, dump(C10D, TRAIN, step="4"))], "SS", looks.MOVES, 0.0),
        ([look(0, WAIT), look(4, dump(C10D, OTHER))], "SS", looks.MOVES, 0.0),
        ([look(0, WAIT), look(4, OUTSIDE)], "SS", looks.MOVES, 0.0),
        ([look(0, OUTSIDE), look(4, OUTSIDE)], "SS", looks.IDLE, 4.0),
        ([look(0, OUTSIDE), look(4, OUTSIDE, 4.0)], "RR", looks.WORKS, 0.0),
        ([look(0, OUTSIDE), look(4, OUTSIDE)], "SRRR", looks.WORKS, 0.0),  # it wants a CPU
        ([look(0, OUTSIDE), look(4, OUTSIDE, wrote=10**7)], "SS", looks.WORKS, 0.0),
        # A child process that gets little CPU time, waited for or not.
        ([look(0, CHILD), look(4, CHILD, child=0.2)], "SS", looks.WORKS, 0.0),
        ([look(0, CHILD), look(4, CHILD, child=0.02)], "SS", looks.IDLE, 4.0),
        ([look(0, OUTSIDE), look(4, OUTSIDE, child=0.2)], "SS", looks.IDLE, 4.0),
        ([look(0, OUTSIDE), look(4, dump(OTHER))], "SS", looks.MOVES, 0.0),
        ([look(0, WAIT), look(4, WAIT, state="T")], "TT", looks.STOPPED, 4.0),
        ([look(0, OUTSIDE), look(4, WAIT, state="T", asleep=1)], "ST", looks.STOPPED, 1.0),
        ([look(0, OUTSIDE), look(4, WAIT, state="T")], "ST", looks.STOPPED, 0.0),
        ([look(0, b""), look(4, b"", asleep=60)], "SS", looks.UNREAD, 60.0),
        ([look(0, b""), look(4, b"", cpu=4.0)], "SS", looks.UNREAD, 0.0),
        ([look(0, WAIT), One(4, None)], "SS", looks.GONE, 0.0),
    ],
)
def test_what_a_rank_did(taken: Sequence[One], states: str, does: str, still: float) -> None:
    found = judge(taken, states)
    assert (found.does, found.still) == (does, still)


def test_a_rank_that_spins_for_its_device_is_not_in_communication() -> None:
    """``loss.item()`` of a step that fills the device is where each look finds it."""
    taken = [replace(look(at, OUTSIDE, at, at, 0.0, "R"), device=True) for at in (0.0, 4.0)]
    assert judge(taken, "RR").does == looks.ON_DEVICE
    taken = [replace(look(at, WAIT, at, at, 0.0, "R"), device=True) for at in (0.0, 4.0)]
    assert judge(taken, "RR").does == looks.WAITS


def test_what_a_rank_that_works_does() -> None:
    found = judge([look(0, OUTSIDE), look(4, OUTSIDE, wrote=10**7)], "SS")
    assert found.words == "writes model.pt at 2.5 MB/s"
    assert found.values == {"step": "3"}


def job(*ranks: RankLook, **more: object) -> Looks:
    return Looks(4.0, 30.0, dict(enumerate(ranks)), len(ranks), **more)  # type: ignore[arg-type]


WAITING = RankLook(1, looks.WAITS, 40.0)
BUSY = RankLook(1, looks.ON_DEVICE, 40.0)


@pytest.mark.parametrize(
    ("found", "stands"),
    [
        (job(WAITING, WAITING), True),
        (job(WAITING, RankLook(2, looks.WAITS, 20.0)), False),  # not for long enough
        (job(WAITING, RankLook(2, looks.IDLE, 40.0, stuck=True)), True),
        # It may sleep between small pieces of work.
        (job(WAITING, RankLook(2, looks.IDLE, 40.0)), False),
        (job(RankLook(1, looks.WAITS, 130.0), RankLook(2, looks.IDLE, 40.0)), True),
        (job(RankLook(1, looks.WAITS, 130.0), RankLook(2, looks.IDLE, 20.0)), False),
        (job(WAITING, RankLook(2, looks.IDLE, 20.0)), False),
        (job(WAITING, RankLook(2, looks.STOPPED, 5.0, held="is stopped")), True),
        (job(WAITING, RankLook(2, looks.WORKS)), False),
        (job(WAITING, RankLook(2, looks.MOVES)), False),
        (job(WAITING, RankLook(2, looks.UNREAD, 40.0)), False),
        (job(RankLook(1, looks.WAITS, 5.0), missing=(1,)), True),
        # Two devices that compute for long look like two that wait for each other.
        (job(BUSY, BUSY), False),
        (job(WAITING, BUSY), False),  # it may evaluate alone
        (job(RankLook(1, looks.WAITS, 130.0), BUSY), True),
        (job(RankLook(2, looks.IDLE, 40.0), BUSY), False),
        (job(RankLook(2, looks.IDLE, 40.0, stuck=True), BUSY), True),
        (job(RankLook(2, looks.IDLE, 40.0), RankLook(1, looks.ON_DEVICE, 130.0)), True),
        (job(BUSY, missing=(1,)), True),
        (job(), False),
    ],
)
def test_when_a_job_stands_still(found: Looks, stands: bool) -> None:
    assert (stall_of(found) is not None) == stands


def test_a_node_that_works_ends_the_stall_of_another() -> None:
    here = job(WAITING)
    there = Looks(4.0, 30.0, {1: RankLook(2, looks.WORKS)}, 2)
    assert stall_of(here) is not None
    both = merged([here, None, there])
    assert both is not None
    assert stall_of(both) is None
    assert both.elsewhere == ()


# ------------------------------------------------------------------------ why it is held up


def frames(*files: str) -> list[dict[str, object]]:
    return [{"filename": file} for file in files]


def why(root: Path, state: str, *files: str, ranks: dict[int, int] | None = None) -> str:
    every = {7: Seen(7, 1, "S", 0.0, 1), 8: Seen(8, 7, "T", 0.0, 1)}
    return held.held(Proc(root), 7, state, frames(*files), ranks or {}, every)


def locked(root: Path, waiter: int, holder: int = 5) -> None:
    target = root / "cache.lock"
    target.write_text("")
    (root / str(waiter) / "fd").mkdir(parents=True)
    (root / str(waiter) / "fd" / "3").symlink_to(target)
    number = target.stat().st_ino
    (root / "locks").write_text(
        f"1: POSIX  ADVISORY  WRITE 9 08:01:4 0 EOF\n"
        f"2: FLOCK  ADVISORY  WRITE {holder} 08:01:{number} 0 EOF\n"
        f"2: -> FLOCK  ADVISORY  WRITE {waiter} 08:01:{number} 0 EOF\n"
    )


def test_reasons_why_a_rank_is_held_up(tmp_path: Path) -> None:
    assert why(tmp_path, "T") == "is stopped by a signal (SIGSTOP)"
    assert why(tmp_path, "S", "/lib/python3.11/pdb.py") == "is stopped in a debugger"
    assert why(tmp_path, "D") == "is blocked in the kernel"
    assert why(tmp_path, "S", "/home/me/train.py") == ""
    assert why(tmp_path, "S", "/x/torch/utils/data/dataloader.py") == (
        "waits for its data loader, whose process 8 is stopped (SIGSTOP)"
    )


def test_the_holder_of_a_file_lock_is_named(tmp_path: Path) -> None:
    locked(tmp_path, 7)
    text = "waits for the lock of the file cache.lock, which {} holds"
    assert why(tmp_path, "S", ranks={5: 0}) == text.format("rank 0")
    assert why(tmp_path, "S") == text.format("process 5")


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for a lock which this one holds."""
    path = tmp_path / "real.lock"
    program = "import fcntl, sys; f = open(sys.argv[1], 'w'); print(flush=True); fcntl.flock(f, 2)"
    with path.open("w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE
        ) as process:
            yield process
            process.kill()


def test_a_real_lock(holder: subprocess.Popen[bytes]) -> None:
    assert holder.stdout is not None
    holder.stdout.readline()
    while holder.pid not in (found := held.file_locks(Proc())):
        assert holder.poll() is None
    assert found[holder.pid].holder == os.getpid()
    assert held.path_of(Proc(), holder.pid, found[holder.pid].inode).endswith("/real.lock")


# ------------------------------------------------------------------------ numbers of a dump


def test_only_numbers_of_local_variables_are_kept() -> None:
    found = json.loads(dump(TRAIN))
    found[0]["frames"][0]["locals"] += [
        {"name": "token", "repr": '"hf_secret"'},
        {"name": "api_key", "repr": "123456"},
    ]
    raw = json.dumps(found).encode()
    assert spy.values(raw) == {"step": "3"}
    assert b"secret" not in spy.without_text(raw)
    assert b"123456" not in spy.without_text(raw)
    assert spy.places(spy.without_text(raw)) == spy.places(raw)


def test_counters_are_kept_before_other_numbers() -> None:
    found = json.loads(dump(TRAIN))
    others = [{"name": f"n{at}", "repr": str(at)} for at in range(9)]
    found[0]["frames"][0]["locals"] = [*others, {"name": "epoch", "repr": "4"}]
    assert [*spy.values(json.dumps(found).encode()).items()][:2] == [("epoch", "4"), ("n0", "0")]


MAIN = b'[{"thread_name": "MainThread", "frames": %s}]'


@pytest.mark.parametrize(
    "found",
    [
        b"", b"\xd2{", b"[" * 100_000, b"7", b"[3]", MAIN % b"5", MAIN % b"[5]",
        MAIN % b'[{"filename": "/t.py", "line": "x", "locals": 5}]',
        MAIN % b'[{"filename": "t.py", "locals": [{"repr": "1"}, {}]}]',
    ],
)  # fmt: skip
def test_what_py_spy_does_not_write_ends_nothing(found: bytes) -> None:
    assert spy.rank_of(found) is None
    assert spy.values(found) in ({}, {"None": "1"})
    assert len(spy.places(found)) <= 1
    assert isinstance(json.loads(spy.without_text(found)), list)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [({"rank": "3"}, 3), ({"rank": "1", "global_rank": "5"}, 5), ({"other": "2"}, None)],
)
def test_the_rank_that_a_process_gave_itself(variables: dict[str, str], rank: int | None) -> None:
    names = [{"name": name, "repr": text} for name, text in variables.items()]
    made = [{"filename": "/home/me/train.py", "name": "f", "line": 1, "locals": names}]
    raw = json.dumps([{"thread_name": "MainThread", "frames": made}]).encode()
    assert spy.rank_of(raw) == rank


def test_the_number_of_a_spawned_process() -> None:
    file = "/venv/lib/python3.11/site-packages/torch/multiprocessing/spawn.py"
    variables = [{"name": "i", "repr": "1"}]
    made = [{"filename": file, "name": "_wrap", "line": 1, "locals": variables}]
    assert spy.rank_of(json.dumps([{"thread_name": "MainThread", "frames": made}]).encode()) == 1


def test_the_broadcast_of_buffers_is_communication() -> None:
    """DDP's own file calls C++, which Python frames do not show."""
    folder = "/venv/lib/python3.11/site-packages/torch/nn/parallel/distributed.py"
    names = ("_distributed_broadcast_coalesced", "_sync_buffers")
    ddp = [(folder, f"DistributedDataParallel.{name}", 9) for name in names]
    found = dump(*ddp, TRAIN)
    (stack,) = parse_pyspy(found.decode())
    assert in_collective(found) and rank_stacks.in_collective(stack)
    assert stand(stack) == f"DistributedDataParallel.{names[0]}, called by main (train.py:12)"
    assert not in_collective(dump(*ddp[1:], TRAIN))


def test_a_rank_in_a_container_is_seen_from_its_host(tmp_path: Path) -> None:
    """py-spy knows its threads by their numbers inside, and takes all of them for running."""
    wait = {"frames": [{"name": "barrier", "filename": "/x/torch/distributed/c.py", "line": 6}]}
    made = json.dumps([{**wait, "pid": 700, "os_thread_id": n, "active": True} for n in (4, 5)])
    for number, inside, state in ((700, 4, "S (sleeping)"), (703, 5, "R (running)")):
        for folder in (tmp_path / "700", tmp_path / f"700/task/{number}"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "status").write_text(f"State:\t{state}\nNSpid:\t{number}\t{inside}\n")
    inner = Proc(tmp_path).inner_threads(700)
    assert inner == {4: (700, "S"), 5: (703, "R")}
    assert not in_collective(made.encode())
    seen = spy.seen_from_here(made.encode(), inner)
    assert in_collective(seen)
    assert [one["active"] for one in json.loads(seen)] == [False, True]
    (tmp_path / "700/status").write_text("NSpid:\t700\n")  # it is in this namespace
    assert spy.seen_from_here(made.encode(), Proc(tmp_path).inner_threads(700)) == made.encode()


def test_a_rank_without_native_frames_is_not_called_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spy, "native", lambda *_: spy.Dump(lost="ptrace refused"))
    monkeypatch.setattr(Proc, "maps", lambda *_: True)
    monkeypatch.setattr(Proc, "owned", lambda *_: {})
    looked = LookingJob([Target(0, Process(7, 99))], 4.0)
    looked.lookers[0].taken = [look(0, OUTSIDE), look(4, OUTSIDE)]
    found = looked.found(Looks(0.0, 4.0, {}, 1), 4.0)
    assert found.ranks[0].does == looks.UNREAD
    assert looked.lost() == ["rank 0: native frames (ptrace refused)"]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> LookingJob:
    """A job of two ranks, whose looks a test gives."""
    monkeypatch.setattr(Proc, "owned", lambda *_: {})
    monkeypatch.setattr(LookingJob, "_pause", lambda *_: None)
    monkeypatch.setattr("moediag.launch.attach.held.held", lambda *_: "")
    return LookingJob([Target(0, Process(7, 99)), Target(1, Process(8, 99))], 30.0)


@pytest.mark.parametrize(
    ("second", "number"),
    [
        ([look(0, WAIT, asleep=60), look(2, WAIT, asleep=62)], 2),  # the kernel tells
        ([look(0, WAIT), look(2, dump(C10D, OTHER))], 2),  # it moves
        ([look(0, OUTSIDE, asleep=60), look(2, OUTSIDE, asleep=62)], 3),  # it may work
        ([look(0, OUTSIDE), look(2, OUTSIDE, 2.0)], 3),  # it computes
    ],
)
def test_two_looks_decide_a_clear_picture(
    looked: LookingJob, monkeypatch: pytest.MonkeyPatch, second: list[One], number: int
) -> None:
    taken = {
        0: [*(look(at, WAIT, asleep=60 + at) for at in (0, 2, 4))],
        1: [*second, replace(second[-1], at=4.0, seen=replace(second[-1].seen, cpu=4.0))],
    }
    monkeypatch.setattr(Looker, "look", lambda self: self.taken.append(
        taken[self.target.rank][len(self.taken)]))  # fmt: skip
    looked.run(Looks(0.0, 30.0, {}, 2))
    assert len(looked.lookers[0].taken) == number


def test_a_thread_that_has_not_run_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(spy, "dump", lambda pid, *_, **__: read.append(pid) or spy.Dump(WAIT))
    one = Looker(Target(0, Process(7, 99)), Proc(Path("/nowhere")), True)
    for main in (1.0, 1.0, 1.5, 0.0, 0.0):  # 0: the kernel does not tell
        one.taken.append(One(0.0, None, None, main, one._dump("S", main)))
    assert len(read) == 4


def test_looks_at_a_process_leave_it_as_it_was() -> None:
    program = "import sys; print(flush=True); print(sys.stdin.readline(), end='')"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        target = Target(0, Process.of(process.pid))
        found = LookingJob([target], 1.0).run(Looks(0.0, 1.0, {}, 1))
        said, _ = process.communicate("as before\n")
    assert (found.ranks[0].does, process.returncode, said) == (looks.IDLE, 0, "as before\n")
