"""The failures of the catalogue: verdict, culprits and cause; and runs without a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.end_states.failures import Failure
from moediag.evidence.model import (
    UNTOLD,
    BatchCount,
    Evidence,
    ExitStatus,
    Frame,
    RankError,
    RankEvidence,
    Stack,
    Stall,
)
from moediag.protocol import GradientError, Outcome
from moediag.result import Confidence, Verdict
from tests.unit.evidence_builder import (
    RESET,
    Job,
    Op,
    aborted_on_gloo,
    died,
    expert,
    expert_job,
    fsdp2_job,
    measured,
)

STARVED = {(1, 3)}


def ended_early(job: Job, rank: int, at: int) -> Evidence:
    job.programs[rank] = job.programs[rank][:at]
    return job.run()


# ------------------------------------------------------------------------ starved experts


@pytest.mark.parametrize("aborting", [0, 1])
@pytest.mark.parametrize("world", [2, 4])
def test_a_starved_expert_shortens_the_reduction(world: int, aborting: int) -> None:
    """The starved rank is the culprit, whichever rank gloo aborts."""
    job = fsdp2_job(*[STARVED if rank == 1 else set() for rank in range(world)])
    found = diagnose(aborted_on_gloo(job.run(), aborting))
    assert found.verdict == Verdict.COLLECTIVE_MISMATCH
    assert found.culprits == (1,)
    assert found.victims == tuple(r for r in range(world) if r != 1)
    assert found.confidence == Confidence.HIGH
    first = found.first_divergence
    assert first is not None
    assert (first.axis, first.phase, first.module) == ("dp_shard", "backward", "model.layers.1")
    assert first.index == 3  # three all-gathers, then the last layer's reduce-scatter
    assert (first.ranks["0"].numel, first.ranks["1"].numel) == (26 * 512, 23 * 512)
    assert first.ranks["1"].parameters_missing == expert(1, 3)
    assert first.ranks["0"].parameters_missing == ()
    told = "rank 0: 7" if world == 2 else "rank 0: 7, rank 2: 7, rank 3: 7"
    assert found.cause == (
        f"On rank 1 expert 3 of layer 1 received 0 tokens ({told}), so its parameters have no "
        "gradient there and FSDP2 leaves them out of the reduction: 3 of 26 parameters, 1,536 "
        "elements fewer. With gloo a rank aborts; on NCCL a hang is expected (not run here)."
    )
    assert found.signature == (
        "collective-mismatch:size reduce_scatter:dp_shard:backward:starved-expert:one-rank"
    )


def test_a_starved_expert_is_a_hang_on_nccl() -> None:
    job = fsdp2_job(set(), STARVED)
    job.backend = "nccl"
    found = diagnose(job.run())
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (1,), (0,))
    assert "gloo" not in found.cause


def test_swapped_experts_are_silent_and_both_ranks_are_culprits() -> None:
    wrong = (*expert(1, 3), *expert(1, 5))
    found = diagnose(measured(fsdp2_job({(1, 3)}, {(1, 5)}).run(), wrong))
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert found.culprits == (0, 1)
    assert found.first_divergence is not None
    missing = {r: s.parameters_missing for r, s in found.first_divergence.ranks.items()}
    assert missing == {"0": expert(1, 3), "1": expert(1, 5)}
    assert "expert 3 of layer 1 received 0 tokens (rank 1: 7)" in found.cause
    assert "expert 5 of layer 1 received 0 tokens (rank 0: 9)" in found.cause
    assert "summed into each other" in found.cause
    assert "6 of 55 parameters have wrong gradients" in found.cause
    assert found.wrong_parameters == wrong
    assert (found.gradient_error, found.parameters_compared) == (3e-3, 55)


def test_differing_schedules_with_right_gradients_are_clean_and_noted() -> None:
    found = diagnose(measured(fsdp2_job({(1, 3)}, {(1, 5)}).run()))
    assert (found.verdict, found.culprits) == (Verdict.CLEAN, ())
    assert found.first_divergence is None
    assert "schedules differ" in found.notes[0]


def test_with_one_token_per_rank_all_ranks_are_culprits() -> None:
    """Pure data skew: each rank hits another two experts, so the sizes agree."""
    both = [{(n, e) for n in (0, 1) for e in range(8) if e // 2 != rank} for rank in (0, 1)]
    found = diagnose(measured(fsdp2_job(*both).run(), expert(1, 0)))
    assert (found.verdict, found.culprits) == (Verdict.WRONG_GRADIENTS, (0, 1))
    assert found.first_divergence is not None
    # Experts 4 to 7 are starved on both ranks, so they do not differ.
    assert found.first_divergence.ranks["0"].parameters_missing == (*expert(1, 2), *expert(1, 3))


@pytest.mark.parametrize("starved", [set(), STARVED])
def test_an_expert_starved_on_no_rank_or_all_ranks_is_clean(starved: set[tuple[int, int]]) -> None:
    found = diagnose(measured(fsdp2_job(starved, starved).run()))
    assert (found.verdict, found.culprits, found.first_divergence) == (Verdict.CLEAN, (), None)
    assert found.confidence == Confidence.HIGH
    assert found.signature == "clean"


def test_a_late_divergence_names_its_step() -> None:
    job = fsdp2_job(set(), STARVED, steps=3, from_step=3)
    found = diagnose(aborted_on_gloo(job.run(), 0))
    assert found.first_divergence is not None
    assert found.first_divergence.index == 2 * 7 + 3
    assert found.cause.startswith("In step 3: on rank 1 expert 3")


def test_a_majority_with_a_starved_expert_is_the_culprit() -> None:
    found = diagnose(aborted_on_gloo(fsdp2_job(set(), STARVED, STARVED, STARVED).run(), 0))
    assert found.culprits == (1, 2, 3)
    assert found.confidence == Confidence.MEDIUM
    assert "Most ranks do the same" in found.cause


def test_skipping_an_expert_with_its_own_group_is_a_hang() -> None:
    """The ranks diverge silently and stop in different operations."""
    found = diagnose(expert_job(set(), {3}).run())
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (1,), (0,))
    assert found.first_divergence is not None
    assert found.first_divergence.index == 3
    assert found.first_divergence.ranks["1"].parameters_missing == expert(0, 3)
    assert "rank 1 skips that expert" in found.cause
    assert "stopped where rank 0 is in all_gather" in found.cause
    assert "rank 1 is in reduce_scatter" in found.cause


def test_swapped_expert_groups_are_silent_and_both_ranks_are_culprits() -> None:
    found = diagnose(measured(expert_job({3}, {5}).run(), expert(0, 3)))
    assert (found.verdict, found.culprits) == (Verdict.WRONG_GRADIENTS, (0, 1))
    assert "put together as one weight" in found.cause


def test_two_ranks_without_token_counts_have_no_culprit() -> None:
    """Two ranks, no parameters known: what both did in step 1 alone proves nothing."""

    def step(number: int, numel: int) -> list[Op]:
        return [Op("0", "all_reduce", n, step=number) for n in (8, numel, 32)]

    job = Job({"0": ((0, 1), "dp")}, [step(1, 16) + step(2, 16), step(1, 16) + step(2, 20)])
    found = diagnose(job.run())
    assert (found.culprits, found.victims, found.confidence) == ((), (), Confidence.MEDIUM)
    assert "The evidence does not show" in found.cause
    assert found.signature.endswith(":no-rank")


# ------------------------------------------------------------------------ calls never made


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        ("RuntimeError", "Cannot use ReduceOp.PREMUL_SUM with Gloo"),
        ("TypeError", "BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+"),
        ("ValueError", "ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
    ],
)
def test_an_operation_refused_by_the_library_is_a_crash(type_: str, message: str) -> None:
    """The message mentions a library, but no peer is involved."""
    refused = RankError(type_, message, "train.py:3 step")
    evidence = fsdp2_job(set(), set()).run()
    for rank in (0, 1):
        evidence = died(evidence, rank, refused)
    found = diagnose(evidence)
    assert (found.verdict, found.culprits) == (Verdict.CRASH, (0, 1))
    assert found.signature == f"crash:{type_}:train.py step:several-ranks"
    assert message in found.cause
    assert "lost the connection" not in found.cause


def test_a_killed_rank_is_a_crash_of_that_rank() -> None:
    evidence = ended_early(fsdp2_job(set(), set(), set()), 2, 4)
    found = diagnose(died(evidence, 2, signal="SIGKILL"))
    assert (found.verdict, found.culprits, found.victims) == (Verdict.CRASH, (2,), (0, 1))
    assert found.signature == "crash:SIGKILL:one-rank"
    assert "Ranks 0, 1 then waited in reduce_scatter" in found.cause


@pytest.mark.parametrize(
    ("deaths", "culprits", "words"),
    [
        # Noticed before the exception: it came first.
        ((2, 1), (2,), "Rank 2 died by SIGSEGV. Then rank 1 raised ValueError at feed.py:9 read"),
        # Noticed after it, because a launcher looks at times: which came first is not known.
        ((1, 2), (1, 2), "Rank 2 died by SIGSEGV. Not known which of them came first."),
        ((1,), (1, 2), "Not known which of them came first."),
    ],
)
def test_a_rank_that_died_by_itself_is_never_a_victim(
    deaths: tuple[int, ...], culprits: tuple[int, ...], words: str
) -> None:
    """Rank 1 raises an error of its own because rank 2 is gone."""
    error = RankError("ValueError", "the feeder closed its socket", "feed.py:9 read", time=7.0)
    evidence = died(fsdp2_job(set(), set(), set()).run(), 1, error)
    evidence = replace(died(evidence, 2, signal="SIGSEGV"), deaths=deaths)
    found = diagnose(evidence)
    assert (found.verdict, found.culprits, found.victims) == (Verdict.CRASH, culprits, (0,))
    assert words in found.cause


@pytest.mark.parametrize(
    ("noticed", "culprits"),
    [({1: 7.0, 2: 37.0}, (1,)), ({1: 7.0, 2: 8.0}, (1,)), ({}, (1,)), ({1: 7.0, 2: 7.1}, (1, 2))],
)
def test_a_launcher_that_ends_the_others_adds_no_culprit(
    noticed: dict[int, float], culprits: tuple[int, ...]
) -> None:
    """A SIGKILL at the same moment came from elsewhere: Open MPI waits a second before it, torchrun
    half a minute."""
    error = RankError("ValueError", "bad batch", "feed.py:9 read", time=7.0)
    evidence = died(fsdp2_job(set(), set(), set()).run(), 1, error)
    evidence = replace(died(evidence, 2, signal="SIGKILL"), deaths=(1, 2), noticed=noticed)
    found = diagnose(evidence)
    assert found.culprits == culprits
    assert found.victims == tuple(rank for rank in (0, 2) if rank not in culprits)
    assert ("Not known which of them came first." in found.cause) == (len(culprits) > 1)


def test_one_rank_without_a_trace_is_named() -> None:
    evidence = ended_early(fsdp2_job(set(), set(), set()), 2, 4)
    found = diagnose(died(evidence, 2, signal=UNTOLD))
    assert (found.verdict, found.culprits, found.victims) == (Verdict.CRASH, (2,), (0, 1))


def test_of_several_ranks_without_a_trace_nobody_is_named() -> None:
    evidence = replace(ended_early(fsdp2_job(set(), set(), set()), 2, 4), watched=True)
    for rank in range(3):
        evidence = died(evidence, rank, signal=UNTOLD)
    found = diagnose(evidence)
    assert (found.verdict, found.culprits, found.victims) == (Verdict.CRASH, (), ())
    assert "Not known which ended first" in found.cause
    assert "the last output of every rank" in found.next_step


def test_an_exception_decides_among_ranks_without_a_trace() -> None:
    evidence = fsdp2_job(set(), set(), set()).run()
    for rank in (0, 2):
        evidence = died(evidence, rank, signal=UNTOLD)
    error = RankError("IndexError", "index 9 is out of bounds", "model.py:40 load", time=2.0)
    found = diagnose(died(evidence, 1, error))
    assert (found.verdict, found.culprits) == (Verdict.CRASH, (1,))


@pytest.mark.parametrize("stalled", [False, True])
def test_an_exception_explains_the_stall_that_follows(stalled: bool) -> None:
    evidence = ended_early(fsdp2_job(set(), set()), 1, 4)
    error = RankError("IndexError", "index 9 is out of bounds", "model.py:40 load", time=2.0)
    broken = died(evidence, 1, error)
    if stalled:
        broken = replace(broken, stall=Stall(1.0, 3.0, (0,), (1,)))
    found = diagnose(broken)
    assert (found.verdict, found.culprits, found.victims) == (Verdict.CRASH, (1,), (0,))
    assert found.signature == "crash:IndexError:model.py load:one-rank"
    assert "IndexError at model.py:40 load: index 9 is out of bounds" in found.cause


@pytest.mark.parametrize(("code", "crashed"), [(0, False), (1, True)])
def test_a_process_that_ends_with_exit_code_0_handled_its_exception(
    code: int, crashed: bool
) -> None:
    """pytest leaves an expected failure in ``sys.last_value``, where the recorder finds it."""
    evidence = Job({"a": ((0, 1), None)}, [[Op("a")], [Op("a")]]).run()
    error = RankError("AssertionError", "assert 0", "test_it.py:5 test_it")
    ranks = {
        rank: replace(seen, error=error, finished=False, exit=ExitStatus(code=code))
        for rank, seen in evidence.ranks.items()
    }
    found = diagnose(replace(evidence, ranks=ranks, watched=True))
    assert (found.verdict == Verdict.CRASH) == crashed
    assert crashed or found.verdict == Verdict.CLEAN


def test_the_same_exception_everywhere_has_no_victims() -> None:
    error = RankError("ValueError", "shape", "step.py:3 loss")
    ranks = {
        r: RankEvidence(r, exit=ExitStatus(code=1), error=error, versions={"torch": "2"})
        for r in (0, 1)
    }
    found = diagnose(Evidence(2, ranks))
    assert (found.verdict, found.culprits, found.victims) == (Verdict.CRASH, (0, 1), ())
    assert found.cause == "Ranks 0, 1 raised ValueError at step.py:3 loss: shape."
    ranks[1] = replace(ranks[1], error=replace(error, message="shape of 1"))
    assert "loss: shape (the message of rank 0)." in diagnose(Evidence(2, ranks)).cause


def test_cleanup_calls_after_an_exception_are_not_a_divergence() -> None:
    """A rank that raises and then meets the others in a barrier of its `finally`."""
    job = fsdp2_job(set(), set())
    job.programs[1] = [*job.programs[1][:4], Op("0", "barrier", 0, "")]
    evidence = job.run()
    raised = evidence.ranks[1].collectives[-1].time - 0.5
    error = RankError("KeyError", "'router'", "step.py:9 forward", time=raised)
    found = diagnose(died(evidence, 1, error))
    assert (found.verdict, found.culprits) == (Verdict.CRASH, (1,))
    assert found.first_divergence is not None
    assert found.first_divergence.ranks["1"].op == "none"


def test_a_rank_that_finishes_too_early_is_the_culprit() -> None:
    found = diagnose(ended_early(fsdp2_job(set(), set(), set()), 1, 5))
    assert (found.verdict, found.culprits) == (Verdict.HANG, (1,))
    assert "rank 1 reached the end without that call" in found.cause


@pytest.mark.parametrize(("code", "by_us", "ended"), [(0, False, True), (0, True, False)])
def test_exit_code_tells_whether_a_rank_without_a_last_event_finished(
    code: int, by_us: bool, ended: bool
) -> None:
    evidence = ended_early(fsdp2_job(set(), set(), set()), 1, 5)
    unsigned = replace(evidence.ranks[1], finished=False, exit=ExitStatus(code=code, by_us=by_us))
    found = diagnose(replace(evidence, ranks={**evidence.ranks, 1: unsigned}))
    assert (found.verdict, found.culprits) == (Verdict.HANG, (1,) if ended else ())


def test_a_rank_with_an_extra_call_is_the_culprit() -> None:
    job = fsdp2_job(set(), set(), set())
    job.programs[0] = [*job.programs[0], Op("0", "broadcast", 4, peer=0)]
    found = diagnose(job.run())
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (0,), (1, 2))


def test_a_rank_stuck_elsewhere_is_the_culprit() -> None:
    evidence = ended_early(fsdp2_job(set(), set()), 1, 4)
    ranks = dict(evidence.ranks)
    ranks[1] = replace(ranks[1], finished=False, exit=ExitStatus(signal="SIGKILL", by_us=True))
    found = diagnose(replace(evidence, ranks=ranks, stall=Stall(1.0, 3.0, (0,), (1,))))
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (1,), (0,))


def test_a_stall_with_equal_schedules_has_no_culprit() -> None:
    evidence = fsdp2_job(set(), set()).run()
    ranks = {
        r: replace(
            seen,
            collectives=tuple(replace(c, completed=False) for c in seen.collectives),
            finished=False,
            exit=ExitStatus(signal="SIGKILL", by_us=True),
        )
        for r, seen in evidence.ranks.items()
    }
    found = diagnose(replace(evidence, ranks=ranks, stall=Stall(1.0, 3.0, (0, 1))))
    assert (found.verdict, found.culprits) == (Verdict.HANG, ())
    assert "not known which rank" in found.cause
    # The rank with the missing log may be the culprit.
    ranks[1] = RankEvidence(1, exit=ranks[1].exit)
    found = diagnose(replace(evidence, ranks=ranks, stall=Stall(1.0, 3.0, (0, 1))))
    assert (found.verdict, found.confidence) == (Verdict.HANG, Confidence.LOW)
    assert "No schedule of rank 1 was recorded" in found.cause
    assert "no rank is at fault" not in found.cause


def test_ranks_stopped_by_the_timeout_do_not_diverge() -> None:
    """The launcher's timeout stops them at different calls, which is not a divergence."""
    evidence = ended_early(fsdp2_job(set(), set()), 1, 4)
    ranks = {
        r: replace(seen, finished=False, exit=ExitStatus(signal="SIGTERM", by_us=True))
        for r, seen in evidence.ranks.items()
    }
    found = diagnose(replace(evidence, ranks=ranks, stall=None, timed_out=True))
    assert (found.verdict, found.culprits) == (Verdict.INCONCLUSIVE, ())
    assert found.first_divergence is None


