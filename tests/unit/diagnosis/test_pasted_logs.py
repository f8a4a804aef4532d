"""Logs and stacks as people paste them: what the page says, whom it names, and whom it does not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence import foreign, sources
from moediag.result import Diagnosis

CLOCK = "E1121 09:10:11.27 ProcessGroupNCCL.cpp"


def page(folder: Path, text: str = "", **files: str) -> Diagnosis:
    for name, content in ({"train_log": text} if text else files).items():
        (folder / f"{name}.txt").write_text(content)
    found = sources.read([folder])
    assert found.files, found.refused
    return diagnose(foreign.evidence(found))


def told(found: Diagnosis) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return found.verdict, found.culprits, found.victims


def timeout(rank: int, seq: int, op: str = "ALLREDUCE", n: int = 64, group: str = "0") -> str:
    name = f"PG ID {group} PG GUID {group}{'(default_pg)' if group == '0' else '(ep)'}"
    return (
        f"[rank{rank}]:[{CLOCK}:1] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={n}, NumelOut={n}, Timeout(ms)=600000) ran "
        f"for "
        "600071 milliseconds before timing out.\n"
        f"[rank{rank}]:[{CLOCK}:2] [{name} Rank {rank}]  failure detected by watchdog at work "
        f"sequence "
        f"id: {seq} PG status: last enqueued work: {seq + 2}, last completed work: {seq - 1}\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    )


def signal(rank: int, by: int, issued: int, completed: int) -> str:
    return (
        f"[rank{rank}]:[{CLOCK}:3] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump "
        f"signal "
        f"due to a collective timeout from  rank {by} and we will try our best to dump the debug "
        f"info. "
        f"Last enqueued NCCL work: {issued}, last completed NCCL work: {completed}.This is most\n"
    )


def test_a_rank_that_did_not_make_the_call_is_named(tmp_path: Path) -> None:
    text = timeout(0, 41) + timeout(3, 41) + signal(2, 0, 40, 40)
    unknown = page(tmp_path, text)
    assert "only one" not in unknown.cause and "How many ranks the job has" in unknown.cause
    found = page(tmp_path, text + "WORLD_SIZE=4\n")
    assert told(found) == ("hang", (2,), (0, 3)) and found.confidence == "medium"
    assert "what rank 2 did instead" in found.next_step
    assert "(SeqNum 41)" in found.cause and "number 40" in found.cause
    assert "Rank 1 is the only one without such a message." in found.cause
    assert "rank 1: no evidence found" in found.not_seen


def test_a_rank_that_is_behind_because_it_waits_elsewhere_is_not_named(tmp_path: Path) -> None:
    """Rank 2 waits in gloo, which has no watchdog, for ranks that wait for it in NCCL."""
    gloo = (
        '[rank2]:   File "/job/moe.py", line 8, in sizes\n[rank2]: RuntimeError: '
        "[../gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.0.7]:4\n"
    )
    found = page(tmp_path, timeout(0, 41) + timeout(1, 41) + signal(2, 0, 40, 40) + gloo)
    assert told(found) == ("hang", (), ()) and found.confidence == "low"
    assert "Rank 2 is behind" in found.cause
    assert found.cause.endswith(
        "Rank 2 was in another call of the communication library, so the ranks wait for each "
        "other. The log does not show which rank is the cause."
    )


def test_the_same_call_on_all_ranks_that_were_seen_names_nobody(tmp_path: Path) -> None:
    found = page(tmp_path, "".join(timeout(rank, 41) for rank in (0, 1, 3)))
    assert told(found) == ("hang", (), ()) and found.confidence == "low"
    assert "Ranks 0, 1, 3 wait in all_reduce (64 elements)" in found.cause
    assert "does not show which rank" in found.cause and "All ranks" not in found.cause
    assert "Flight Recorder dump of every rank" in found.next_step


def test_different_calls_with_one_number_are_both_told(tmp_path: Path) -> None:
    found = page(tmp_path, timeout(0, 41) + timeout(1, 41, "_ALLGATHER_BASE", 7))
    assert told(found) == ("hang", (), ())
    assert "all_reduce (64 elements)" in found.cause and "all_gather (7 elements)" in found.cause


def test_the_odd_one_of_four_is_named(tmp_path: Path) -> None:
    found = page(
        tmp_path, "".join(timeout(rank, 41, n=9 if rank == 2 else 64) for rank in range(4))
    )
    assert told(found) == ("hang", (2,), (0, 1, 3))


def test_logs_of_single_ranks_are_read_together(tmp_path: Path) -> None:
    files = {f"rank_{rank}": timeout(rank, 41 - (rank == 1)) for rank in range(3)}
    assert told(page(tmp_path, **files)) == ("hang", (1,), (0, 2))


def test_numbers_without_a_group_are_not_compared(tmp_path: Path) -> None:
    """torch before 2.3 names no group."""
    text = "".join(
        f"[E ProcessGroupNCCL.cpp:828] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800719 "
        f"milliseconds\n"
        for rank, seq in ((0, 300), (1, 299))
    )
    found = page(tmp_path, text)
    assert told(found)[:2] == ("hang", ())
    assert "If all are of one group, rank 1" in found.cause


def test_an_exception_of_one_rank_explains_the_timeouts_of_others(tmp_path: Path) -> None:
    text = (
        "[rank2]: Traceback (most recent call last):\n"
        '[rank2]:   File "/job/moe.py", line 8, in route\n'
        "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    found = page(tmp_path, text + timeout(0, 41) + timeout(1, 41))
    assert told(found) == ("crash", (2,), (0, 1)) and "moe.py:8 route" in found.cause


def test_an_error_of_the_own_device_is_no_consequence(tmp_path: Path) -> None:
    """NCCL's watchdog is often the first thread to see it."""
    text = (
        "[rank1]: terminate called after throwing an instance of 'c10::DistBackendError'\n"
        "[rank1]:   what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread "
        "terminated with exception: CUDA error: an illegal memory access was encountered\n"
    )
    found = page(tmp_path, text + timeout(0, 41) + timeout(2, 41))
    assert told(found) == ("crash", (1,), (0, 2)) and "illegal memory access" in found.cause


