"""Pages about what other tools concluded of a whole job: Horovod, torchfrtrace, NCCL's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence import foreign, frtrace, horovod, nccl_calls, ray_train, sources
from moediag.result import Diagnosis


def page(folder: Path, text: str) -> Diagnosis:
    (folder / "log.txt").write_text(text)
    found = sources.read([folder])
    assert found.files, found.refused
    return diagnose(foreign.evidence(found))


def told(found: Diagnosis) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return found.verdict, found.culprits, found.victims


# ------------------------------------------------------------------------ Horovod

STALL = (
    "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks "
    "and are waiting for remainder of ranks for more than 60 seconds. This may indicate that "
    "different ranks are trying to submit different tensors.\n"
)
NEW = f"[1,0]<stderr>:[2019-10-09 05:33:38.249493: W horovod/common/stall_inspector.cc:105] {STALL}"
OF_RANKS = "[1,0]<stderr>:{}:\n[1,0]<stderr>:{}: [grad.0, grad.1, grad.2, grad.3, grad.4, x ...]\n"


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        (NEW + OF_RANKS.format("Missing ranks", 4), 4),
        (NEW + OF_RANKS.format("Stalled ranks", "0!"), 0),
        (f"{STALL}Stalled ops:\ngrad.0 [missing ranks: 2]\ngrad.1 [missing ranks: 2]\n", 2),
        (f"W {STALL}Missing ranks:\n3: [loss]\n", 3),
        (f"{STALL}Missing ranks:\n1: [a]\n{STALL}Missing ranks:\n3: [loss]\n", 3),  # the last
    ],
)
def test_the_rank_that_horovod_waits_for(tmp_path: Path, text: str, rank: int) -> None:
    found = page(tmp_path, text)
    assert told(found)[:2] == ("hang", (rank,)) and rank not in found.victims
    assert f"Rank {rank} did not submit " in found.cause and "60 s" in found.cause


@pytest.mark.parametrize(
    "rest",
    [
        "Stalled ops: loss [ready ranks: 3], grad.0 [ready ranks: 2, 0, 1]",
        "Stalled ops:\nloss [missing ranks: 0, 1, 2]\ngrad.0 [missing ranks: 3]",
        "Missing ranks:\n0: [loss, norm]\n3: [grad.0]\n",
        "Stalled ops: grad.0 [ready ranks: 44, 90, 183, 148, 71, ...",
    ],
)
def test_ranks_in_different_tensors_are_both_told(tmp_path: Path, rest: str) -> None:
    found = page(tmp_path, STALL + rest)
    assert told(found) == ("hang", (), ())
    assert "grad.0" in found.cause and ("loss" in found.cause or "44" in found.cause)


def test_a_job_that_went_on_was_slow(tmp_path: Path) -> None:
    went_on = f"epoch 3 loss 2.1\n{STALL}Missing ranks:\n3: [loss]\nepoch 4 loss 2.0\n"
    found = page(tmp_path, went_on)
    assert told(found) == ("inconclusive", (), ()) and "60 s late" in found.cause


@pytest.mark.parametrize("cut", ["", "Missing ranks:\n", "Missing ranks:\n3", "Stalled ops:\ngrad"])
def test_a_report_of_horovod_that_is_cut(cut: str) -> None:
    assert horovod.read(STALL + cut) == () and horovod.read("Missing ranks:\n3: [a]") == ()


# ------------------------------------------------------------------------ Ray Train

RAY = """(SynchronizationActor pid=71)
(SynchronizationActor pid=71) `ray.train.report` has not been called by all {} workers in the group.
(SynchronizationActor pid=71) Please ensure that all workers call `ray.train.report`. Here are the
(SynchronizationActor pid=71) so far and how long they have been waiting in seconds:
(SynchronizationActor pid=71) {}
(SynchronizationActor pid=71) You can set the RAY_TRAIN environment variable: 60 seconds.
"""


@pytest.mark.parametrize(
    ("size", "waiting", "culprits"),
    [
        (4, "{0: 61.2, 1: 60.0, 2: 59.5}", (3,)),
        (6, "{1: 61.2, 2: 60.0, 4: 59.5, 5: 3.25}", (0, 3)),
        (4, "{1: 61.2}", ()),  # who came may be wrong
        (2, "{1: 61.2}", ()),
    ],
)
def test_ranks_that_ray_train_waits_for(
    tmp_path: Path, size: int, waiting: str, culprits: tuple[int, ...]
) -> None:
    found = page(tmp_path, RAY.format(size, waiting))
    assert told(found)[:2] == ("hang", culprits)
    assert "did not call ray.train.report" in found.cause and "61 s" in found.cause


@pytest.mark.parametrize(
    "text",
    [
        RAY.format(2, "{0: 61.2, 1: 60.0}"),
        RAY.format(2, "{0: 61.2}") + "epoch 2 loss 1.5\n",
        RAY.format(2, "{0: 61.2}")[:130],
    ],
)
def test_a_warning_of_ray_train_that_is_over_or_cut(text: str) -> None:
    assert ray_train.read(text) == ()


# ------------------------------------------------------------------------ torchfrtrace

FIELDS = """internal record id: 38
group info: {group}
collective: nccl:all_reduce
{more}input sizes: [[1025]]
output sizes: [[1025]]
world size: 4
expected ranks: {{0, 1, 2, 3}}
collective state: scheduled
{end}collective stack trace:
 forward at /home/me/train.py:7