def test_a_circular_wait_is_a_hang() -> None:
    a, b = Op("a"), Op("b")
    groups = {"a": ((0, 1, 2), "dp"), "b": ((0, 1, 2), "ep")}
    found = diagnose(Job(groups, [[a, b], [b, a], [a, b]]).run())
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (1,), (0, 2))
    assert "in a circle" in found.cause and "on ep" in found.cause


# ------------------------------------------------------------------------ groups


def test_groups_with_the_same_name_are_distinguished_by_their_ranks() -> None:
    """Two halves of a split communicator do different things: that is healthy."""
    first = [Op("half", "all_reduce", 8)] * 2
    second = [Op("half", "all_gather", 16)]
    job = Job({"half": ((0, 1), "tp")}, [first, first, second, second])
    evidence = job.whole()
    ranks = dict(evidence.ranks)
    for rank in (2, 3):
        other = replace(evidence.ranks[0].groups["half"], ranks=(2, 3))
        ranks[rank] = replace(ranks[rank], groups={"half": other})
    found = diagnose(measured(replace(evidence, ranks=ranks)))
    assert (found.verdict, found.first_divergence, found.notes) == (Verdict.CLEAN, None, ())


def pipeline(*programs: list[Op]) -> Job:
    return Job({"pp": (tuple(range(len(programs))), "pp")}, list(programs))