def test_the_rank_of_a_failed_watchdog_is_known_in_the_group_of_all(tmp_path: Path) -> None:
    text = (
        "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG "
        "ID 0 PG "
        "GUID {}Rank 2] Process group watchdog thread terminated with exception: CUDA error: "
        "misaligned "
        "address\n"
    )
    assert told(page(tmp_path, text.format("0(default_pg) ")))[:2] == ("crash", (2,))
    group = page(tmp_path, text.format("4(ep) "))
    assert told(group)[:2] == ("crash", ()) and "misaligned address" in group.cause


def test_numbers_of_an_excerpt_without_groups_are_not_compared(tmp_path: Path) -> None:
    text = timeout(0, 41).replace("PG ID 0 PG GUID 0(default_pg) ", "").splitlines()[0]
    last = signal(2, 0, 40, 40).replace("[PG ID 0 PG GUID 0(default_pg) Rank 2] ", "")
    found = page(tmp_path, f"{text}\n{last}")
    assert found.culprits == () and "issued calls up to number 40" in found.cause


def test_a_faulthandler_dump_of_an_unknown_rank_is_told(tmp_path: Path) -> None:
    text = (
        "Current thread 0x00007f31 (most recent call first):\n"
        '  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 9 in barrier\n'
        '  File "/job/train.py", line 3 in main\n'
    )
    found = page(tmp_path, text)
    assert told(found) == ("hang", (), ()) and "barrier, called by main (train.py:3)" in found.cause


def test_the_end_of_a_traceback_is_enough(tmp_path: Path) -> None:
    text = '[rank5]:   File "/job/moe.py", line 8, in route\n[rank5]: IndexError: 9 of 8\n'
    assert told(page(tmp_path, text))[:2] == ("crash", (5,))


def test_a_lost_connection_is_a_consequence(tmp_path: Path) -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/job/moe.py", line 8, in route\n'
        "RuntimeError: [../gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.0.7]:4\n"
    )
    found = page(tmp_path, text)
    assert told(found) == ("crash", (), ())
    assert "not the cause" in found.cause and "not known which rank" in found.cause


