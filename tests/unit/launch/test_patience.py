"""Timeouts of the watchdog, on simulated samples of a job of two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from moediag.evidence.model import Stall
from moediag.launch.capture.activity import STUCK
from moediag.launch.capture.shown_work import waits_for_child, work_of
from moediag.launch.follow.patience import Activities, Patience
from moediag.launch.follow.watchdog import Watchdog
from moediag.launch.rank_sample import RankSample

TURN = 0.2
WAITS = RankSample(0, state="in-collective", progress=7, step=3, begun=True, time=101.0)
IDLE = RankSample(1, state="running", progress=6, step=3, begun=True, time=100.5)

Script = Callable[[float], Sequence[RankSample]]


def stack(*files: str) -> bytes:
    frames = [{"name": "f", "filename": file, "line": 1} for file in files]
    return json.dumps([{"thread_name": "MainThread", "frames": frames}]).encode()


def when(
    script: Script, until: float, files: tuple[str, ...] = (), active: str = STUCK
) -> tuple[float, Stall] | None:
    """Returns the second at which a hang is called, with a patience of 10 s and a window of 3 s."""
    patience = Patience(
        Watchdog(3.0, 100.0), 10.0,
        lambda ranks, _: {r: stack(*files) for r in ranks},
        lambda ranks, _: dict.fromkeys(ranks, active),
    )  # fmt: skip
    for tick in range(int(until / TURN)):
        if stall := patience.observe(tick * TURN, script(tick * TURN)):
            return tick * TURN, stall
    return None


def called(
    script: Script, until: float, files: tuple[str, ...] = (), active: str = STUCK
) -> float | None:
    found = when(script, until, files, active)
    return None if found is None else found[0]


def test_a_hang_is_called_after_the_window_if_all_ranks_wait() -> None:
    found = when(lambda _: [WAITS, replace(IDLE, state="in-collective")], 20)
    assert found is not None
    assert 3.0 <= found[0] < 4.0
    assert (found[1].waiting, found[1].elsewhere) == ((0, 1), ())


def test_a_stopped_rank_is_reported_at_once() -> None:
    for state in ("running", "in-collective"):
        found = when(lambda _, s=state: [WAITS, replace(IDLE, state=s, stopped=True)], 20)  # type: ignore[misc]
        assert found is not None
        assert 3.0 <= found[0] < 4.0
        assert (found[1].waiting, found[1].elsewhere) == ((0,), (1,))


def test_a_suspended_job_is_not_a_hang() -> None:
    assert called(lambda _: [replace(s, stopped=True) for s in (WAITS, IDLE)], 60) is None


def test_a_rank_that_cannot_continue_is_given_the_patience() -> None:
    at = called(lambda _: [WAITS, IDLE], 60)
    assert at is not None
    assert 10.0 <= at < 11.0


@pytest.mark.parametrize("activities", [lambda ranks, _: dict.fromkeys(ranks, ""), lambda *_: {}])
def test_a_rank_that_may_be_slow_is_given_four_times_the_patience(activities: Activities) -> None:
    """It works in pieces so small that nothing shows it; or nothing could be read of it."""
    patience = Patience(Watchdog(3.0, 100.0), 10.0, lambda *_: {}, activities)
    doubts = {}
    for tick in range(int(60 / TURN)):
        now.t = tick * TURN
        if patience.observe(now.t, [WAITS, IDLE]):
            break
        doubts[now.t] = patience.doubt(now.t)
    assert 40.0 <= now.t < 41.0
    assert not any(text for t, text in doubts.items() if t < 9.9)
    assert doubts[20.0] == "rank 1 may be slow: others have waited for 20 s"


def test_a_rank_that_was_slow_in_a_pause_has_that_time_even_if_it_waits_for_a_lock() -> None:
    """Its pieces of work may end in waits for a lock, such as those of a pool of threads."""
    at = with_activity(
        lambda _: [WAITS, IDLE], 60, lambda: stack("/home/me/train.py"),
        lambda: "" if now.t < 15 else STUCK,
    )  # fmt: skip
    assert at is not None
    assert 40.0 <= at < 41.0


def test_a_rank_is_reported_after_a_second_look_however_late_that_is() -> None:
    """As on a busy machine, where a look takes long: what ranks did is known from two."""
    patience = Patience(Watchdog(3.0, 100.0), 10.0, lambda ranks, _: {})
    times = (0.0, 0.2, 6.0, 40.0)
    assert [patience.observe(t, [WAITS, IDLE]) is None for t in times] == [True, True, True, False]
    patience = Patience(Watchdog(3.0, 100.0), 10.0, lambda ranks, _: {})
    assert [patience.observe(t, [WAITS, IDLE]) for t in (0.0, 0.2, 40.0)] == [None] * 3


def prepared(cpu: float, until: float, **fields: bool) -> list[tuple[float, bool]]:
    """When a rank that waits for one before its first batch is reported, and whether early."""
    patience = Patience(Watchdog(3.0, 100.0), 10.0, lambda ranks, _: {})
    found = []
    for tick in range(int(until / TURN)):
        t = tick * TURN
        other = replace(IDLE, begun=False, step=0, cpu=cpu * t, **fields)  # type: ignore[arg-type]
        if stall := patience.observe(t, [replace(WAITS, step=0), other]):
            found.append((t, stall.early))
    return found


def test_a_rank_that_has_not_begun_to_train_is_reported_early_at_first() -> None:
    """It may wait for a lock, for data, or only for its turn."""
    found = prepared(0.0, 420)
    assert found[0][1] and 40.0 <= found[0][0] < 41.0
    certain = next(at for at, early in found if not early)
    assert 400.0 <= certain < 401.0
    assert not prepared(1.0, 390)  # it prepares the data
    found = prepared(1.0, 420)
    assert found and not any(early for _, early in found)


@pytest.mark.parametrize(
    ("words", "latest"), [("", 42), ("waits for the child process python, which works", 402)]
)
def test_the_first_batch_may_take_as_long_as_a_worker_works_at_it(words: str, latest: int) -> None:
    """A worker that waits for a lock never makes it."""
    first = replace(IDLE, begun=False, step=0)
    at = with_activity(
        lambda _: [replace(WAITS, step=0), first], 500,
        lambda: stack("/torch/utils/data/dataloader.py"), lambda: words,
    )  # fmt: skip
    assert at is not None
    assert 0.9 * latest <= at <= latest


def test_a_rank_is_not_said_to_prepare_if_it_is_unseen_or_stopped() -> None:
    """Of an unseen one, nothing shows whether it has begun; a stopped one prepares nothing."""
    unseen, stopped = prepared(0.0, 60, unseen=True), prepared(0.0, 60, stopped=True)
    assert unseen and not any(early for _, early in unseen)
    assert stopped and stopped[0][0] < 4.0 and not any(early for _, early in stopped)


def test_a_computing_rank_is_given_four_times_the_patience() -> None:
    at = called(lambda t: [WAITS, replace(IDLE, cpu=t, runnable=True)], 60)
    assert at is not None
    assert 40.0 <= at < 41.0


@pytest.mark.parametrize(("share", "earliest"), [(3, 118.0), (50, 398.0), (400, 398.0)])
def test_a_rank_without_cpu_time_is_given_longer(share: int, earliest: float) -> None:
    """Also where so many processes want a CPU that it has hardly any of one."""
    at = called(lambda t: [WAITS, replace(IDLE, cpu=t / share, runnable=True)], 500)
    assert at is not None
    assert earliest <= at < earliest + 6.0


def test_endless_disk_wait_is_a_hang_eventually() -> None:
    at = called(lambda _: [WAITS, replace(IDLE, runnable=True)], 500, active="")
    assert at is not None
    assert 398.0 <= at < 404.0


@pytest.mark.parametrize(
    "file",
    [
        "/lib/torch/_dynamo/convert_frame.py",
        "/lib/torch/_inductor/codecache.py",
        "/lib/torch/distributed/checkpoint/state_dict_saver.py",
        "/lib/torch/serialization.py",
        "/lib/safetensors/torch.py",
        "/lib/triton/compiler/compiler.py",
        "<frozen importlib._bootstrap>",
    ],
)
@pytest.mark.parametrize("cpu", [0.0, 1.0])
def test_known_slow_work_is_given_forty_times_the_patience(file: str, cpu: float) -> None:
    def script(t: float) -> list[RankSample]:
        return [WAITS, replace(IDLE, cpu=cpu * t)]

    assert called(script, 390, (file,)) is None
    assert called(script, 420, (file,)) is not None


def with_activity(
    script: Script, until: float, stacks: Callable[[], bytes], active: Callable[[], str]
) -> float | None:
    """When a hang is called, if the stack and the activity of rank 1 change with time."""
    patience = Patience(
        Watchdog(3.0, 100.0), 10.0,
        lambda ranks, _: {r: stacks() for r in ranks},
        lambda ranks, _: {r: active() for r in ranks},
    )  # fmt: skip
    for tick in range(int(until / TURN)):
        now.t = tick * TURN
        if patience.observe(now.t, script(now.t)):
            return now.t
    return None


@pytest.mark.parametrize("away", [(), (IDLE,)])
def test_a_call_over_a_slow_network_is_no_hang(away: tuple[RankSample, ...]) -> None:
    """As long as bytes arrive, and for the longest time that any rank has."""
    ranks = [WAITS, *(away or (replace(IDLE, state="in-collective"),))]
    for ends, earliest, latest in ((50.0, 50.0, 54.0), (900.0, 400.0, 405.0), (0.0, 3.0, 12.0)):
        calls: list[float] = []

        def carried(
            waiting: Mapping[int, bytes],
            inside: bool,
            ends: float = ends,
            calls: list[float] = calls,
        ) -> dict[int, str]:
            calls.extend([now.t] * inside)
            sends = "sends over the network at 1.0 MB/s" * (now.t < ends)
            return dict.fromkeys(waiting, sends if inside else STUCK)

        patience = Patience(Watchdog(3.0, 100.0), 10.0, lambda *_: {}, carried)
        times = (tick * TURN for tick in range(int(500 / TURN)))
        at = next(t for t in times if at_time(t) and patience.observe(t, ranks))
        assert earliest <= at < latest and len(calls) <= at + 1


def at_time(seconds: float) -> bool:
    now.t = seconds
    return True


class now:
    t = 0.0


def test_the_time_of_a_save_is_not_that_of_the_wait_after_it() -> None:
    """Rank 1 saves for 50 s, then waits: only that wait counts against the patience of 10 s."""
    at = with_activity(
        lambda _: [WAITS, IDLE],
        100,
        lambda: stack("/lib/torch/serialization.py" if now.t < 50 else "/home/me/train.py"),
        lambda: STUCK,
    )
    assert at is not None
    assert 59.0 <= at < 65.0


@pytest.mark.parametrize(("seconds", "told"), [(50.0, True), (9.0, False)])
def test_a_pause_that_ended_is_kept_with_what_ranks_did(seconds: float, told: bool) -> None:
    patience = Patience(
        Watchdog(3.0, 100.0),
        10.0,
        lambda ranks, _: {r: stack("/torch/_dynamo/x.py") for r in ranks},
    )
    for tick in range(int(2 * seconds / TURN)):
        t = tick * TURN
        assert not patience.observe(t, [replace(WAITS, progress=7 + int(t > seconds)), IDLE])
    if not told:
        assert patience.slowest is None
        return
    assert patience.slowest is not None
    stall, length, worked = patience.slowest
    assert (stall.waiting, stall.elsewhere, worked) == ((0,), (1,), {1: "compiles"})
    assert seconds <= length < seconds + 1


def test_a_pause_is_told_by_what_most_looks_at_it_show() -> None:
    """Not by the last one, when the rank has just gone on."""
    takes = "takes batches or runs its model, 0.2 times a second"
    works = "waits for the child process g++, which works"
    patience = Patience(
        Watchdog(3.0, 100.0), 10.0, lambda *_: {}, lambda _, inside: {1: "" if inside else word}
    )
    for tick in range(int(60 / TURN)):
        word = takes if tick * TURN > 47 else works
        patience.observe(tick * TURN, [replace(WAITS, progress=7 + (tick * TURN > 50)), IDLE])
    assert patience.slowest is not None and patience.slowest[2] == {1: works}


def test_two_saves_with_a_wait_between_count_together() -> None:
    """A rank that alternates between work and waits hangs in the end."""
    at = with_activity(
        lambda _: [WAITS, IDLE],
        700,
        lambda: stack("/lib/torch/serialization.py" if now.t % 20 < 10 else "/home/me/train.py"),
        lambda: "",
    )
    assert at is not None


@pytest.mark.parametrize(
    ("words", "file", "latest"),
    [
        ("writes model.pt at 0.4 MB/s", "/home/me/train.py", 420),
        ("waits for the child process nvcc, which works", "/home/me/train.py", 420),
        ("waits for the child process python, which works", "/torch/utils/data/dataloader.py", 42),
        ("", "/torch/utils/data/dataloader.py", 42),  # the data come late
        (STUCK, "/torch/utils/data/dataloader.py", 42),
        ("", "/home/me/train.py", 42),
        (STUCK, "/home/me/train.py", 11),
    ],
)
def test_activity_counts_as_work_but_not_for_ever(words: str, file: str, latest: float) -> None:
    at = with_activity(lambda _: [WAITS, IDLE], 500, lambda: stack(file), lambda: words)
    assert at is not None
    assert 0.9 * latest <= at <= latest


def test_activity_that_ends_leaves_the_patience() -> None:
    at = with_activity(
        lambda _: [WAITS, IDLE], 100, lambda: stack("/home/me/train.py"),
        lambda: "writes model.pt at 0.4 MB/s" if now.t < 30 else STUCK,
    )  # fmt: skip
    assert at is not None
    assert 38.0 <= at < 45.0


def test_a_pause_similar_to_an_earlier_one_is_not_a_stall() -> None:
    """After a pause of 9 s the next may take at most three times as long."""

    def script(t: float) -> list[RankSample]:
        return [replace(WAITS, progress=7 + int(t > 9)), IDLE]

    at = called(script, 60)
    assert at is not None
    assert 36.0 <= at < 38.0


def test_pauses_before_the_second_step_do_not_count() -> None:
    def script(t: float) -> list[RankSample]:
        early = [replace(s, step=1) for s in (WAITS, IDLE)]
        return early if t < 9 else [replace(WAITS, progress=9), IDLE]

    at = called(script, 60)
    assert at is not None
    assert at < 21.0


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(lambda t: [WAITS, replace(IDLE, progress=int(t / 5))], id="progress"),
        pytest.param(lambda _: [replace(WAITS, state="running"), IDLE], id="nobody-waits"),
        pytest.param(lambda _: [WAITS, RankSample(-1, known=False)], id="not-all-are-there"),
    ],
)
def test_cases_that_are_not_a_hang(script: Script) -> None:
    assert called(script, 200) is None


def pause_after(script: Script, seconds: float) -> Stall | None:
    """The pause that an interruption after ``seconds`` finds."""
    patience = Patience(Watchdog(3.0, 100.0), 30.0, lambda ranks, _: {})
    for tick in range(int(seconds / TURN)):
        assert patience.observe(tick * TURN, script(tick * TURN)) is None
    return patience.pause(seconds, script(seconds))


def test_an_interruption_finds_the_present_pause() -> None:
    found = pause_after(lambda _: [WAITS, IDLE], 12.0)
    assert found is not None
    assert (found.waiting, found.elsewhere, found.window) == ((0,), (1,), 12.0)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(lambda t: [WAITS, replace(IDLE, progress=int(t / 2))], id="progress"),
        pytest.param(lambda _: [replace(WAITS, state="running"), IDLE], id="nobody-waits"),
        pytest.param(lambda _: [replace(s, stopped=True) for s in (WAITS, IDLE)], id="suspended"),
    ],
)
def test_an_interruption_of_a_running_job_finds_no_pause(script: Script) -> None:
    assert pause_after(script, 12.0) is None


def test_an_interruption_before_the_first_look_finds_no_pause() -> None:
    assert Patience(Watchdog(3.0, 100.0), 30.0, lambda ranks, _: {}).pause(1.0, [WAITS]) is None


JOINING = stack("/x/torch/distributed/distributed_c10d.py").replace(b'"f"', b'"init_process_group"')


def joining(
    joined: tuple[int, ...],
    whole: bool,
    cpu: float = 0.0,
    until: float = 60,
    others: Sequence[RankSample] = (),
) -> tuple[float, Stall] | None:
    """Two ranks before their first call; ``joined`` ones are in the rendezvous, others compute.
    ``others``: samples of ranks that are not here."""

    def look(ranks: Sequence[int], _: bool) -> dict[int, bytes]:
        return {rank: JOINING if rank in joined else stack("/x/train.py") for rank in ranks}

    patience = Patience(Watchdog(3.0, 100.0), 10.0, look)
    for tick in range(int(until / TURN)):
        t = tick * TURN
        used = [0.0 if rank in joined else cpu * t for rank in (0, 1)]
        ranks = [RankSample(rank, progress=0, cpu=used[rank]) for rank in (0, 1)]
        if stall := patience.observe(t, [*ranks, *others], whole):
            return t, stall
    return None


def test_ranks_that_are_all_in_the_rendezvous_do_not_meet() -> None:
    found = joining((0, 1), whole=True)
    assert found is not None
    assert 20.0 <= found[0] < 32.0  # the patience passes before the first look and after it
    assert (found[1].waiting, found[1].elsewhere) == ((0, 1), ())


def test_a_late_start_leaves_the_rendezvous_its_patience() -> None:
    patience = Patience(Watchdog(3.0, 100.0), 10.0, lambda ranks, _: dict.fromkeys(ranks, inside))
    inside = stack("/x/train.py")
    ranks = [RankSample(rank, state="starting", progress=0) for rank in (0, 1)]
    for tick in range(int(120 / TURN)):
        if tick * TURN > 100:
            inside = JOINING
        assert patience.observe(tick * TURN, ranks, True) is None or tick * TURN > 110


def test_a_rank_that_joins_late_is_reported_early() -> None:
    """It may wait for data that is still copied, so it is only a reason to end the job after the
    time that any rank has. Until torch gives up (30 minutes) nothing else would tell of it."""
    found = joining((0,), whole=True)
    assert found is not None
    assert 40.0 <= found[0] < 52.0
    assert (found[1].waiting, found[1].elsewhere, found[1].early) == ((0,), (1,), True)
    assert joining((0,), whole=False) is None


@pytest.mark.parametrize("cpu", [0.2, 1.0])
def test_a_rank_that_computes_before_it_joins_has_the_longest_time(cpu: float) -> None:
    assert joining((0,), whole=True, cpu=cpu, until=390) is None
    found = joining((0,), whole=True, cpu=cpu, until=420)
    assert found is not None and not found[1].early


def at_the_end(
    dumps: Callable[[float], bytes], until: float, active: str = "", peer: bool = False
) -> list[tuple[float, Stall]]:
    """When and how rank 1 is reported, whose stacks are ``dumps``. Rank 0 has ended; with ``peer``
    it computes."""
    patience = Patience(
        Watchdog(3.0, 100.0), 10.0,
        lambda ranks, _: {r: dumps(now.t) for r in ranks if r == 1},
        lambda ranks, _: dict.fromkeys(ranks, active),
    )  # fmt: skip
    found = []
    for tick in range(int(until / TURN)):
        now.t = tick * TURN
        first = replace(WAITS, state="running", alive=peer, cpu=now.t * peer)
        if stall := patience.observe(now.t, [first, IDLE], True):
            found.append((now.t, stall))
    return found


def threads(*main: str, other: str = "/home/me/train.py") -> bytes:
    """``main``: functions of the main thread, innermost first; ``other``: another thread's file."""
    files = {"_shutdown": "/lib/threading.py", "destroy_process_group": "/torch/distributed/c.py"}
    frames = [{"name": name, "filename": files.get(name, "/home/me/train.py")} for name in main]
    logger = {"thread_name": "logger", "frames": [{"name": "run", "filename": other}]}
    return json.dumps([{"thread_name": "MainThread", "frames": frames}, logger]).encode()