def test_point_to_point_calls_are_paired_by_peer() -> None:
    """Three stages issue different numbers of calls; the all-reduces between them still align."""
    reduce = Op("pp", "all_reduce", 4)

    def send(to: int) -> Op:
        return Op("pp", "send", 8, peer=to)

    def receive(source: int) -> Op:
        return Op("pp", "recv", 8, peer=source)

    job = pipeline(
        [send(1), send(1), reduce],
        [receive(0), send(2), receive(0), send(2), reduce],
        [receive(1), receive(1), reduce],
    )
    found = diagnose(measured(job.whole()))
    assert (found.verdict, found.first_divergence, found.notes) == (Verdict.CLEAN, None, ())
    job.programs[2][1] = replace(receive(1), numel=6)
    found = diagnose(measured(job.whole()))
    assert "Sizes differ" in found.notes[0]
    job.programs[2][1] = receive(1)
    job.programs[1][4] = replace(reduce, op="all_gather")
    assert "Different operations meet" in diagnose(measured(job.whole())).notes[0]


@pytest.mark.parametrize(
    ("room", "backend", "differ"),
    [((9, 9), "gloo", False), ((9, 8), "gloo", True), ((7, 7), "gloo", True),
     ((9, 9), "nccl", True)],
)  # fmt: skip
def test_gloo_fills_the_beginning_of_a_larger_buffer(
    room: tuple[int, int], backend: str, differ: bool
) -> None:
    """A program may always give it one; once, in a line whose sizes agree, it is a mismatch."""
    receives = [Op("pp", "recv", size, peer=0) for size in room]
    evidence = pipeline([Op("pp", "send", 8, peer=1)] * 2, receives).whole()
    ranks = {
        rank: replace(seen, collectives=tuple(replace(c, completed=True) for c in seen.collectives))
        for rank, seen in evidence.ranks.items()
    }
    found = diagnose(measured(replace(evidence, backend=backend, ranks=ranks)))
    assert ("Sizes differ" in " ".join(found.notes)) == differ