PRINT = (
    "CollectiveFingerPrint(SequenceNumber=4, OpType={}, TensorShape=[{}], TensorDtypes=Float, D)"
)


def mismatch(one: int, first: tuple[str, int], two: int, second: tuple[str, int]) -> str:
    return (
        f"[rank{one}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {one} is "
        f"running collective: {PRINT.format(*first)}, but Rank {two} is running collective: "
        f"{PRINT.format(*second)}.Collectives differ in the following aspects: \t Op type\n"
    )


def test_a_reported_mismatch_tells_both_sides(tmp_path: Path) -> None:
    found = page(tmp_path, mismatch(1, ("ALLREDUCE", 8), 0, ("BROADCAST", 2)))
    assert told(found) == ("collective-mismatch", (), ())
    assert "rank 0 is in broadcast of shape [2] (float32)" in found.cause.lower()
    assert "rank 1 is in all_reduce of shape [8] (float32)" in found.cause.lower()


def test_one_rank_against_three_in_a_reported_mismatch_is_named(tmp_path: Path) -> None:
    text = "".join(mismatch(r, ("ALLREDUCE", 8), 0, ("BROADCAST", 2)) for r in (1, 2, 3))
    assert told(page(tmp_path, text)) == ("collective-mismatch", (0,), (1, 2, 3))


@pytest.mark.parametrize(
    ("text", "culprits"),
    [
        ("RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 9000 ms\n", (2, 3)),
        ("\t - To our best knowledge, ranks [2] are the lagging ranks that caused this "
         "timeout.\n", (2,)),
        ("\t     [2] finished collective #9, but didn't join collective #10 (count from 1)\n",
         (2,)),
        ("\t   - [2] joined but didn't finish collective #9 (count from 1)\n"
         "\t   #10 started ranks:\n\t     [0, 1] started ALLREDUCE\n", (2,)),
        ("\t   - [0, 1, 2] joined but didn't finish collective #9 (count from 1)\n"
         "\t   #9 started ranks:\n", ()),
        ("\t   - [0] joined but didn't finish collective #9 (count from 1)\n"
         "\t     [2] finished collective #9, but didn't join collective #10 (count from 1)\n", ()),
        ("[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d "
         "key-value store by key '0', but store->get('0') got error: Socket Timeout\n", ()),
    ],
)  # fmt: skip
def test_ranks_that_a_library_reports_as_absent(
    tmp_path: Path, text: str, culprits: tuple[int, ...]
) -> None:
    found = page(tmp_path, text)
    assert (found.verdict, found.culprits) == ("hang", culprits)


def test_numbers_within_a_group_are_not_named(tmp_path: Path) -> None:
    text = "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 9000 ms\n"
    found = page(tmp_path, text + timeout(4, 41, group="7"))
    assert found.culprits == () and "numbers within a group" in found.cause


def test_a_stopped_watchdog_names_nobody(tmp_path: Path) -> None:
    text = (
        f"[rank4]:[{CLOCK}:9] [PG ID 0 PG GUID 0(default_pg) Rank 4] ProcessGroupNCCL's watchdog "
        f"got "
        "stuck for 480 seconds without making progress in monitoring enqueued collectives.\n"
    )
    found = page(tmp_path, text)
    assert told(found) == ("hang", (), ()) and "rank 4" in found.cause
    assert found.notes == (
        "In the log of rank 4: NCCL's watchdog thread made no progress for 480 s.",
    )


def test_messages_of_the_machine_are_repeated(tmp_path: Path) -> None:
    text = "[ 93.1] NVRM: Xid (PCI:0000:5a:00): 79, pid=81, GPU has fallen off the bus.\n"
    found = page(tmp_path, text + timeout(0, 41))
    assert told(found) == ("crash", (), ()) and "likely cause" in found.cause
    assert found.cause.index("Xid (PCI:0000:5a:00): 79") < found.cause.index("Rank 0 waits")
    alone = page(tmp_path, text)
    assert told(alone) == ("crash", (), ()) and "Xid" in alone.cause