@pytest.mark.parametrize(
    "main",
    [("_shutdown",), ("flush",), ("destroy_process_group", "<module>"), ("upload", "<module>")],
    ids=lambda m: m[0],
)
def test_a_rank_that_does_not_end_is_reported_early_at_first(main: tuple[str, ...]) -> None:
    found = at_the_end(lambda _: threads(*main), 420)
    assert 40.0 <= found[0][0] < 52.0
    assert (found[0][1].waiting, found[0][1].elsewhere, found[0][1].early) == ((), (1,), True)
    certain = next(at for at, stall in found if not stall.early)
    assert 399.0 <= certain < 412.0


@pytest.mark.parametrize(
    ("dumps", "active"),
    [
        pytest.param(
            lambda _: stack("/lib/selectors.py", "/home/me/train.py"), "", id="it-serves"
        ),
        pytest.param(
            lambda _: threads("_shutdown", other="/lib/ssl.py"), "", id="a-thread-sends"
        ),
        pytest.param(
            lambda _: threads("_shutdown", other="/lib/torch/serialization.py"), "",
            id="a-thread-saves",
        ),
        pytest.param(
            lambda _: threads("_shutdown"), "sends over the network at 3.0 MB/s", id="it-sends"
        ),
        pytest.param(
            lambda t: threads("_shutdown", other="/lib/ssl.py" if t < 380 else "/me/train.py"), "",
            id="the-time-of-an-upload-is-not-that-of-the-wait-after-it",
        ),
    ],
)  # fmt: skip
def test_a_rank_that_works_at_its_end_is_not_reported(
    dumps: Callable[[float], bytes], active: str
) -> None:
    assert not at_the_end(dumps, 390, active)