def test_a_receive_without_a_send_is_a_hang() -> None:
    """Rank 0 left out the send, or rank 1 receives once too often."""
    evidence = pipeline([], [Op("pp", "recv", 8, peer=0)]).whole()
    ranks = dict(evidence.ranks)
    ranks[1] = replace(ranks[1], finished=False, exit=ExitStatus(signal="SIGKILL", by_us=True))
    found = diagnose(replace(evidence, ranks=ranks, stall=Stall(1.0, 3.0, (1,))))
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (), ())


@pytest.mark.parametrize("receives", [2, 3])
def test_stages_that_count_micro_batches_differently(receives: int) -> None:
    """Rank 0 sends a third one, rank 1 the gradient of the second one; neither ends."""
    send, receive = Op("pp", "send", 8, peer=1), Op("pp", "recv", 8, peer=0)
    gradient, back = Op("pp", "send", 8, peer=0), Op("pp", "recv", 8, peer=1)
    job = pipeline([send, send, back, send], [receive] * receives + [gradient])
    evidence = job.whole()
    ranks = {
        rank: replace(
            seen,
            collectives=(
                *seen.collectives[:-1], replace(seen.collectives[-1], completed=False)
            ),
            finished=False,
            exit=ExitStatus(signal="SIGKILL", by_us=True),
        )
        for rank, seen in evidence.ranks.items()
    }  # fmt: skip
    found = diagnose(replace(evidence, ranks=ranks, stall=Stall(1.0, 3.0, (0, 1))))
    assert (found.verdict, found.culprits) == (Verdict.HANG, ())
    counts = "Rank 0 issued 3 sends to rank 1, which issued 2 receives from it"
    assert (counts in found.cause) == (receives == 2)
    assert ("recorded schedules agree" in found.cause) == (receives == 3)


