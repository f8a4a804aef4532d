"""Schedules side by side around the first divergence, and final states of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import jobs
from moediag.diagnosis import diagnose
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.words.schedule_view import side_by_side
from moediag.pipeline import examine
from moediag.result import Diagnosis, SideBySide
from tests.unit.evidence_builder import Job, Op, aborted_on_gloo, expert_job, fsdp2_job

STARVED = {(1, 3)}


def schedules(found: Diagnosis) -> SideBySide:
    assert found.schedules is not None
    return found.schedules


def standing(found: Diagnosis) -> dict[str, tuple[int, ...]]:
    return {f"{state.kind}: {state.text}": state.ranks for state in found.states}


def test_equal_ranks_share_a_lane_and_the_divergence_is_marked() -> None:
    found = diagnose(fsdp2_job(set(), STARVED, set(), set()).run())
    shown = schedules(found)
    first = found.first_divergence
    assert first is not None
    assert shown.rows[shown.at] == str(first.index)
    assert [lane.ranks for lane in shown.lanes] == [(0, 2, 3), (1,)]
    here = [lane.cells[shown.at] for lane in shown.lanes]
    assert here[0].text != here[1].text
    assert all("reduce_scatter of model.layers.1" in cell.text for cell in here)
    before = [lane.cells[: shown.at] for lane in shown.lanes]
    assert before[0] == before[1]
    assert {cell.state for cell in before[0]} == {"done"}
    assert {len(lane.cells) for lane in shown.lanes} == {len(shown.rows)}
    assert set(shown.calls) == {"0", "1", "2", "3"}


def test_a_rank_without_the_call_is_shown() -> None:
    job = fsdp2_job(set(), set())
    job.programs[1] = job.programs[1][:3]
    shown = schedules(diagnose(job.run()))
    assert shown.calls["1"] is None
    assert isinstance(shown.calls["0"], int)
    states = {lane.ranks: [cell.state for cell in lane.cells[shown.at :]] for lane in shown.lanes}
    assert states[1,] == ["none"] * len(states[1,])
    assert states[0,][0] == "open"


def test_ranks_in_a_circular_wait_are_shown_with_their_own_calls() -> None:
    groups = {"a": ((0, 1), None), "b": ((0, 1), None)}
    job = Job(groups, [[Op("a"), Op("a", "all_gather"), Op("b")], [Op("a"), Op("b"), Op("a")]])
    shown = schedules(diagnose(job.run()))
    assert shown.rows == ("-3", "-2", "-1", "here", "+1", "+2")
    here = {lane.ranks: lane.cells[shown.at].text for lane in shown.lanes}
    assert here[0,].startswith("all_gather")
    assert here[1,].startswith("all_reduce")


def test_omitted_lanes_are_counted() -> None:
    programs = [[Op("g", numel=8 * (rank + 1))] for rank in range(12)]
    job = Job({"g": (tuple(range(12)), None)}, programs)
    shown = schedules(diagnose(job.run()))
    assert len(shown.lanes) == 6
    assert shown.left_out == 6


@pytest.mark.parametrize("starved", [[set(), set()], [STARVED, STARVED]])
def test_equal_schedules_are_not_shown(starved: list[set[tuple[int, int]]]) -> None:
    found = diagnose(fsdp2_job(*starved).whole())
    assert found.schedules is None


def test_final_states_of_ranks_are_shown() -> None:
    waiting = standing(diagnose(expert_job(set(), {3}).run()))
    assert all(text.startswith("waiting: waiting in ") for text in waiting)
    ended = standing(diagnose(aborted_on_gloo(fsdp2_job(set(), STARVED).run(), 0)))
    assert sorted(rank for ranks in ended.values() for rank in ranks) == [0, 1]
    assert ended["failed: raised gloo::EnforceNotMet (the communication library)"] == (0,)
    whole = standing(diagnose(fsdp2_job(set(), set()).whole()))
    assert whole == {"finished: finished": (0, 1)}


@pytest.mark.parametrize("fault", ["stuck", "order", "skip-p2p", "op", "size"])
def test_dumps_of_other_jobs_have_schedules_and_states(tmp_path: Path, fault: str) -> None:
    job = jobs.faulty(jobs.healthy(jobs.Layout(pp=2, dp=2, tp=2, ep=2), 3), fault, 1)
    trial = examine.examine([jobs.write(job, tmp_path / "d")]).result.trials[0]
    shown = trial.diagnosis.schedules
    assert shown is not None
    shown_ranks = [rank for lane in shown.lanes for rank in lane.ranks]
    assert set(trial.culprits) <= {*shown_ranks}
    ended = [rank for state in trial.diagnosis.states for rank in state.ranks]
    assert sorted(ended) == list(range(8))


def test_a_rank_without_a_dump_has_state_unseen(tmp_path: Path) -> None:
    job = jobs.faulty(jobs.healthy(jobs.Layout(dp=4), 3), "killed", 1)
    trial = examine.examine([jobs.write(job, tmp_path / "d")]).result.trials[0]
    assert {s.kind: s.ranks for s in trial.diagnosis.states}["unseen"] == job.culprits


def test_calls_of_equal_size_differ_by_what_they_carry() -> None:
    facts = Facts(fsdp2_job({(1, 3)}, {(1, 5)}).run())
    assert facts.divergence is not None
    shown = side_by_side(facts.divergence, facts.aligned, (), facts.evidence)
    here = {lane.ranks: lane.cells[shown.at].text for lane in shown.lanes}
    assert here[0,].endswith("with model.layers.1.mlp.experts.5.{gate,up,down}_proj.weight")
    assert here[1,].endswith("with model.layers.1.mlp.experts.3.{gate,up,down}_proj.weight")