"""
SIZES = "Expected input sizes: '[[1025]]' does not match found input sizes: '[[262144]]'"


def analysed(head: str, group: str = "0:default_pg", more: str = "", end: str = "") -> str:
    return f"loaded 4 files in 0.1s\n{head}\n" + FIELDS.format(group=group, more=more, end=end)


@pytest.mark.parametrize(
    "head", ["Collective sequence number: 39 has errors", "Collective 39 at entry 38 errors"]
)
def test_sizes_that_differ_by_the_analyser(tmp_path: Path, head: str) -> None:
    for said in (f"Culprit rank 2; Error type: SIZE_OR_SYNTAX_MISMATCH, {SIZES}",) * 2:
        found = page(
            tmp_path, analysed(head, end=f"error msg: {said}, Culprit rank 3; {said[16:]}\n")
        )
        assert told(found) == ("collective-mismatch", (), ())
        assert "all_reduce number 39 of default_pg: rank 2 differs" in found.cause
        assert "[[262144]]" in found.cause and "rank 3 differs" in found.cause
        assert "not known which side is wrong" in found.cause


@pytest.mark.parametrize(
    ("missing", "culprits"), [("{3}", (3,)), ("{1, 2, 3}", ()), ("{1, 3}", ())]
)
def test_ranks_that_did_not_join(tmp_path: Path, missing: str, culprits: tuple[int, ...]) -> None:
    head = "Not all ranks joining collective, sequence number: 39"
    text = analysed(head, more=f"missing ranks: {missing}\n")
    found = page(tmp_path, text)
    assert (
        told(found)[:2] == ("hang", culprits) and "did not join all_reduce number 39" in found.cause
    )
    other = analysed(head, group="2:tp", more="missing ranks: {0}\n")
    assert page(tmp_path, text + other).culprits == ()  # each group may wait for the other


def test_a_call_that_completed_on_some_ranks_is_no_mismatch(tmp_path: Path) -> None:
    said = (
        "Culprit rank 1; Error type: COLLECTIVE_STATE_MISMATCH, Expected state: 'scheduled' does "
        "not match found state: 'completed'"
    )
    found = page(
        tmp_path, analysed("Collective sequence number: 7 has errors", end=f"error msg: {said}\n")
    )
    assert told(found) == ("hang", (), ()) and "'completed'" in found.cause


def test_totals_of_an_all_to_all(tmp_path: Path) -> None:
    more = "total input numel: 640\ntotal output numel: 512\n"
    head = "Input/output mismatch in the collective sequence number: 5"
    found = page(tmp_path, analysed(head, more=more))
    assert told(found)[0] == "collective-mismatch" and "640 elements and expect 512" in found.cause


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("No errors found for this collective entry, There could be others", "no error"),
        ("We cannot decide what's wrong with this collective entry because we missed FR dumps "
         "from ranks ({2, 3}) so we don't have enough information.", "no dump of ranks 2, 3"),
    ],
)  # fmt: skip
def test_an_analysis_without_a_finding(tmp_path: Path, text: str, said: str) -> None:
    found = page(tmp_path, text)
    assert told(found) == ("inconclusive", (), ()) and said in found.cause


@pytest.mark.parametrize("kept", [30, 70, 110])
def test_an_analysis_that_is_cut(kept: int) -> None:
    text = analysed("Collective sequence number: 39 has errors")
    assert all(not one.about for one in frtrace.read(text[:kept])) and frtrace.read("x: y") == ()


# ------------------------------------------------------------------------ NCCL's log


def call(
    device: int, n: int, op: str = "AllReduce", count: int = 64, comm: str = "0x7f", size: int = 4,
    host: str = "node1",
) -> str:  # fmt: skip
    return (
        f"{host}:{300 + device}:99 [{device}] NCCL INFO {op}: opCount {n:x} sendbuff 0x1 recvbuff "
        f"0x2 count {count} datatype 7 op 0 root 0 comm {comm}{device} [nranks={size}] stream 0x5\n"
    )


def start(device: int, rank: int, name: str, comm: str = "0x7f", size: int = 4) -> str:
    return (
        f"node1:{300 + device}:98 [{device}] NCCL INFO ncclCommInitRank comm {comm}{device} rank "
        f"{rank} nranks {size} cudaDev {device} nvmlDev {device} busId 9 commId {name} - Init "
        "COMPLETE\n"
    )


def test_the_call_that_differs_in_nccl_s_log(tmp_path: Path) -> None:
    text = "".join(
        call(device, n, count=128 if (device, n) == (2, 17) else 64)
        for n in range(30)
        for device in range(4)
    )
    found = page(tmp_path, text)
    assert told(found) == ("collective-mismatch", (2,), (0, 1, 3))
    assert "rank 2 is in all_reduce (128 elements, float32) number 17" in found.cause


def test_the_lines_of_the_start_tell_the_ranks(tmp_path: Path) -> None:
    starts = "".join(start(d, 3 - d, "0xab") for d in range(4))
    calls = "".join(call(d, 0, "ReduceScatter" if d == 0 else "AllGather") for d in range(4))
    found = page(tmp_path, starts + calls)
    assert told(found)[:2] == ("collective-mismatch", (3,))
    assert "reduce_scatter" in found.cause and "all_gather" in found.cause


def test_ranks_of_a_smaller_communicator_are_not_named(tmp_path: Path) -> None:
    world = "".join(call(d, 0) for d in range(4))
    pair = "".join(call(d, 0, count=5 + d, comm="0xe", size=2) for d in (2, 3))
    found = page(tmp_path, world + pair)
    assert told(found) == ("collective-mismatch", (), ())
    assert "process 302 on node1" in found.cause and "rank" not in found.cause.partition(":")[2]


@pytest.mark.parametrize(
    "text",
    [
        "".join(call(d, n) for n in range(5) for d in range(4)),
        # still under way on one rank, as in any job
        "".join(call(d, n) for n in range(5) for d in range(4))[:-1] + "\n" + call(0, 5),
        # two communicators of one size: which call meets which is not known
        call(0, 0) + call(1, 0, count=9) + call(0, 0, comm="0x8") + call(1, 0, comm="0x8"),
        # sends and receives move the numbers of a rank
        call(0, 0, "Send") + call(0, 1) + call(1, 1, count=9),
        call(0, 0)[:90] + "\n",
    ],
)  # fmt: skip
def test_equal_or_incomparable_calls_are_no_mismatch(text: str) -> None:
    assert nccl_calls.read(text) == ()