# ------------------------------------------------------------------------ errors and exits only


def test_the_librarys_error_is_used_without_a_schedule() -> None:
    ranks = {r: RankEvidence(r, exit=ExitStatus(code=1), error=RESET) for r in (0, 1)}
    words = RankError("gloo::EnforceNotMet", "Is there a distributed collective mismatch?")
    told = {**ranks, 1: replace(ranks[1], error=words)}
    found = diagnose(Evidence(2, told))
    assert (found.verdict, found.culprits) == (Verdict.COLLECTIVE_MISMATCH, ())
    assert found.confidence == Confidence.LOW
    found = diagnose(Evidence(2, ranks))
    assert (found.verdict, found.culprits) == (Verdict.CRASH, ())
    assert found.confidence == Confidence.LOW


def test_an_exception_after_a_silent_divergence_is_a_crash() -> None:
    evidence = fsdp2_job({(1, 3)}, {(1, 5)}).run()
    found = diagnose(died(evidence, 0, RankError("AssertionError", "uniform gradient dtype")))
    assert (found.verdict, found.culprits) == (Verdict.CRASH, (0,))


def test_an_abort_after_a_silent_divergence_is_a_mismatch() -> None:
    evidence = fsdp2_job({(1, 3)}, {(1, 5)}).run()
    found = diagnose(aborted_on_gloo(evidence, 1))
    assert (found.verdict, found.culprits) == (Verdict.COLLECTIVE_MISMATCH, (0, 1))
    assert "out of step" in found.cause


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, Verdict.COLLECTIVE_MISMATCH),
        # own words, another backend, or outside any collective: the program's own abort
        ({"last_lines": ("assertion failed",)}, Verdict.CRASH),
        ({"backend": "nccl"}, Verdict.CRASH),
        ({"completed": True}, Verdict.CRASH),
    ],
)
def test_an_abort_without_words_after_a_silent_divergence(
    changed: dict[str, object], verdict: Verdict
) -> None:
    evidence = aborted_on_gloo(fsdp2_job({(1, 3)}, {(1, 5)}).run(), 1)
    last = replace(evidence.ranks[1].collectives[-1], completed="completed" in changed)
    aborted = replace(
        evidence.ranks[1],
        error=None,
        collectives=(*evidence.ranks[1].collectives[:-1], last),
        last_lines=changed.get("last_lines", ()),
    )
    backend = str(changed.get("backend", "gloo"))
    found = diagnose(replace(evidence, ranks={**evidence.ranks, 1: aborted}, backend=backend))
    assert found.verdict == verdict


