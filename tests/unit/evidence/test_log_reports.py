"""Messages of libraries, kernel and schedulers, in the formats of several releases of torch."""

from __future__ import annotations

import pytest

from moediag.evidence.log_lines import read as lines_of
from moediag.evidence.log_reports import group_size, job_size, read
from moediag.evidence.model import Report


def reports(text: str, own: int | None = None) -> tuple[Report, ...]:
    return read(lines_of(text), own)


WORK = "WorkNCCL(SeqNum=12, OpType=_ALLGATHER_BASE, NumelIn=8, NumelOut=32, Timeout(ms)=600000)"
CAUGHT = f"Watchdog caught collective operation timeout: {WORK} ran for 600012 milliseconds."


@pytest.mark.parametrize(
    ("line", "rank", "group", "place"),
    [
        (f"[rank9]:[E1121 ProcessGroupNCCL.cpp:6] [Rank 1] {CAUGHT}", 9, "", 1),
        (f"[E ProcessGroupNCCL.cpp:828] [Rank 1] {CAUGHT}", None, "", 1),
        (f"  what():  [PG 3 Rank 1] Process group watchdog thread terminated with exception: "
         f"[Rank 1] {CAUGHT}", None, "3", 1),
        (f"[PG ID 2 PG GUID 5(mesh_tp) Rank 1] {CAUGHT}", None, "5", 1),
        (f"  4%|#   | 3/70 [00:01<0:09][rank9]:[E1121 P.cpp:6] [Rank 1] {CAUGHT}", 9, "", 1),
        (f"[rank9]:[E1121 P.cpp:7] [Rank 1] Work {WORK} timed out in blocking wait.", 9, "", 1),
        (f"[PG ID 0 PG GUID 0(default_pg) Rank 1] {CAUGHT}", 1, "0", 1),
        (CAUGHT, None, "", None),
        (f"```\n{WORK} ran for 600012 milliseconds before timing out\n```", None, "", None),
    ],
)  # fmt: skip
def test_a_timeout_in_any_release(
    line: str, rank: int | None, group: str, place: int | None
) -> None:
    (one,) = reports(line)
    assert (one.kind, one.rank, one.group, one.place) == ("timeout", rank, group, place)
    assert (one.seq, one.op, one.numel_in, one.numel_out) == (12, "all_gather", 8, 32)
    assert one.seconds == 600 and group_size(one) == 4


@pytest.mark.parametrize(
    "said",
    [
        "[PG ID 1 PG GUID 7(dp) Rank 2]  failure detected by watchdog at work sequence id: 12 PG "
        "status: last enqueued work: 14, last completed work: 11",
        "[PG 7 (dp) Rank 2] Timeout at NCCL work: 12, last enqueued NCCL work: 14, last completed "
        "NCCL work: 11.",
        "[PG 7 Rank 2] Exception (either an error or timeout) detected by watchdog at work: 12, "
        "last "
        "enqueued NCCL work: 14, last completed NCCL work: 11.",
        "[PG ID 1 PG GUID 7(dp) Rank 2] failure detected by watchdog at work sequence id: 12 PG "
        "status: last enqueued \nwork: 14, last completed work: 11",
    ],
)
def test_the_status_of_a_group(said: str) -> None:
    (one,) = reports(f"[rank6]:[E1121 09:10:11.5 ProcessGroupNCCL.cpp:2] {said}")
    assert (one.kind, one.rank, one.group, one.place) == ("status", 6, "7", 2)
    assert (one.seq, one.issued, one.completed) == (12, 14, 11) and one.time > 0


def signal(issued: int, completed: int, whose: str = "this local rank") -> str:
    return (
        "[rank6]:[E1121 P.cpp:3] [PG ID 0 PG GUID 0(default_pg) Rank 6] Received a dump signal "
        "due to "
        f"a collective timeout from {whose} and we will try our best to dump the debug info. Last "
        f"enqueued NCCL work: {issued}, last completed NCCL work: {completed}.This is most likely"
    )


def test_a_dump_signal() -> None:
    (own,), (other,) = reports(signal(14, 11)), reports(signal(14, 14, " rank 3"))
    assert (own.kind, own.issued, own.completed, own.about) == ("signal", 14, 11, ())
    assert (other.issued, other.completed, other.about) == (14, 14, (3,))