def test_a_rank_that_does_not_end_waits_for_those_that_train() -> None:
    assert not at_the_end(lambda _: threads("_shutdown"), 390, peer=True)


def test_an_interruption_finds_a_rank_that_does_not_end() -> None:
    patience = Patience(Watchdog(3.0, 100.0), 30.0, lambda ranks, _: {1: threads("_shutdown")})
    samples = [replace(WAITS, alive=False), IDLE]
    for tick in range(60):
        patience.observe(tick * TURN, samples)
    found = patience.pause(12.0, samples)
    assert found is not None
    assert (found.waiting, found.elsewhere) == ((), (1,))


def test_ranks_of_other_nodes_may_still_join() -> None:
    assert joining((0, 1), whole=False) is None
    there = RankSample(2, progress=0, at=0.0)
    assert joining((0, 1), whole=False, others=[there]) is None


def test_a_rank_whose_process_is_nowhere_is_reported_early() -> None:
    absent = RankSample(2, unseen=True)
    found = joining((0, 1), whole=False, others=[absent])
    assert found is not None and 40.0 <= found[0] < 52.0
    assert (found[1].waiting, found[1].elsewhere, found[1].early) == ((0, 1), (2,), True)
    assert joining((0,), whole=False, others=[absent]) is None


def spinning(
    stacks: dict[int, str], until: float, caller: Callable[[int], int] = lambda _: 7
) -> tuple[float, Stall] | None:
    """Two ranks that compute without end; ``stacks``: the innermost native function of each,
    ``caller``: the line that called it, by the number of the look."""
    count = iter(range(1000))

    def look(ranks: Sequence[int], native: bool) -> dict[int, bytes]:
        assert native
        by = {"name": "step", "filename": "train.py", "line": caller(next(count))}
        frames = {r: [{"name": stacks[r], "filename": "lib.so"}, by] for r in ranks}
        main = {"thread_name": "MainThread"}
        return {r: json.dumps([{**main, "frames": f}]).encode() for r, f in frames.items()}

    patience = Patience(Watchdog(3.0, 100.0), 10.0, look)
    for tick in range(int(until / TURN)):
        t = tick * TURN
        ranks = [replace(s, state="running", cpu=t, runnable=True) for s in (WAITS, IDLE)]
        if stall := patience.observe(t, ranks):
            return t, stall
    return None