def empty(world: int = 2, **fields: object) -> Evidence:
    return replace(Evidence(world, {r: RankEvidence(r) for r in range(world)}), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        (empty(launch_error="no such interpreter"), "no such interpreter"),
        (empty(timed_out=True), "time limit"),
        (empty(interrupted=True), "interrupted"),
        (empty(), "no measurements"),
        (empty(stall=Stall(1.0, 3.0, (), (0, 1))), "did not wait in a collective"),
        (measured(fsdp2_job(set(), set()).run(), compared=()), "no gradient was compared"),
    ],
)
def test_insufficient_evidence_is_inconclusive(evidence: Evidence, said: str) -> None:
    found = diagnose(evidence)
    assert (found.verdict, found.culprits) == (Verdict.INCONCLUSIVE, ())
    assert found.confidence == Confidence.LOW
    assert said in found.cause


def test_an_unsupported_stack_is_not_applicable() -> None:
    outcome = Outcome(0, applicable="transformers 4.50.0 has no Glm4vMoe", notes=["a shim"])
    evidence = Evidence(2, {0: RankEvidence(0, outcome=outcome), 1: RankEvidence(1)})
    found = diagnose(evidence)
    assert found.verdict == Verdict.NOT_APPLICABLE
    assert found.cause == "transformers 4.50.0 has no Glm4vMoe"
    assert found.notes == ("a shim",)


@pytest.mark.parametrize("value", ["nan", "inf", float("nan")])
def test_nonfinite_gradients_are_found(value: object) -> None:
    evidence = measured(fsdp2_job(set(), set()).run())
    outcome = evidence.ranks[1].outcome
    assert outcome is not None
    bad = GradientError(value, 1.0, wrong=True)  # type: ignore[arg-type]
    gradients = {"1": {**outcome.gradients["1"], "lm_head.weight": bad}}
    ranks = {
        **evidence.ranks,
        1: replace(evidence.ranks[1], outcome=replace(outcome, gradients=gradients)),
    }
    found = diagnose(replace(evidence, ranks=ranks))
    assert (found.verdict, found.culprits) == (Verdict.NONFINITE, (1,))
    assert "lm_head.weight" in found.cause
    assert found.worst_parameter == "lm_head.weight"


def test_wrong_gradients_without_a_divergence_have_no_culprit() -> None:
    found = diagnose(measured(fsdp2_job(set(), set()).run(), ["lm_head.weight"]))
    assert (found.verdict, found.culprits) == (Verdict.WRONG_GRADIENTS, ())
    assert "no rank is at fault" in found.cause
    assert found.signature == "wrong-gradients:no divergence seen:no-rank"


def test_wrong_gradients_with_a_missing_log_leave_the_culprit_unknown() -> None:
    evidence = measured(fsdp2_job(set(), set()).run(), ["lm_head.weight"])
    lost = RankEvidence(1, exit=evidence.ranks[1].exit, outcome=evidence.ranks[1].outcome)
    found = diagnose(replace(evidence, ranks={**evidence.ranks, 1: lost}))
    assert (found.verdict, found.culprits) == (Verdict.WRONG_GRADIENTS, ())
    assert found.confidence == Confidence.MEDIUM
    assert "not known" in found.cause and "no rank is at fault" not in found.cause