STACK = 'Thread 4 (idle): "MainThread"\n    {} (torch/distributed/distributed_c10d.py:9)\n'
STACK += "    step (/job/train.py:{})\n"


def stacks(operations: Iterable[str]) -> str:
    return "".join(f"Rank {r}\n{STACK.format(op, 10 + r)}" for r, op in enumerate(operations))


def test_stacks_in_one_file_tell_all_sides(tmp_path: Path) -> None:
    found = page(tmp_path, stacks(["all_reduce", "barrier"]))
    assert told(found) == ("hang", (), ())
    assert "all_reduce, called by step (train.py:10)" in found.cause
    assert "barrier, called by step (train.py:11)" in found.cause


def test_stacks_and_messages_in_one_file_are_both_read(tmp_path: Path) -> None:
    found = page(
        tmp_path, timeout(0, 41) + signal(1, 0, 40, 40) + stacks(["all_reduce", "barrier"])
    )
    assert found.verdict == "hang" and "SeqNum 41" in found.cause
    assert found.culprits == ()  # rank 1 is in a barrier, perhaps of another group
    assert "wait for each other" in found.cause and len(found.stacks) == 2


def test_stacks_of_unknown_ranks_are_told(tmp_path: Path) -> None:
    files = {f"dump-of-{name}": STACK.format("barrier", 3) for name in ("node", "other")}
    found = page(tmp_path, **files)
    assert told(found) == ("hang", (), ()) and "rank not known" in found.cause


def test_a_log_without_any_failure_is_undecided(tmp_path: Path) -> None:
    found = page(tmp_path, "[rank0]: step 1 loss 2.0\n[rank1]: step 1 loss 2.0\n")
    assert told(found) == ("inconclusive", (), ())


HCCL = (
    "[rank{r}]: Traceback (most recent call last):\n"
    '[rank{r}]:   File "train.py", line 35, in step\n'
    "[rank{r}]: RuntimeError: InnerRunOpApi: OPS function error: HcclAllreduce, error code is 6\n"
    "[rank{r}]: EI0006: [PID: 1{r}] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: "
    "Remote Rank did not send the data in time. Please check the reason for the rank being stuck\n"
)


@pytest.mark.parametrize("who", [(1,), (0, 3)])
def test_a_rank_that_hccl_let_wait_is_not_at_fault(tmp_path: Path, who: tuple[int, ...]) -> None:
    found = page(tmp_path, "".join(HCCL.format(r=rank) for rank in who))
    assert told(found) == ("hang", (), ())
    whose = {(1,): "Rank 1", (0, 3): "Ranks 0, 3"}[who]
    assert f"{whose} waited for another rank until HCCL gave up" in found.cause
    assert "plog of every rank" in found.next_step and "NCCL" not in found.next_step


def test_an_error_of_an_ascend_rank_itself_is_told(tmp_path: Path) -> None:
    found = page(tmp_path, HCCL.format(r=1).replace("HcclAllreduce", "aclnnAdd").rsplit("\n", 2)[0])
    assert told(found)[:2] == ("crash", (1,))


def test_gloo_that_gave_up_in_one_line(tmp_path: Path) -> None:
    said = "RuntimeError: [gloo/x.cc:81] Timed out waiting 1800000ms for recv operation to complete"
    found = page(tmp_path, f"[trainer22|6]:{said}")
    assert told(found) == ("hang", (), ()) and "Rank 22 waited 1800 s" in found.cause
    assert found.next_step == "Collect `py-spy dump` of every rank while it hangs."


def test_gloo_beside_nccl_leaves_the_dumps_of_nccl_to_collect(tmp_path: Path) -> None:
    gloo = "[rank2]: [gloo/x.cc:81] Timed out waiting 1800000ms for recv operation to complete\n"
    found = page(tmp_path, timeout(0, 41) + timeout(1, 41) + gloo)
    assert "Flight Recorder dump of every rank" in found.next_step