def test_ranks_that_spin_for_their_devices_are_waiting() -> None:
    found = spinning({0: "cudaStreamSynchronize", 1: "cuEventSynchronize"}, 60)
    assert found is not None
    assert 40.0 <= found[0] < 41.0  # all of them may evaluate
    assert found[1].waiting == (0, 1)


def test_ranks_that_are_held_in_one_launch_are_waiting() -> None:
    """The driver loads a kernel's code at its first launch, which waits for a busy device."""
    launches = {0: "cuLaunchKernel", 1: "cudaLaunchKernelExC"}
    found = spinning(launches, 60)
    assert found is not None and 40.0 <= found[0] < 42.0
    assert found[1].waiting == (0, 1)
    assert spinning(launches, 200, caller=lambda look: look) is None  # they launch one by one
    found = spinning({0: "cuLaunchKernel", 1: "matmul"}, 60)
    assert found is not None and found[1].elsewhere == (1,)


def test_the_cpu_time_of_destroy_process_group_is_no_work() -> None:
    """NCCL spins there."""

    def at_the_end(name: str) -> tuple[float, bool] | None:
        frames = [{"name": name, "filename": "/x/torch/distributed/distributed_c10d.py"}]
        dump = json.dumps([{"thread_name": "MainThread", "active": True, "frames": frames}])
        look = {0: dump.encode(), 1: dump.encode()}
        patience = Patience(Watchdog(3.0, 100.0), 10.0, lambda _, __: look)
        for tick in range(int(200 / TURN)):
            t = tick * TURN
            ranks = [replace(s, state="running", cpu=t) for s in (WAITS, IDLE)]
            if stall := patience.observe(t, ranks, whole=True):
                return t, stall.early
        return None

    found = at_the_end("destroy_process_group")
    assert found is not None and 40.0 <= found[0] < 41.0 and found[1]
    assert at_the_end("wait") is None


