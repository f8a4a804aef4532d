"""Counting right answers, and reading the answers of torch's own tools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import jobs
from bench.accuracy import others, page, simulated
from bench.accuracy.counting import Answer, Outcome, Truth, outcome, tally
from bench.accuracy.simulated import LAYOUTS, Case

HANG = Truth("skips", ("hang",), (1,), ("jobs.py:59",), "all_reduce")
CLEAN = Truth("slow", ("clean",))
RIGHT = Answer(True, (1,), "rank 0 waits in all_reduce at jobs.py:59 skips.", verdict="hang")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (RIGHT, Outcome.RIGHT),
        (replace(RIGHT, culprits=(2,)), Outcome.OTHERS),
        (replace(RIGHT, culprits=(0, 1)), Outcome.OTHERS),
        (replace(RIGHT, culprits=()), Outcome.NOBODY),
        (replace(RIGHT, verdict="crash"), Outcome.CLASS),
        (replace(RIGHT, text="all_reduce at jobs.py:590 skips"), Outcome.LINE),
        (replace(RIGHT, text="barrier at jobs.py:59"), Outcome.WORDS),
        (replace(RIGHT, alarm=False, verdict="clean"), Outcome.MISSED),
        (replace(RIGHT, alarm=False, verdict="inconclusive"), Outcome.UNDECIDED),
        (replace(RIGHT, refused="KeyError"), Outcome.REFUSED),
    ],
)
def test_an_answer_needs_the_correct_class_culprit_and_line(answer: Answer, kind: Outcome) -> None:
    assert outcome(HANG, answer) is kind


def test_any_failure_reported_for_a_healthy_job_is_a_false_alarm() -> None:
    assert outcome(CLEAN, Answer(True, (), "", verdict="hang")) is Outcome.FALSE_ALARM
    assert outcome(CLEAN, Answer(True, (1,), "")) is Outcome.FALSE_ALARM
    for quiet in ("clean", "inconclusive"):
        assert outcome(CLEAN, Answer(False, verdict=quiet)) is Outcome.QUIET


def test_naming_a_rank_is_wrong_if_none_can_be_known() -> None:
    circle = Truth("receives", ("hang",), ())
    assert outcome(circle, Answer(True, (0,), "", verdict="hang")) is Outcome.OTHERS
    assert outcome(circle, Answer(True, (), "", verdict="hang")) is Outcome.RIGHT


def test_other_tools_must_name_only_rank_and_line() -> None:
    assert outcome(HANG, Answer(True, (1,), "at jobs.py:59")) is Outcome.RIGHT
    assert outcome(HANG, Answer(True, (1,), "at jobs.py:60")) is Outcome.LINE
    assert outcome(HANG, Answer(True, (1,), "", has_lines=False)) is Outcome.RIGHT


def test_the_tally_separates_failing_and_healthy_cases() -> None:
    wrong = replace(RIGHT, culprits=(2,))
    alarm, quiet = Answer(True, verdict="hang"), Answer(False, verdict="clean")
    cases = [(HANG, RIGHT), (HANG, wrong), (CLEAN, alarm), (CLEAN, quiet), (CLEAN, quiet)]
    found = tally((truth, outcome(truth, answer)) for truth, answer in cases)
    assert (found.right, found.failing, found.alarms, found.healthy) == (1, 2, 1, 3)
    assert found.ranks == 1
    assert tally([(HANG, Outcome.LINE)]).ranks == 1
    assert found.kinds[Outcome.OTHERS] == 1


def test_an_unreadable_case_counts_against_the_tool() -> None:
    cannot = Answer(False, refused="KeyError")
    found = tally((truth, outcome(truth, cannot)) for truth in (HANG, CLEAN))
    assert (found.right, found.failing, found.alarms, found.healthy) == (0, 1, 0, 0)


def test_the_report_lists_wrong_answers() -> None:
    wrong = page.Judged(HANG, {page.MOEDIAG: replace(RIGHT, culprits=(2,))}, "skip")
    right = page.Judged(CLEAN, {page.MOEDIAG: Answer(False, verdict="clean")}, "none")
    assert page.summary({"victims": [wrong, right]})[1] == (
        "victims", "moediag", "0 of 1", "0 of 1", "1 of 1", "0 of 1",
    )  # fmt: skip
    text = page.victims_section([wrong, right], "head")
    assert "- skips: other ranks named: hang, rank 2" in text


def test_simulated_cases_are_counted_by_dimension_and_by_layouts() -> None:
    two = Truth("two", ("hang",), (1, 2))
    theirs = Answer(True, (1,), among=((1,), (2,), (5,)))

    def judged(culprits: tuple[int, ...], seen: bool) -> page.Judged:
        ours = Answer(True, culprits, verdict="hang")
        answers = {page.MOEDIAG: ours, page.FRTRACE: theirs}
        return page.Judged(two, answers, "stuck", "two culprits", seen)

    cases = [judged((1, 2), True), judged((1,), False), judged((1, 3), False)]
    head, row = page.by_dimension(cases)
    assert dict(zip(head, row, strict=True)) == {
        "dimension": "two culprits",
        "cases": "3",
        "moediag, layouts used in tuning": "1 right",
        "moediag, other layouts": "1 only some culprits named, 1 other ranks named",
        "torchfrtrace: every culprit found": "3 of 3",
        "and nobody else": "0 of 3",
        "its false alarms": "",
    }
    assert page.by_fault(cases, ["two culprits"])[1][0] == "stuck"
    text = page.simulated_section(cases, "head", range(2000, 2001), ["two culprits"])
    assert "2000" in text and "- two" not in text  # which cases failed is not told


# ------------------------------------------------------------------------ torchfrtrace

FINDINGS = """\
Not all ranks joining collective, sequence number: 7
internal record id: 6
group info: 0:default_pg
collective: gloo:all_reduce
missing ranks: {1, 2}
input sizes: [[4]]
world size: 3
expected ranks: {0, 1, 2}
collective state: scheduled
collective stack trace: \n all_reduce at /lib/torch/distributed_c10d.py:4000
train at /job/train.py:42
Collective sequence number: 8 has errors
group info: 0:default_pg
collective: gloo:barrier
error msg: Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH, Expected collective type: 'barrier'
collective stack trace: \n barrier at /job/train.py:50
"""


def test_the_first_torchfrtrace_finding_is_its_answer() -> None:
    found = others.torchfrtrace(FINDINGS)
    assert (found.alarm, found.culprits, found.among) == (True, (1, 2), ((1, 2), (1,)))
    assert "train.py:42" in found.text and "train.py:50" not in found.text
    truth = Truth("", ("hang",), (1,))
    case = page.Judged(truth, {page.FRTRACE: found})
    assert case.outcome(page.FRTRACE) is Outcome.OTHERS and page.named_among(case)


def test_torchfrtrace_output_without_a_finding_has_no_answer() -> None:
    nothing = others.torchfrtrace("No errors found for this collective entry\n")
    assert (nothing.alarm, nothing.refused) == (False, "")
    assert others.torchfrtrace("", "KeyError: ('0', 1)").refused == "KeyError: ('0', 1)"
    sums = others.torchfrtrace("Input/output mismatch in the collective sequence number: 4\n")
    assert sums.alarm and sums.culprits == ()


# ------------------------------------------------------------------------ DETAIL

MISMATCH = (
    '  File "/x/jobs.py", line 59, in skips\nRuntimeError: Detected mismatch between collectives '
    "on ranks. Rank {0} is running collective: CollectiveFingerPrint(SequenceNumber=7, "
    "OpType=ALLREDUCE), but Rank {1} is running collective: CollectiveFingerPrint(...)"
)
ROOT = "Root Cause (first observed failure):\n[0]:\n  rank : {} (local_rank: 1)\n  exitcode : {} ("


def test_detail_names_the_rank_in_most_errors() -> None:
    pairs = {0: (0, 1), 1: (1, 0), 2: (2, 1)}
    printed = {rank: MISMATCH.format(*pair) for rank, pair in pairs.items()}
    found = others.detail(printed, ROOT.format(0, 1), 1)
    assert found.culprits == (1,) and "jobs.py:59" in found.text
    two = {rank: printed[rank] for rank in (0, 1)}
    assert others.detail(two, "", 1).culprits == (0, 1)  # with two ranks it is not known which


def test_detail_names_the_rank_that_did_not_reach_the_barrier() -> None:
    said = "RuntimeError: [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 30000 ms"
    assert others.detail({0: said}, ROOT.format(0, 1), 1).culprits == (1, 2)


def test_the_first_failure_is_used_if_errors_name_no_rank() -> None:
    died = others.detail({1: "ValueError: the batch is empty"}, ROOT.format(1, -9), 1)
    assert died.culprits == (1,) and "-9" in died.text
    waited = others.detail({0: "RuntimeError: Timed out waiting 30000ms"}, ROOT.format(0, 1), 1)
    assert waited.alarm and waited.culprits == ()
    assert not others.detail({}, "", 0).alarm
    assert not others.detail({0: ""}, "", None).alarm


# ------------------------------------------------------------------------ simulated cases

BY_NAME = {dimension.name: dimension for dimension in jobs.DIMENSIONS}


@pytest.mark.parametrize("fault", [f for f in jobs.FAULTS if f != "skip-p2p"])
def test_a_fault_of_a_simulated_job_stops_it_and_has_a_line(fault: str) -> None:
    case = Case(BY_NAME["started times recorded"], LAYOUTS[0], fault, 11)
    folder = case.folder()
    assert folder is not None
    ran = jobs.Run(folder.job)
    assert any(done < len(program) for done, program in zip(ran.done, ran.programs, strict=True))
    truth = case.truth(folder)
    assert truth.culprits == folder.job.culprits and truth.lines and not truth.healthy


@pytest.mark.parametrize("fault", ["running", "size"])
def test_a_simulated_case_is_answered_from_its_files(fault: str, tmp_path: Path) -> None:
    case = Case(BY_NAME["no started times"], LAYOUTS[0], fault, 11)
    folder = case.folder()
    assert folder is not None
    answer = simulated.ours(folder.write(tmp_path / "dumps"))
    kind = Outcome.QUIET if fault == "running" else Outcome.RIGHT
    assert outcome(case.truth(folder), answer) is kind


def test_what_no_dump_can_show_is_not_demanded() -> None:
    device = Case(BY_NAME["no started times"], LAYOUTS[0], "device", 11)
    two_killed = Case(BY_NAME["two culprits, apart"], LAYOUTS[0], "killed", 11)
    first, second = device.folder(), two_killed.folder()
    assert first is not None and second is not None
    assert device.truth(first).culprits == () and not device.truth(first).decidable
    dated = replace(device, dimension=BY_NAME["dated files"])
    assert dated.truth(first).decidable and dated.taken_at(first) == first.taken
    assert device.taken_at(first) is None
    truth = two_killed.truth(second)
    assert len(truth.culprits) == 2 and not truth.decidable
    assert outcome(truth, Answer(True, (), verdict="hang")) is Outcome.ABSTAINED
    assert outcome(truth, Answer(True, truth.culprits[:1], verdict="hang")) is Outcome.SOME
    assert outcome(truth, Answer(False, (), verdict="clean")) is Outcome.MISSED