def test_calls_without_a_number(tmp_path: Path) -> None:
    work = "WorkNCCL(OpType=BROADCAST, Timeout(ms)=1800000) ran for 1809029 milliseconds before"
    caught = "Watchdog caught collective operation timeout"
    text = "".join(f"[E P.cpp:485] [Rank {r}] {caught}: {work} timing out.\n" for r in (2, 17))
    found = page(tmp_path, text)
    assert told(found) == ("hang", (), ())
    assert "Ranks 2, 17 (as the log numbers them) wait in broadcast." in found.cause


@pytest.mark.parametrize(
    "said",
    [
        "init.cu:1197 NCCL WARN Mismatched collective detected, please check your collective calls "
        "at and around rank 11. You can use NCCL_DEBUG=INFO",
        "transport/net_ib.cc:1038 NCCL WARN NET/IB : req 0/1 tag 0 peer 10.0.0.6<5> collective "
        "mismatch error, local size 496640 remote size 65536",
    ],
)
def test_a_mismatch_that_nccl_found(tmp_path: Path, said: str) -> None:
    found = page(tmp_path, f"node-1:39719:39719 [3] {said}\n")
    assert told(found) == ("collective-mismatch", (), ())
    assert "rank 11" in found.cause or "local size 496640" in found.cause
    assert not found.notes
    other = "NCCL WARN Cuda failure 'out of memory'"
    assert page(tmp_path, f"node-1:39719:39719 [3] x.cc:1 {other}\n").verdict == "inconclusive"


def test_ray_train_names_the_ranks_that_it_waits_for(tmp_path: Path) -> None:
    said = "The following ranks have not joined the collective operation: [2]\n"
    found = page(tmp_path, f"(TrainController pid=9) {said}")
    assert told(found) == ("hang", (2,), ())
    assert "Rank 2 did not reach a collective operation of Ray Train" in found.cause
    many = page(tmp_path, f"(TrainController pid=9) {said.replace('[2]', '[0, 2]')}")
    assert told(many) == ("hang", (), ()) and "Ranks 0, 2 did not reach" in many.cause


def test_a_gpu_that_reported_a_hang(tmp_path: Path) -> None:
    found = page(tmp_path, "HW Exception by GPU node-9 (Agent handle: 0x64) reason :GPU Hang\n")
    assert told(found) == ("crash", (), ()) and "GPU Hang" in found.cause


def test_a_group_that_only_one_of_two_ranks_names(tmp_path: Path) -> None:
    """The same call of ranks 0 and 2 of eight; ranks 0 and 9 may be of two groups."""
    whole = timeout(2, 41, "_ALLGATHER_BASE", group="3").replace("NumelOut=64", "NumelOut=512")
    line = whole.replace("ank2", "ank{0}").replace("ank 2", "ank {1}").splitlines()[0] + "\n"
    same, apart = (page(tmp_path, whole + line.format(*rank)) for rank in ((0, 0), (9, 1)))
    assert "Ranks 0, 2 wait in all_gather (64 to 512 elements) on ep (SeqNum 41)." in same.cause
    assert "Ranks 2, 9" not in apart.cause and told(apart) == ("hang", (), ())


DEVICE = """Thread 1 (Thread 0x7f22 (LWP 400) "python"):
#0  0x00007f3a in sched_yield () from /lib/libc.so.6
#1  0x00007f3b in {} () from /opt/libcudart.so.12
#2  0x00007f3d in _PyEval_EvalFrameDefault () from /usr/lib/libpython3.12.so
"""


def test_all_ranks_that_wait_for_their_devices_may_hang(tmp_path: Path) -> None:
    waits, works = (DEVICE.format(f) for f in ("cudaStreamSynchronize", "at::native::add"))
    found = page(tmp_path, rank0=waits, rank1=waits)
    assert told(found) == ("hang", (), ()) and "cudaStreamSynchronize" in found.cause
    assert page(tmp_path, rank0=waits, rank1=works).verdict == "inconclusive"
    assert page(tmp_path, rank0=waits[:40], rank1=works[:40]).verdict == "inconclusive"


THREADS = """Thread 4 (idle): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:9)
    step (/job/train.py:10)
Thread 5 (idle): "Thread-1 (save)"
    {} (torch/distributed/{}:9)
    save (/job/save.py:3)
Thread 6 (idle): "Thread-2"
    run (/job/prefetch.py:3)
"""


