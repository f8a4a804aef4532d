"""The combined evidence of several nodes: one answer for the job, whatever their clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moediag import protocol
from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence, ExitStatus, Node, RankError, RankEvidence, Stall
from moediag.evidence.nodes import Part, job_of, merged
from moediag.evidence.trial_folder import read_trial
from moediag.pipeline import examine
from moediag.result import Confidence, Diagnosis, Verdict
from tests.unit import evidence_builder as build
from tests.unit.evidence_builder import Job, Op

HERE, THERE = Node("node 0", "a", (0, 1)), Node("node 1", "b", (2, 3))
WORLD = (0, 1, 2, 3)


def job(*late: int, steps: int = 6) -> Evidence:
    """Four ranks that reduce on the world; those in ``late`` do not issue the last call."""
    full = [Op("0", step=n + 1) for n in range(steps)]
    programs = [full[:-1] if rank in late else full for rank in WORLD]
    found = Job({"0": (WORLD, None)}, programs).run()
    ranks = {r: replace(seen, finished=False) for r, seen in found.ranks.items()}
    waiting = tuple(r for r in WORLD if r not in late)
    return replace(found, ranks=ranks, stall=Stall(5.0, 3.0, waiting, late), watched=True)


def of(evidence: Evidence, ranks: Sequence[int], skew: float = 0.0) -> Evidence:
    """The evidence of the watcher of ``ranks``; its clock is ahead by ``skew`` seconds."""
    mine = {}
    for rank, seen in evidence.ranks.items():
        calls = tuple(replace(c, time=c.time + skew + 1e6) for c in seen.collectives)
        error = seen.error and replace(seen.error, time=seen.error.time + skew + 1e6)
        told = replace(seen, collectives=calls, error=error)
        mine[rank] = told if rank in ranks else RankEvidence(rank)
    return replace(evidence, ranks=mine, deaths=tuple(r for r in evidence.deaths if r in ranks))


def both(evidence: Evidence, skew: float = 0.0) -> Evidence:
    parts = [
        Part(of(evidence, HERE.ranks), (HERE, THERE)),
        Part(of(evidence, THERE.ranks, skew), (THERE, HERE)),
    ]
    return merged(parts)


def answer(found: Diagnosis) -> tuple[object, ...]:
    return found.verdict, found.culprits, found.victims, found.confidence, found.signature


SKEWS = pytest.mark.parametrize("skew", [0.0, 0.3, -7200.0, 1e5])


@SKEWS
@pytest.mark.parametrize("late", [(2,), (3,), (2, 3), (0,)])
def test_a_missing_rank_is_the_culprit_with_any_clocks(late: tuple[int, ...], skew: float) -> None:
    whole = job(*late)
    found = diagnose(both(whole, skew))
    assert answer(found) == answer(diagnose(whole))
    assert found.culprits == late
    node = "node 1 (b)" if late[0] >= 2 else "node 0 (a)"
    assert f"on {node}" in found.cause


@SKEWS
def test_mismatched_reductions_are_diagnosed_with_any_clocks(skew: float) -> None:
    whole = build.fsdp2_job(set(), set(), {(1, 3)}, set(), steps=2, from_step=2)
    whole = replace(whole.run(), watched=True)
    found = diagnose(both(whole, skew))
    assert answer(found) == answer(diagnose(whole))
    assert found.culprits == (2,)


@SKEWS
def test_the_first_exception_is_the_cause_with_any_clocks(skew: float) -> None:
    whole = job(2)
    ranks = dict(whole.ranks)
    end = max(c.time for seen in ranks.values() for c in seen.collectives)
    ended = ExitStatus(code=1)
    first = RankError("ValueError", "empty", "train.py:3 f", end + 1)
    ranks[2] = replace(ranks[2], error=first, exit=ended)
    later = RankError("AssertionError", "", "train.py:9 f", end + 5)
    ranks[0] = replace(ranks[0], error=later, exit=ended)
    whole = replace(whole, ranks=ranks, stall=None, deaths=(2, 0))
    found = diagnose(both(whole, skew))
    assert (found.verdict, found.culprits) == (Verdict.CRASH, (2,))
    assert answer(found) == answer(diagnose(whole))


def test_a_healthy_job_is_clean() -> None:
    full = [Op("0", step=n + 1) for n in range(4)]
    whole = Job({"0": (WORLD, None)}, [full] * 4).run()
    assert diagnose(both(replace(whole, watched=True))).verdict == Verdict.CLEAN


# ------------------------------------------------------------------------ missing evidence


def silent(evidence: Evidence, seconds: float = 23.0) -> Evidence:
    """Removes the evidence of node 1."""
    gone = replace(THERE, silent=seconds, seen=False)
    return merged([Part(of(evidence, HERE.ranks), (HERE, gone))])


def test_a_silent_node_is_the_culprit_if_all_wait_for_its_ranks() -> None:
    found = diagnose(silent(job(2, 3)))
    assert (found.verdict, found.culprits, found.victims) == (Verdict.HANG, (2, 3), (0, 1))
    assert found.confidence == Confidence.MEDIUM
    assert "Node 1 (b, ranks 2, 3) has sent nothing for 23 s." in found.cause
    assert any("node 1 (ranks 2, 3)" in text for text in found.not_seen)
    assert found.next_step.startswith("See whether node 1 (b) is up and reachable")


def test_a_silent_node_is_not_the_culprit_if_some_wait_for_other_ranks() -> None:
    """Rank 0 waits in a group of ranks 0 and 1 whose call both have issued."""
    ops = [Op("0"), Op("pair")]
    programs = [[*ops, Op("pair")], [*ops, Op("pair")], [Op("0")], [Op("0")]]
    whole = Job({"0": (WORLD, None), "pair": ((0, 1), None)}, programs).run()
    ranks = {
        rank: replace(
            seen,
            finished=False,
            collectives=tuple(replace(c, completed=c.index < 2) for c in seen.collectives),
        )
        for rank, seen in whole.ranks.items()
    }
    stall = Stall(5.0, 3.0, (0, 1), (2, 3))
    found = diagnose(silent(replace(whole, ranks=ranks, stall=stall, watched=True)))
    assert (found.verdict, found.culprits) == (Verdict.HANG, ())
    assert "so no rank is named" in found.cause


def test_an_observed_mismatch_takes_precedence_over_a_silent_node() -> None:
    programs = [[Op("0"), Op("0", "broadcast")], [Op("0"), Op("0")], [Op("0")], [Op("0")]]
    whole = Job({"0": (WORLD, None)}, programs).run()
    found = diagnose(silent(replace(whole, watched=True, stall=Stall(5.0, 3.0, (0, 1), (2, 3)))))
    assert found.verdict == Verdict.HANG
    assert "broadcast" in found.cause
    assert not set(found.culprits) & {2, 3}


def test_ranks_that_lost_a_peer_point_to_the_silent_node() -> None:
    whole = job(2, 3)
    error = RankError("RuntimeError", "Connection closed by peer", "", 9.0)
    ranks = {r: replace(s, error=error if r < 2 else None) for r, s in whole.ranks.items()}
    found = diagnose(silent(replace(whole, ranks=ranks, stall=None, deaths=(0, 1))))
    assert (found.verdict, found.culprits) == (Verdict.CRASH, (2, 3))
    assert "Connection closed by peer" in found.cause
    assert found.next_step.startswith("See whether node 1 (b) is up and reachable")


def test_unwatched_ranks_are_not_blamed() -> None:
    whole = replace(job(2, 3), stall=Stall(5.0, 3.0, (0, 1)))
    rest = Node("", "", (2, 3), seen=False)
    found = diagnose(merged([Part(of(whole, (0, 1)), (HERE, rest))]))
    assert (found.verdict, found.culprits) == (Verdict.HANG, ())
    assert any("--shared" in text for text in found.not_seen)


# ------------------------------------------------------------------------ directories


def left(folder: Path, evidence: Evidence, token: str, nodes: Sequence[Node]) -> Path:
    """The folder of a watcher that shared nothing."""
    own = nodes[0].ranks
    mine = {r: s for r, s in evidence.ranks.items() if r in own}
    build.write(replace(evidence, ranks=mine), folder)
    protocol.Trial(
        "t", "train.py", "watched", task=protocol.WatchTask(), world_size=evidence.world_size
    ).write(folder)
    for rank in own:
        protocol.write_json(folder / protocol.job_file(rank), {"job": token, "node": 0})
    listed = [
        {"key": "", "name": n.name, "host": n.host, "ranks": list(n.ranks), "silent": n.silent,
         "seen": n.seen} for n in nodes
    ]  # fmt: skip
    protocol.write_json(folder / protocol.NODES_FILE, {"schema_version": 1, "nodes": listed})
    return folder


def two_folders(tmp_path: Path, tokens: Sequence[str]) -> list[Path]:
    whole = job(2)
    here = replace(whole, stall=Stall(5.0, 3.0, (0, 1)))
    there = replace(whole, stall=Stall(5.0, 3.0, (3,), (2,)))
    unseen = [replace(node, name="", host="", seen=False) for node in (THERE, HERE)]
    return [
        left(tmp_path / "n0", here, tokens[0], (HERE, unseen[0])),
        left(tmp_path / "n1", there, tokens[1], (THERE, unseen[1])),
    ]


def test_directories_of_two_nodes_are_one_job(tmp_path: Path) -> None:
    folders = two_folders(tmp_path, ["x" * 8, "x" * 8])
    for order in (folders, folders[::-1]):
        (trial,) = examine.examine(order).result.trials
        assert (trial.verdict, trial.culprits, trial.victims) == ("hang", (2,), (0, 1, 3))
        assert "Rank 2 runs on node 1 (b)" in trial.cause


def test_directories_of_two_jobs_are_separate(tmp_path: Path) -> None:
    found = examine.examine(two_folders(tmp_path, ["x" * 8, "y" * 8])).result
    assert len(found.trials) == 2
    assert job_of(tmp_path / "n0") == "x" * 8


def test_an_invalid_node_list_is_ignored(tmp_path: Path) -> None:
    folder = left(tmp_path / "n0", job(2), "x" * 8, (HERE, THERE))
    for text in ("", "[]", '{"schema_version": 1, "nodes": [{"name": 1}, 7]}'):
        (folder / protocol.NODES_FILE).write_text(text)
        assert read_trial(folder).world_size == 4