def test_a_rank_that_spins_for_its_device_waits_for_a_computing_rank() -> None:
    found = spinning({0: "cudaStreamSynchronize", 1: "matmul"}, 60)
    assert found is not None
    assert 40.0 <= found[0] < 41.0
    assert (found[1].waiting, found[1].elsewhere) == ((0,), (1,))


@pytest.mark.parametrize("cpu", [0.0, 1.0])  # a wait for a device sleeps or spins
def test_a_rank_that_evaluates_alone_on_its_device_is_slow(cpu: float) -> None:
    """Each look finds it at ``loss.item()`` while the other waits in a barrier."""
    frames = [
        {"name": "cudaStreamSynchronize", "filename": "lib.so"},
        {"name": "evaluate", "filename": "train.py", "line": 7},
    ]
    dump = json.dumps([{"thread_name": "MainThread", "frames": frames}]).encode()
    patience = Patience(
        Watchdog(3.0, 100.0), 10.0, lambda ranks, _: dict.fromkeys(ranks, dump),
        lambda ranks, _: dict.fromkeys(ranks, ""),
    )  # fmt: skip
    for tick in range(int(39 / TURN)):
        t = tick * TURN
        spins = replace(WAITS, cpu=cpu * t, runnable=cpu > 0)
        assert not patience.observe(t, [spins, replace(IDLE, cpu=cpu * t, runnable=cpu > 0)])
    assert patience.doubt(39.0).startswith("rank 1 may be slow")