def test_an_excerpt_may_lack_the_group() -> None:
    said = "Received a dump signal due to a collective timeout from rank 10 ..."
    (one,) = reports(f"[rank2]: {said} Last enqueued NCCL work: 6, last completed NCCL work: 6.")
    assert (one.kind, one.rank, one.group, one.issued, one.about) == ("signal", 2, "", 6, (10,))


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("[PG ID 0 PG GUID 0(default_pg) Rank 2] Process group", 2),
        ("[Rank 2] NCCL", None),
        ("[rank2]: ProcessGroupNCCL", 2),
    ],
)
def test_a_watchdog_that_ended_by_an_error(name: str, rank: int | None) -> None:
    text = f"{name} watchdog thread terminated with exception:\n    CUDA error: bad"
    (one,) = reports(f"{text}\nCompile with DSA\n")
    assert (one.kind, one.rank, one.detail) == ("failed", rank, "CUDA error: bad")


def test_numbers_that_torch_did_not_set_are_unknown() -> None:
    (none,), (absurd,) = reports(signal(-1, -1)), reports(signal(14, 93_459_313_471_793))
    assert (none.issued, none.completed) == (0, 0)
    assert (absurd.issued, absurd.completed) == (14, None)


def test_a_timeout_takes_its_group_from_the_next_message_about_the_call() -> None:
    text = (
        f"[rank6]:[E1121 P.cpp:1] [Rank 2] {CAUGHT}\n"
        "[rank6]:[E1121 P.cpp:2] [PG ID 1 PG GUID 7(dp) Rank 2] failure detected by watchdog at "
        "work "
        "sequence id: 12 PG status: last enqueued work: 14, last completed work: 11\n"
        f"[rank7]:[E1121 P.cpp:1] [Rank 3] {CAUGHT}\n"
    )
    first, _, other = reports(text)
    assert (first.group, first.desc) == ("7", "dp")
    assert other.group == ""  # another process may be in another group


def test_reports_are_in_order_across_the_end_of_a_month() -> None:
    said = ("1130 23:59:59", "1201 00:00:01", "1201 00:00:02")
    times = [
        one.time
        for clock in said
        for one in reports(f"[rank9]:[E{clock}.5 ProcessGroupNCCL.cpp:6] [Rank 1] {CAUGHT}")
    ]
    assert times == sorted(times) and len(set(times)) == 3
    assert times[2] - times[1] == 1


def test_a_mismatch_names_both_sides() -> None:
    print_ = (
        "CollectiveFingerPrint(SequenceNumber={}, OpType={}, TensorShape=[{}], TensorDtypes={}, T)"
    )
    text = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 2 is running "
        "collective: "
        + print_.format(4, "ALLREDUCE", "3, 8", "Float") + ", but Rank 0 is running collective: "
        + print_.format(4, "BROADCAST", "1", "Long") + ".Collectives differ in the following "
                                                       "aspects:"
    )  # fmt: skip
    (one,) = reports(text)
    assert one.sides == (
        (2, "all_reduce of shape [3, 8] (float32)"),
        (0, "broadcast of shape [1] (int64)"),
    )


@pytest.mark.parametrize(
    ("line", "kind", "about"),
    [
        ("RuntimeError: [Rank 0]: Rank 3 failed to pass monitoredBarrier in 9000 ms", "absent",
         (3,)),
        ("[Rank 0]: Ranks 3, 5 failed to pass monitoredBarrier in 9000 ms", "absent", (3, 5)),
        ("[Rank 4]: Rank 4 successfully reached monitoredBarrier, but received errors while "
         "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.",
         "unanswered", ()),
        ("\t - To our best knowledge, ranks [1, 2] are the lagging ranks that caused this timeout. "
         "They never joined any collectives", "never", (1, 2)),
        ("\t   - [1, 2] joined but didn't finish collective #9 (count from 1)", "open", (1, 2)),
        ("\t     [3] finished collective #9, but didn't join collective #10 (count from 1)",
         "missing", (3,)),
        ("[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
         "key-value store by key '0', but store->get('0') got error: Socket Timeout",
         "no-id", (0,)),
        ("DistStoreError: Timed out after 61 seconds waiting for clients. 3/4 clients joined.",
         "clients", ()),
        ("[  9.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.", "machine",
         ()),
        ("Out of memory: Killed process 7 (python) total-vm:1kB", "killed", ()),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", "killed", ()),
        ("srun: error: node7: task 3: Killed", "ended", ()),
        ("ProcessExitedException: process 1 terminated with signal SIGKILL", "ended", ()),
        ("node7:81:99 [2] NCCL WARN Cuda failure 'out of memory'", "warning", ()),
        ("[PG ID 0 PG GUID 0 Rank 2] ProcessGroupNCCL's watchdog got stuck for 480 seconds without "
         "making progress", "stuck", ()),
        ("[PG 0 Rank 2] Heartbeat monitor timed out! Process will be terminated", "stuck", ()),
    ],
)  # fmt: skip
def test_other_messages(line: str, kind: str, about: tuple[int, ...]) -> None:
    (one,) = reports(line)
    assert (one.kind, one.about) == (kind, about)