def test_only_the_first_wrong_step_is_listed() -> None:
    """Later steps start from wrong weights."""
    evidence = measured(fsdp2_job(set(), set()).run())
    ranks = {}
    for rank, seen in evidence.ranks.items():
        assert seen.outcome is not None
        right = seen.outcome.gradients["1"]
        one = {**right, "lm_head.weight": GradientError(1e-3, 1.0, wrong=True)}
        more = {**one, "model.norm.weight": GradientError(5e-3, 1.0, wrong=True)}
        outcome = replace(seen.outcome, gradients={"1": right, "2": one, "3": more})
        ranks[rank] = replace(seen, outcome=outcome)
    found = diagnose(replace(evidence, ranks=ranks))
    assert found.wrong_parameters == ("lm_head.weight",)
    assert (found.gradient_error, found.worst_parameter) == (1e-3, "lm_head.weight")
    assert "in step 2" in found.cause.lower()


def test_the_worst_parameter_has_a_wrong_gradient() -> None:
    """Rounding to bf16 changes a larger gradient by more, within the tolerance."""
    evidence = measured(fsdp2_job(set(), set()).run())
    ranks = {}
    for rank, seen in evidence.ranks.items():
        assert seen.outcome is not None
        rounded = GradientError(5e-2, 9.0, wrong=False)
        wrong = GradientError(1e-3, 1e-3, wrong=True)
        found = {"lm_head.weight": rounded, "model.norm.weight": wrong}
        ranks[rank] = replace(seen, outcome=replace(seen.outcome, gradients={"1": found}))
    told = diagnose(replace(evidence, ranks=ranks))
    assert (told.gradient_error, told.worst_parameter) == (1e-3, "model.norm.weight")


@pytest.mark.parametrize(("ranks_lose", "said"), [((2.0, 4.0), True), ((2.0, 4.1), False)])
def test_cause_mentions_a_correct_loss(ranks_lose: tuple[float, float], said: bool) -> None:
    evidence = measured(fsdp2_job(set(), set()).run())
    ranks = {}
    for rank, seen in evidence.ranks.items():
        assert seen.outcome is not None
        wrong = {"lm_head.weight": GradientError(1e-3, 1.0, wrong=True)}
        outcome = replace(
            seen.outcome,
            gradients={"1": wrong},
            losses=[ranks_lose[rank]],
            reference_losses=[3.0],
        )
        ranks[rank] = replace(seen, outcome=outcome)
    found = diagnose(replace(evidence, ranks=ranks))
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert ("loss of that step is correct" in found.cause) is said


# ------------------------------------------------------------------------ what is shown


def test_both_stacks_of_a_hang_are_shown_without_helper_threads() -> None:
    own = Frame("/x/moediag/recorder/collectives.py", 1, "wait")
    blocked = (own, Frame("/x/torch/distributed/c10d.py", 9, "wait"))
    main = Stack("MainThread", "py-spy", blocked)
    helper = Stack("recorder", "py-spy", (Frame("/x/threading.py", 1, "_bootstrap"),))
    other = Stack("1", "pystack", (Frame("a.c", 1, "poll", native=True),))
    evidence = expert_job(set(), {3}).run()
    ranks = {r: replace(s, stacks=(helper, main, other)) for r, s in evidence.ranks.items()}
    found = diagnose(replace(evidence, ranks=ranks))
    assert found.stacks == {0: ("wait (c10d.py:9)",), 1: ("wait (c10d.py:9)",)}


def test_missing_evidence_is_listed_once() -> None:
    evidence = measured(fsdp2_job(set(), set()).run())
    ranks = {r: replace(s, not_seen=("dtype of barriers",)) for r, s in evidence.ranks.items()}
    ranks[0] = replace(ranks[0], not_seen=("dtype of barriers", "tokens per expert"))
    found = diagnose(replace(evidence, ranks=ranks, not_seen=("native frames (py-spy missing)",)))
    assert found.not_seen == (
        "native frames (py-spy missing)",
        "dtype of barriers",
        "rank 0: tokens per expert",
    )


def test_reordered_asynchronous_calls_are_not_a_divergence() -> None:
    """Asynchronous calls may be issued in another order; blocking calls may not."""
    a, b = Op("a", asynchronous=True), Op("b", asynchronous=True)
    groups = {"a": ((0, 1), "dp"), "b": ((0, 1), "ep")}
    assert diagnose(measured(Job(groups, [[a, b], [b, a]]).whole())).notes == ()
    a, b = Op("a"), Op("b")
    assert diagnose(measured(Job(groups, [[a, b], [b, a]]).whole())).notes != ()


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("one line", "one line"),
        ("first,\n  and second", "first, and second"),
        ("A sentence of some length. " * 30, ("A sentence of some length. " * 17).rstrip()),
        ("x" * 500, "x" * 480 + "…"),
        ("", ""),
    ],
)
def test_a_long_message_is_truncated_at_a_sentence(message: str, shown: str) -> None:
    assert Failure(0, "RuntimeError", message).summary == shown


# ------------------------------------------------------------------------ stopped by the guard


def stopped(job: Job, text: str) -> Evidence:
    """All ranks raised the guard's error in their last operation."""
    ran = job.run()
    error = RankError("ReductionMismatch", text, "train.py:7 main", time=99.0)
    ranks = {
        rank: replace(seen, error=error, exit=ExitStatus(code=1))
        for rank, seen in ran.ranks.items()
    }
    return replace(ran, ranks=ranks, stall=None)