def test_two_threads_in_collectives_are_a_finding(tmp_path: Path) -> None:
    both = THREADS.format("gather_object", "distributed_c10d.py")
    (note,) = page(tmp_path, rank0=both, rank1=THREADS.format("x", "elastic/agent.py")).notes
    assert note.startswith("2 threads of rank 0 are in collectives (MainThread in all_reduce")
    assert "Thread-1 (save) in gather_object, called by save (save.py:3)" in note


def failed(rank: int, said: str, head: str = "") -> str:
    """One block of torchrun's summary."""
    return (
        f"{head}[{rank}]:\n  time      : 2023-11-14_22:13:20\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : 1 (pid: {100 + rank})\n"
        f"  error_file: /tmp/e{rank}.json\n  traceback : {said}\n  \n"
    )


def summary(*blocks: str) -> str:
    root = f"{'-' * 60}\nRoot Cause (first observed failure):\n"
    *others, first = blocks
    text = f"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{'=' * 60}\n"
    return f"{text}train.py FAILED\nFailures:\n{''.join(others)}{root}{first}{'=' * 60}\n"


RAISED = (
    "Traceback (most recent call last):\n"
    '    File "/env/site-packages/torch/distributed/elastic/errors.py", line 3, in wrapper\n'
    '    File "/home/me/train.py", line 1{rank}, in main\n      work(x)\n  {error}'
)
NO_TRACEBACK = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def test_the_summary_of_torchrun_tells_errors(tmp_path: Path) -> None:
    lost, bad = (
        "RuntimeError: Connection closed by peer [10.0.0.1]:33",
        "ValueError: row 21: 5 columns",
    )
    blocks = [failed(r, RAISED.format(rank=r, error=e)) for r, e in ((1, bad), (0, lost))]
    found = page(tmp_path, summary(*blocks))
    assert told(found) == ("crash", (1,), (0,)) and found.confidence == "high"
    assert "Rank 1 raised ValueError at train.py:11 main: row 21: 5 columns." in found.cause
    marked = "".join(f"[rank7]: step\n{line}\n" for line in blocks[0].splitlines())
    assert "raised" not in page(tmp_path, marked).cause  # no summary


def test_the_summary_of_torchrun_tells_a_mismatch(tmp_path: Path) -> None:
    prints = [
        f"CollectiveFingerPrint(SequenceNumber=5, OpType={op})" for op in ("ALLREDUCE", "GATHER")
    ]
    error = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running "
        f"collective: {prints[0]}, but Rank 0 is running collective: {prints[1]}."
    )
    found = page(tmp_path, summary(failed(1, RAISED.format(rank=1, error=error))))
    assert told(found) == ("collective-mismatch", (), ())
    assert "rank 1 is in all_reduce" in found.cause and "rank 0 is in gather" in found.cause


@pytest.mark.parametrize(
    "said", [NO_TRACEBACK, RAISED[:80], "Signal 9 (SIGKILL) received by PID 7"]
)
def test_a_summary_without_a_traceback_tells_ends_only(tmp_path: Path, said: str) -> None:
    found = page(tmp_path, summary(failed(0, NO_TRACEBACK), failed(1, said)))
    assert found.verdict == "crash" and "raised" not in found.cause


@pytest.mark.parametrize(
    "line",
    [
        "worker 7: collective aborted by the fabric manager (code 113)",
        "[mesh] step barrier timed out, 3 of 4 hosts present",
        "watchdog: rank 2 unresponsive, giving up",
    ],
)
def test_what_is_not_understood_is_quoted(tmp_path: Path, line: str) -> None:
    found = page(tmp_path, f"starting\n{line}\nbye\n")
    assert told(found) == ("inconclusive", (), ()) and f'says: "{line}"' in found.cause


@pytest.mark.parametrize(
    "text", ["timeout: 600\nnccl_timeout=30\n", "about hanging plants\n", "x\n"]
)
def test_texts_of_something_else_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.txt").write_text(text)
    assert not sources.read([tmp_path]).files