def test_the_line_that_made_the_call_is_kept() -> None:
    text = (
        "[rank3]:[E1121 P.cpp:9] Stack trace of the failed collective: \n"
        "#0 all_reduce from /v/site-packages/torch/distributed/distributed_c10d.py:29\n"
        "#1 clip from /job/moe/train.py:41\n"
        "#2 <module> from /job/run.py:7\n\n"
    )
    (one,) = reports(text)
    assert (one.kind, one.rank, one.detail) == ("site", 3, "train.py:41 clip")


@pytest.mark.parametrize(
    "text",
    ["Watchdog started", "the last enqueued job", "collective timeout=1800", "rank 3 OOM? no", ""],
)
def test_other_lines_report_nothing(text: str) -> None:
    assert reports(text) == ()


def test_a_file_of_one_rank_gives_its_rank() -> None:
    assert reports(f"[Rank 1] {CAUGHT}", own=9)[0].rank == 9


def test_the_job_has_at_least_the_ranks_that_messages_show() -> None:
    assert job_size(reports(f"[PG ID 2 PG GUID 5(tp) Rank 1] {CAUGHT}")) == 4
    assert job_size(reports("[Rank 0]: Ranks 3, 5 failed to pass monitoredBarrier in 9 ms")) == 6
    assert job_size(reports("nothing")) == 0
    assert job_size(reports("[Rank 0]: Rank 9999999 failed to pass monitoredBarrier in 9 ms")) == 0


@pytest.mark.parametrize(
    ("work", "seq", "op", "seconds"),
    [
        ("WorkNCCL(OpType=BROADCAST, Timeout(ms)=1800000)", None, "broadcast", 1800),
        ("WorkNCCL(SeqNum=7, OpType=ALLREDUCE, TensorShape=[2, 3], Timeout(ms)=600000)", 7,
         "all_reduce", 600),
        ("WorkNCCL(SeqNum=8, OpType=BARRIER)", 8, "barrier", 0),
    ],
)  # fmt: skip
def test_a_timeout_of_older_releases(work: str, seq: int | None, op: str, seconds: float) -> None:
    said = f"[Rank 2] Watchdog caught collective operation timeout: {work} ran for 9 milliseconds."
    (one,) = reports(f"[E ProcessGroupNCCL.cpp:485] {said}")
    assert (one.seq, one.op, one.seconds, one.place) == (seq, op, seconds, 2)


@pytest.mark.parametrize(
    ("numbers", "sides"),
    [
        ((1, 0), ((1, "barrier number 1"), (2, "barrier number 0"))),
        ((3, 7), ((1, "barrier number 3"), (2, "barrier number 7"))),
    ],
)
def test_barriers_differ_by_their_number_only(
    numbers: tuple[int, int], sides: tuple[tuple[int, str], ...]
) -> None:
    one, two = (f"CollectiveFingerPrint(SequenceNumber={n}OpType=BARRIER)" for n in numbers)
    (report,) = reports(
        f"Detected mismatch between collectives on ranks. Rank 1 is running collective: {one}, "
        f"but Rank 2 is running collective: {two}.Collectives differ in the following aspects: "
    )
    assert report.sides == sides


@pytest.mark.parametrize(
    "said",
    [
        "The following ranks are not reaching the collective operation: [1, 3]",
        "The following ranks have not called it: [1, 3]",
        "The following ranks have not joined the collective operation: [1, 3]",
    ],
)
def test_ranks_that_ray_train_waits_for(said: str) -> None:
    (one,) = reports(f"(TrainController pid=9) WARNING: {said}\n")
    assert (one.kind, one.about) == ("not-reported-by-many", (1, 3))
    (one,) = reports(said.replace("[1, 3]", "[3]"))
    assert (one.kind, one.about) == ("not-reported", (3,))
    assert not reports("The following ranks have not called it: []")