def test_an_error_of_the_guard_is_a_crash_with_its_divergence() -> None:
    text = "ranks reached the reduce_scatter of model.layers.1 with different parameters"
    found = diagnose(stopped(fsdp2_job(STARVED, set(), set()), text))
    assert found.verdict == Verdict.CRASH
    assert (found.culprits, found.victims) == ((0,), (1, 2))
    assert found.first_divergence is not None
    assert "expert 3 of layer 1 received 0 tokens" in found.cause
    assert "The guard stopped ranks 0..2 before that reduction (ReductionMismatch)." in found.cause
    assert "gloo aborts" not in found.cause


def test_an_error_of_the_guard_with_equal_schedules_has_no_culprit() -> None:
    """For example a different gradient dtype, which schedules do not show."""
    found = diagnose(stopped(fsdp2_job(set(), set()), "gloo.weight has 8 elements of bfloat16."))
    assert found.verdict == Verdict.CRASH
    assert (found.culprits, found.first_divergence) == ((), None)
    assert "The guard stopped ranks 0, 1: gloo.weight has 8" in found.cause


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (("/job/wrap.py", "/job/train.py"), ", called at train.py:2 f: boom"),
        (("/job/train.py", "/job/train.py"), "raised ValueError at train.py:1 f: boom"),
        ((), "raised ValueError at wrap.py:1 f: boom"),
    ],
)
def test_an_exception_in_another_file_is_told_with_the_line_that_called_it(
    files: tuple[str, ...], told: str
) -> None:
    frames = tuple(Frame(file, number, "f") for number, file in enumerate(files, 1))
    where = frames[0].place if frames else "wrap.py:1 f"
    failed = RankEvidence(
        1, error=RankError("ValueError", "boom", where, 1.0, frames), exit=ExitStatus(1)
    )
    found = diagnose(Evidence(2, {0: RankEvidence(0), 1: failed}, watched=True))
    assert told in found.cause


@pytest.mark.parametrize(("root", "size", "told"), [(1, 8, True), (0, 9, False), (None, 8, False)])
def test_roots_that_differ_are_told(root: int | None, size: int, told: bool) -> None:
    usual, other = Op("0", "broadcast", 8, peer=0), Op("0", "broadcast", size, peer=root)
    job = Job({"0": ((0, 1, 2), None)}, [[usual], [usual], [other]])
    found = diagnose(aborted_on_gloo(job.run(), 0))
    assert ("The root is rank 0 on ranks 0, 1, rank 1 on rank 2." in found.cause) is told


@pytest.mark.parametrize(
    ("message", "batches", "told"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Killed.", ("train.py:3 main",),
         "a worker of rank 1's data loader at train.py:3:"),
        ("DataLoader worker (pid 7) is killed by signal: Killed.", (),
         "a worker of rank 1's data loader:"),
        ("DataLoader worker exited", ("train.py:3 main",), "Fix the RuntimeError of rank 1"),
    ],
)  # fmt: skip
def test_a_worker_that_was_killed_is_told_with_its_loader(
    message: str, batches: tuple[str, ...], told: str
) -> None:
    """torch raises that where the main thread happens to be."""
    failed = RankEvidence(
        1,
        error=RankError("RuntimeError", message, "model.py:66 forward", 1.0),
        exit=ExitStatus(1),
        batches=tuple(BatchCount(line, 4, False) for line in batches),
    )
    found = diagnose(Evidence(2, {0: RankEvidence(0), 1: failed}, watched=True))
    assert told in found.next_step


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection reset by peer"


@pytest.mark.parametrize(
    ("after", "culprits"),
    [
        (f"{GLOO} at train.py:3 step", ()),
        ("OSError: no space at train.py:3 step", (0,)),
        ("", (0,)),
    ],
)
def test_an_error_that_a_program_raises_because_a_call_failed(
    after: str, culprits: tuple[int, ...]
) -> None:
    """`raise TrainingError("step 3 failed") from error`"""
    evidence = fsdp2_job(set(), set(), set()).run()
    calls = evidence.ranks[0].collectives
    failed = (*calls[:-1], replace(calls[-1], failed=GLOO, completed=False))
    error = RankError("TrainingError", "step 3 failed", "train.py:9 main", 5.0, after=after)
    evidence = died(evidence, 0, error)
    ranks = {**evidence.ranks, 0: replace(evidence.ranks[0], collectives=failed)}
    found = diagnose(replace(evidence, ranks=ranks))
    assert (found.verdict, found.culprits) == (Verdict.CRASH, culprits)


def test_a_pair_that_gloo_closed_after_a_timeout_is_no_error_of_the_program() -> None:
    error = RankError("RuntimeError", "Application timeout caused pair closure", "t.py:4 f", 5.0)
    found = diagnose(died(fsdp2_job(set(), set(), set()).run(), 2, error))
    assert (found.verdict, found.culprits) == (Verdict.CRASH, ())
