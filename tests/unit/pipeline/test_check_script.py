"""`moediag check --script` after the simulated ranks: what is compared, and what is concluded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moediag.diagnosis import diagnose
from moediag.errors import ExitCode, UsageError
from moediag.evidence.model import Evidence
from moediag.lab.pipeline import check_script, check_script_page
from moediag.lab.pipeline.check_script import RankRead, ScriptResult, comparable
from moediag.protocol import SimulatedRank
from moediag.report import answer_views
from moediag.report.text_layout import plain
from moediag.result import Verdict
from tests.unit.evidence_builder import Job, Op

WORLD = tuple(range(8))
STEP = [Op("world", numel=64), Op("dp", numel=32), Op("world", numel=1)]
GROUPS: dict[str, tuple[tuple[int, ...], str | None]] = {
    "world": (WORLD, None), "dp": (WORLD, "dp"),
}  # fmt: skip
BARRIER = Op("world", "barrier", numel=0)


def simulated(*ranks: list[Op]) -> Evidence:
    """Ranks 0, 1, … of eight; the others were not simulated."""
    return dataclasses.replace(Job(GROUPS, list(ranks)).whole(), world_size=8)


def read(rank: int, evidence: Evidence, **changes: object) -> RankRead:
    """A rank that made its steps. ``known``: calls before it read data of others."""
    known = changes.pop("known", None)
    answer = SimulatedRank(
        rank, 8, steps=2, ended="steps", known=known, read="Tensor.item() at train.py:3" if
        known is not None else "", read_after=1,
    )  # fmt: skip
    calls = len(evidence.ranks[rank].collectives)
    one = RankRead(rank, answer, calls, calls if known is None else known, "", 0)  # type: ignore[arg-type]
    return dataclasses.replace(one, **changes)  # type: ignore[arg-type]


def found(evidence: Evidence, *reads: RankRead) -> ScriptResult:
    ranks = reads or tuple(read(rank, evidence) for rank in evidence.ranks)
    diagnosis = diagnose(comparable(evidence, ranks))
    return ScriptResult("train.py", 8, ranks, diagnosis, {"torch": "2.13.0"}, Path("run"))


def test_healthy_ranks_are_not_accused() -> None:
    result = found(simulated(STEP * 2, STEP * 2, STEP * 2))
    assert result.state.exit_code == ExitCode.OK and not result.failing
    page = "\n".join(map(plain, answer_views.lines(check_script_page.answer(result), 90)))
    assert "CHECK    no failure found" in page and "18 of 18 calls (100%)" in page


def test_a_call_of_one_rank_fails_with_both_sides() -> None:
    result = found(simulated([BARRIER, *STEP], STEP, STEP))
    assert result.state.exit_code == ExitCode.FAILURE_FOUND
    assert result.diagnosis is not None and result.diagnosis.verdict == Verdict.COLLECTIVE_MISMATCH
    assert "barrier" in result.diagnosis.cause and result.diagnosis.culprits == (0,)
    page = "\n".join(map(plain, answer_views.lines(check_script_page.answer(result), 90)))
    assert "FAILS" in page and "rank 0 is in barrier" in page


def test_what_comes_after_unreal_data_proves_nothing() -> None:
    evidence = simulated([*STEP, BARRIER], [*STEP, *STEP])
    assert found(evidence).failing
    result = found(evidence, read(0, evidence, known=3), read(1, evidence))
    assert not result.failing and result.state.exit_code == ExitCode.OK
    page = "\n".join(map(plain, answer_views.lines(check_script_page.answer(result), 90)))
    assert "after call 3 of 4, in step 2" in page and "train.py:3" in page


def test_fewer_calls_fail_only_if_the_program_ended() -> None:
    evidence = simulated([*STEP, *STEP], STEP)
    assert not found(evidence).failing  # rank 1 was stopped, it may still make them
    ended = read(1, evidence)
    assert ended.answer is not None
    ended = dataclasses.replace(ended, answer=dataclasses.replace(ended.answer, ended=""))
    result = found(evidence, read(0, evidence), ended)
    assert result.failing and result.diagnosis is not None
    assert "reached the end without that call" in result.diagnosis.cause


def test_ranks_that_wait_for_each_other_in_two_groups_fail() -> None:
    """Rank 0 alone calls a barrier on a group that is used for nothing else."""
    alone = Op("dp", "barrier", numel=0)
    steps = [Op("world", numel=64)] * 3
    assert found(simulated([alone, *steps], steps)).failing
    assert not found(simulated([*steps, alone], steps)).failing  # rank 1 may come to it later


@pytest.mark.parametrize(
    "op", [Op("dp", "broadcast", numel=4, peer=0), Op("dp", "all_reduce", asynchronous=True)]
)
def test_calls_that_need_not_wait_prove_no_circle(op: Op) -> None:
    steps = [Op("world", numel=64)] * 3
    evidence = simulated([op, *steps], [*steps, op])
    assert not found(evidence).failing


def test_a_rank_without_calls_leaves_it_undecided() -> None:
    result = found(simulated(STEP, []))
    assert result.state.exit_code == ExitCode.INCONCLUSIVE
    assert result.undecided == "rank 1: none of its calls was recorded"
    assert found(simulated([], [])).state.exit_code == ExitCode.INCONCLUSIVE


def test_a_rank_that_raised_leaves_it_undecided() -> None:
    evidence = simulated(STEP, STEP)
    raised = read(1, evidence, raised="RuntimeError: no GPU at train.py:2", code=1)
    result = found(evidence, read(0, evidence), raised)
    assert result.state.exit_code == ExitCode.INCONCLUSIVE and "no GPU" in result.undecided
    nothing = dataclasses.replace(raised, answer=None, code=None, raised="", calls=0, compared=0)
    assert "time limit" in found(evidence, read(0, evidence), nothing).undecided


def test_ranks_of_every_class_are_chosen() -> None:
    assert check_script.others(64, 8, [WORLD, (0, 16, 32, 48)]) == [1, 8, 16, 63]
    assert check_script.others(2, 8, []) == [1] and check_script.others(1, 8, []) == []
    own = check_script.of_torchrun(9, 12, 8)
    assert (own["RANK"], own["LOCAL_RANK"], own["LOCAL_WORLD_SIZE"]) == ("9", "1", "4")
    assert own["GROUP_RANK"] == "1" and own["WORLD_SIZE"] == "12"


def test_the_program_is_given_without_a_launcher() -> None:
    assert check_script.program("train.py --lr 1", "py") == ["py", "train.py", "--lr", "1"]
    assert check_script.program("-m pkg.train", "py") == ["py", "-m", "pkg.train"]
    assert check_script.program("python3 train.py", "py") == ["python3", "train.py"]
    for wrong in ("torchrun train.py", ""):
        with pytest.raises(UsageError):
            check_script.program(wrong, "py")