def test_computing_ranks_are_not_a_hang() -> None:
    assert spinning({0: "matmul", 1: "matmul"}, 200) is None


def by_stacks(stacks: dict[int, str], cpu: dict[int, float]) -> tuple[float, Stall] | None:
    """Two ranks whose heartbeats show no call; ``stacks``: each one's innermost file, ``cpu``: the
    share of a CPU that it uses."""

    def look(ranks: Sequence[int], _: bool) -> dict[int, bytes]:
        return {rank: stack(stacks[rank]) for rank in ranks if rank in stacks}

    patience = Patience(Watchdog(3.0, 100.0), 10.0, look)
    for tick in range(int(120 / TURN)):
        t = tick * TURN
        ranks = [
            replace(s, state="running", cpu=cpu[s.rank] * t, runnable=cpu[s.rank] > 0)
            for s in (WAITS, IDLE)
        ]
        if stall := patience.observe(t, ranks):
            return t, stall
    return None


IN_C10D = "/lib/torch/distributed/distributed_c10d.py"


def test_a_wait_that_only_the_stack_shows_is_a_hang() -> None:
    """Rank 1 computes without end, so the watchdog never sees a quiet moment."""
    found = by_stacks({0: IN_C10D, 1: "/home/me/train.py"}, {0: 0.0, 1: 1.0})
    assert found is not None
    assert 40.0 <= found[0] < 41.0
    assert (found[1].waiting, found[1].elsewhere) == ((0,), (1,))


