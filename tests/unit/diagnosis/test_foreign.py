"""Dumps of other jobs: the faulty rank is the only culprit, and healthy jobs are clean."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import jobs
from moediag.diagnosis import diagnose
from moediag.evidence import flight_dump, foreign, log_lines, log_reports, sources
from moediag.evidence.model import Frame, RankError, Stack
from moediag.evidence.sources import Found
from moediag.result import Diagnosis

LATER = 1_700_003_600.0  # an hour after the simulated jobs began
SAMPLES = Path(__file__).parents[2] / "samples/flight-recorder"
LAYOUTS = [jobs.Layout(2, 4, 2, 2), jobs.Layout(4, 2, 2, 2), jobs.Layout(1, 8, 2, 4)]
BASES = {layout: jobs.healthy(layout, steps=5) for layout in LAYOUTS}


def found_of(job: jobs.Job, **options: Any) -> Found:
    dumps = {rank: flight_dump.read(raw) for rank, raw in jobs.dumps(job, **options)}
    return Found(dumps=dumps, files=len(dumps), taken_at=LATER)


def diagnosed(found: Found) -> Diagnosis:
    return diagnose(foreign.evidence(found))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("fault", jobs.FAULTS)
@pytest.mark.parametrize("ring", [2000, 60])
def test_the_faulty_rank_of_sixteen_is_the_culprit(
    layout: jobs.Layout, fault: str, ring: int
) -> None:
    if fault == "skip-p2p" and layout.pp == 1:
        return
    job = jobs.faulty(BASES[layout], fault, seed=11)
    found = diagnosed(found_of(job, ring=ring, local_names=True))
    assert (found.verdict, found.culprits) == ("hang", job.culprits), found.cause
    assert set(found.victims) | set(found.culprits) >= set(range(16)) - job.silent


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("ring", [2000, 70, 20])
def test_a_healthy_job_is_clean(layout: jobs.Layout, ring: int) -> None:
    found = diagnosed(found_of(BASES[layout], ring=ring))
    assert (found.verdict, found.culprits) == ("clean", ())
    assert found.confidence == ("medium" if ring == 2000 else "low")


@pytest.mark.parametrize("fault", [f for f in jobs.FAULTS if f != "killed"])
@pytest.mark.parametrize("seed", range(3))
def test_missing_dumps_do_not_add_culprits(fault: str, seed: int) -> None:
    layout = LAYOUTS[0]
    job = jobs.faulty(BASES[layout], fault, seed)
    innocent = [rank for rank in range(16) if rank not in job.culprits]
    lost = frozenset({innocent[seed * 4], innocent[seed * 4 + 2]})
    found = diagnosed(found_of(replace(job, silent=lost)))
    assert found.verdict == "hang" and set(found.culprits) <= set(job.culprits)
    assert any("no evidence found" in text for text in found.not_seen)


def test_a_rank_without_a_dump_that_all_wait_for_is_the_culprit() -> None:
    job = jobs.faulty(BASES[LAYOUTS[0]], "killed", 2)
    found = diagnosed(found_of(job))
    assert found.culprits == job.culprits and found.confidence == "medium"
    assert "ollect a" not in found.cause


def test_a_stuck_device_is_not_a_code_mismatch() -> None:
    job = jobs.faulty(BASES[LAYOUTS[0]], "device", 2)
    found = diagnosed(found_of(job))
    assert found.culprits == job.culprits and "not a mismatch of code" in found.cause
    assert found.next_step.startswith("Check the device and the links of rank")
    # It is not known which calls began, only that the job stalls.
    raw = dict(jobs.dumps(job))
    for one in raw.values():
        for entry in one["entries"]:
            if entry["state"] == "started":
                entry["state"] = "scheduled"
    blind = {rank: flight_dump.read(one) for rank, one in raw.items()}
    found = diagnosed(Found(dumps=blind, files=16, taken_at=LATER))
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "does not complete" in found.cause and "py-spy" not in found.cause
    assert found.next_step == "Collect `py-spy dump` of every rank while it hangs."


def test_a_circular_wait_is_reported_with_its_groups() -> None:
    job = jobs.faulty(BASES[LAYOUTS[0]], "order", 2)
    found = diagnosed(found_of(job))
    assert "in a circle" in found.cause and found.culprits == job.culprits
    assert found.first_divergence is not None
    assert str(job.culprits[0]) in found.first_divergence.ranks


@pytest.mark.parametrize(("fault", "line"), [("extra", "train.py:900"), ("skip", None)])
def test_a_rank_that_diverged_long_before_the_stop_is_the_culprit(
    fault: str, line: str | None
) -> None:
    """Equal calls still match after an extra or missing one, until a different call follows."""
    astray = 0
    for seed in range(200, 212):
        job = jobs.faulty(BASES[LAYOUTS[0]], fault, seed)
        found = diagnosed(found_of(job))
        assert found.culprits == job.culprits
        assert any(f"train.py:{one} " in found.cause for one in job.lines), found.cause
        assert line is None or line in found.cause
        astray += "in a circle" in found.cause
    assert astray > 3, "the faults of this test are found where they happen"


def test_only_the_two_ends_of_a_send_vote_in_a_circular_wait() -> None:
    """All others wait where the rank waits that skipped the receive: they are not a majority."""
    layout = jobs.Layout(4, 2, 2, 2)
    job = jobs.faulty(jobs.healthy(layout, 5, micro_batches=3), "skip-p2p", 100)
    found = diagnosed(found_of(job))
    assert "in a circle" in found.cause and found.culprits == job.culprits == (1,)


def test_uneven_all_to_all_is_not_a_mismatch() -> None:
    """Ranks send different numbers of tokens; the dump has no split sizes."""

    def uneven(raw: dict[str, Any], rank: int, lost: int) -> dict[str, Any]:
        for entry in raw["entries"]:
            if entry["profiling_name"] == "nccl:all_to_all":
                place = rank // 2 % 2
                entry["input_sizes"] = [[1000 + 6 * place, 64]]
                entry["output_sizes"] = [[1006 - 6 * place - (lost if rank == 3 else 0), 64]]
        return raw

    layout = jobs.Layout(pp=1, dp=4, tp=2, ep=2)
    for lost in (0, 2):
        dumps = {
            rank: flight_dump.read(uneven(raw, rank, lost))
            for rank, raw in jobs.dumps(jobs.healthy(layout, 2))
        }
        found = diagnosed(Found(dumps=dumps, files=8))
        assert found.verdict == ("collective-mismatch" if lost else "clean")
        assert found.culprits == ()  # which rank is wrong is not recorded


def test_a_completed_call_that_differs_is_a_mismatch() -> None:
    raw = dict(jobs.dumps(jobs.healthy(jobs.Layout(dp=4), 2)))
    raw[2]["entries"][3] |= {"input_dtypes": ["Float"], "output_dtypes": ["Float"]}
    dumps = {rank: flight_dump.read(one) for rank, one in raw.items()}
    found = diagnosed(Found(dumps=dumps, files=4))
    assert (found.verdict, found.culprits) == ("collective-mismatch", (2,))


def test_nobody_is_named_where_most_ranks_did_not_come_to_a_call() -> None:
    """One rank made an extra call, or the others never came: dumps show no difference."""
    base = jobs.healthy(jobs.Layout(dp=8), 2)
    programs = list(base.programs)
    programs[5] = [*programs[5], jobs.Op("world", "all_reduce", 4, 300)]
    found = diagnosed(found_of(replace(base, programs=programs)))
    assert (found.verdict, found.culprits, found.victims) == ("hang", (), ())


def test_calls_in_flight_are_not_a_hang() -> None:
    job = jobs.healthy(jobs.Layout(dp=4), 2)
    raw = dict(jobs.dumps(job))
    for one in raw.values():
        one["entries"][-1] |= {
            "state": "started", "retired": False, "time_discovered_completed_ns": None,
        }  # fmt: skip
    dumps = {rank: flight_dump.read(one) for rank, one in raw.items()}
    last = max(dump.created[-1] for dump in dumps.values()) / 1e9
    just = diagnosed(Found(dumps=dumps, files=4, taken_at=last + 0.5))
    assert just.verdict == "inconclusive" and "may have been running" in just.cause
    late = diagnosed(Found(dumps=dumps, files=4, taken_at=last + 600))
    assert (late.verdict, late.culprits) == ("hang", ())


def test_a_late_rank_is_no_culprit_where_a_dump_tells_when_it_was_written() -> None:
    """One job stood still until its watchdog wrote dumps, the other was dumped while it ran."""
    stuck = jobs.faulty(BASES[LAYOUTS[0]], "stuck", seed=3)
    late = replace(stuck, culprits=(), at={}, lines=())

    def of(job: jobs.Job, timing: bool) -> Diagnosis:
        return diagnosed(replace(found_of(job, timing=timing), taken_at=None))

    known = of(stuck, timing=True)
    assert (known.verdict, known.culprits) == ("hang", stuck.culprits)
    assert "on request" not in known.cause
    known = of(late, timing=True)
    assert (known.verdict, known.culprits) == ("inconclusive", ())
    for job in (stuck, late):  # the same calls, and nothing tells the time
        unknown = of(job, timing=False)
        assert (unknown.verdict, unknown.culprits) == ("hang", stuck.culprits)
        assert unknown.confidence == "medium"
        who = f"rank {stuck.culprits[0]} may just be late"
        assert f"if they were written on request, {who}" in unknown.cause
        assert unknown.next_step.startswith("Dump again a minute later")


def test_real_gloo_dumps_are_diagnosed() -> None:
    def read(name: str, world: int) -> Found:
        folder = SAMPLES / name
        raw = {r: (folder / f"trace_rank_{r}").read_bytes() for r in range(world)}
        dumps = {r: flight_dump.read(pickle.loads(data)) for r, data in raw.items()}
        return Found(dumps=dumps, files=world, stood=True)

    assert diagnosed(read("gloo-collectives", 3)).verdict == "clean"
    stuck = diagnosed(read("gloo-stuck", 4))
    # Rank 1 is in a receive, which gloo does not record, so the confidence is at most medium.
    assert (stuck.verdict, stuck.culprits, stuck.confidence) == ("hang", (0, 1), "medium")
    found = read("gloo-stuck", 4)
    found.stacks[1] = [stack("recv", "torch/distributed/distributed_c10d.py")]
    assert diagnosed(found).culprits == (0,)  # its stack shows the receive


# ------------------------------------------------------------------------ without dumps


def stack(function: str, file: str, user: str = "/job/train.py", line: int = 7) -> Stack:
    frames = (Frame(f"/v/{file}", 3, function), Frame(user, line, "step"))
    return Stack("MainThread", "py-spy", frames)


C10D = "torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("change", "culprits", "confidence"),
    [
        (lambda rank: stack("all_reduce", C10D), (), "low"),
        (lambda rank: stack("barrier" if rank == 3 else "all_reduce", C10D), (), "low"),
        (lambda rank: stack(*(("read", "io.py") if rank == 2 else ("f", C10D))), (2,), "medium"),
        (lambda rank: stack(*(("read", "io.py") if rank else ("f", C10D))), (), "low"),
        (lambda rank: stack("synchronize" if rank == 2 else "barrier", C10D), (), "low"),
        (lambda rank: stack(*(("read", "io.py") if rank == 2 else (f"f{rank}", C10D))), (), "low"),
    ],
)  # fmt: skip
def test_stacks_alone_name_only_a_rank_that_all_others_wait_for(
    change: Callable[[int], Stack], culprits: tuple[int, ...], confidence: str
) -> None:
    found = diagnosed(Found(stacks={rank: [change(rank)] for rank in range(4)}, files=4))
    assert (found.verdict, found.culprits, found.confidence) == ("hang", culprits, confidence)


def test_a_rank_that_waits_and_of_which_nothing_else_is_known_proves_nothing() -> None:
    sides = {rank: [stack(*(("f", C10D) if rank else ("read", "io.py")))] for rank in range(4)}
    whole = foreign.evidence(Found(stacks=sides, files=4))
    assert diagnose(whole).culprits == (0,)
    ranks = {rank: whole.ranks[rank] for rank in (0, 1, 2)}
    assert diagnose(replace(whole, ranks=ranks)).culprits == ()


def test_stacks_alone_tell_both_sides() -> None:
    """Rank 3 may be right, and the three others wrong."""
    sides = {rank: [stack("barrier" if rank == 3 else "all_reduce", C10D)] for rank in range(4)}
    found = diagnosed(Found(stacks=sides, files=4))
    assert "ranks 0..2 are in all_reduce" in found.cause.lower()


def test_a_rank_in_autograd_may_wait_as_well() -> None:
    """DDP communicates from C++, below the backward pass."""
    stacks = {rank: [stack("all_reduce", C10D)] for rank in range(3)}
    stacks[3] = [stack("_engine_run_backward", "torch/autograd/graph.py")]
    found = diagnosed(Found(stacks=stacks, files=4))
    assert (found.verdict, found.culprits) == ("hang", ()) and "autograd" in found.cause


def test_stacks_outside_communication_are_not_a_hang() -> None:
    found = diagnosed(Found(stacks={r: [stack("read", "io.py")] for r in range(4)}, files=4))
    assert found.verdict == "inconclusive"


def test_an_exception_explains_why_other_ranks_wait() -> None:
    job = jobs.faulty(jobs.healthy(jobs.Layout(dp=4), 3), "stuck", 1)
    (rank,) = job.culprits
    found = found_of(job)
    found.errors[rank] = RankError("IndexError", "9: out", "train.py:3 f")
    crashed = diagnosed(found)
    assert (crashed.verdict, crashed.culprits) == ("crash", (rank,))


def test_a_crash_is_found_from_torchrun_output_only() -> None:
    found = diagnosed(sources.read([SAMPLES.parent / "torchrun" / "launcher.log"]))
    assert (found.verdict, found.culprits, found.victims) == ("crash", (1,), (0,))


@pytest.mark.parametrize(("said", "certain"), [("", False), ("Watchdog caught collective", True)])
def test_a_watchdogs_line_beside_dumps_tells_that_the_job_stood(said: str, certain: bool) -> None:
    """Also where the line, of torch before 2.3, does not tell the rank in the job."""
    found = found_of(jobs.faulty(BASES[LAYOUTS[0]], "skip", 2), timing=False)
    found.taken_at = None
    for dump in found.dumps.values():
        dump.timeout = 0.0  # else a call that is older than its timeout tells it
    line = f"[Rank 0] {said} operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=9)"
    found.reports = list(log_reports.read(log_lines.read(line))) if said else []
    stall = foreign.evidence(found).stall
    assert stall is not None and stall.certain is certain