@pytest.mark.parametrize(
    "stacks",
    [
        {0: "/lib/torch/autograd/graph.py", 1: "/home/me/train.py"},  # a backward that computes
        {1: "/home/me/train.py"},  # rank 0's stack cannot be read
        {},
    ],
)
def test_without_a_rank_that_waits_there_is_no_hang(stacks: dict[int, str]) -> None:
    assert by_stacks(stacks, {0: 0.0, 1: 1.0}) is None


def test_stack_shows_what_a_rank_does() -> None:
    assert work_of(stack("/lib/torch/_dynamo/x.py")) == "compiles"
    assert work_of(stack("<frozen importlib._bootstrap>", "/lib/torch/_dynamo/x.py")) == "imports"
    assert work_of(stack("/home/me/train.py")) == ""
    assert work_of(b"not json") == ""
    assert work_of(b"[3]") == ""
    assert work_of(stack("/lib/httpcore/_sync/http11.py")).startswith("transfers files")


@pytest.mark.parametrize("file", ["subprocess.py", "multiprocessing/pool.py"])
def test_a_stack_shows_that_a_rank_waits_for_its_children(file: str) -> None:
    assert waits_for_child(stack(f"/lib/python3.11/{file}"))
    assert not waits_for_child(stack("/home/me/pool.py"))
