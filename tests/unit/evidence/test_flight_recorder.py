"""Evidence from dumps of many ranks: groups, wrap-around, completion, omitted calls."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import jobs
from moediag.diagnosis import diagnose
from moediag.evidence import flight_dump, flight_recorder, foreign, window
from moediag.evidence.flight_calls import Dump, OwnGroup
from moediag.evidence.flight_recorder import own_rank, recorded
from moediag.evidence.group_rows import Tracks
from moediag.evidence.sources import Found
from moediag.result import Diagnosis

SAMPLES = Path(__file__).parents[2] / "samples/flight-recorder"
LAYOUT = jobs.Layout(pp=2, dp=2, tp=2, ep=2)
JOB = jobs.healthy(LAYOUT, steps=4)


def read(job: jobs.Job, **options: Any) -> dict[int, Dump]:
    return {rank: flight_dump.read(raw) for rank, raw in jobs.dumps(job, **options)}


def diagnosed(dumps: dict[int, Dump]) -> Diagnosis:
    later = 1_700_003_600.0  # an hour after the simulated jobs began
    return diagnose(foreign.evidence(Found(dumps=dumps, files=len(dumps), taken_at=later)))


def test_the_members_and_names_of_groups_are_shared() -> None:
    of = recorded(read(JOB))
    assert of.world_size == 8 and of.backend == "nccl"
    tp = [g for g in of.ranks[3].groups.values() if g.desc == "TENSOR_MODEL_PARALLEL_GROUP"]
    assert [g.ranks for g in tp] == [(2, 3)]
    assert {g.label for g in of.ranks[0].groups.values()} >= {"world"}


def test_groups_numbered_by_each_process_are_matched() -> None:
    """One number means different groups on different ranks, and one group has two numbers."""
    local = recorded(read(JOB, local_names=True))
    shared = recorded(read(JOB))
    for rank, seen in local.ranks.items():
        assert len(seen.groups) == len(shared.ranks[rank].groups)
        for one, other in zip(seen.collectives, shared.ranks[rank].collectives, strict=True):
            assert seen.groups[one.group].ranks == shared.ranks[rank].groups[other.group].ranks
    named = {(g.name, g.ranks) for seen in local.ranks.values() for g in seen.groups.values()}
    members = {(g.ranks, g.desc) for seen in local.ranks.values() for g in seen.groups.values()}
    assert len(named) == len(members)
    assert diagnosed(read(JOB, local_names=True)).verdict == "clean"


def test_groups_with_equal_members_and_description_stay_separate() -> None:
    config = {n: {"name": n, "desc": "undefined", "ranks": "[0, 1]"} for n in ("3", "12")}
    call = {"profiling_name": "nccl:all_reduce", "collective_seq_id": 1, "state": "completed",
            "input_sizes": [[8]], "output_sizes": [[8]], "input_dtypes": ["Float"],
            "output_dtypes": ["Float"]}  # fmt: skip
    dumps = {
        rank: flight_dump.read({
            "version": "2.10", "pg_config": config,
            "entries": [{**call, "record_id": i, "process_group": [n, "undefined"]}
                        for i, n in enumerate(order)],
        })
        for rank, order in enumerate((("3", "12"), ("12", "3")))
    }  # fmt: skip
    of = recorded(dumps)
    assert [c.group for c in of.ranks[0].collectives] == ["3", "12"]
    assert [c.group for c in of.ranks[1].collectives] == ["12", "3"]


@pytest.mark.parametrize("fewer", [0, 1])
def test_groups_are_not_matched_by_order_if_a_rank_created_fewer(fewer: int) -> None:
    """Which of the other rank's two groups its only one is, only a name could tell."""
    names = {fewer: ("7",), 1 - fewer: ("3", "12")}
    dumps = {rank: Dump() for rank in (0, 1)}
    for rank, dump in dumps.items():
        dump.groups = {name: OwnGroup("undefined", (0, 1)) for name in names[rank]}
    of = recorded(dumps)
    assert {rank: {*of.ranks[rank].groups} for rank in names} == {r: {*n} for r, n in names.items()}


def test_callers_are_the_members_in_gloo_dumps() -> None:
    of = recorded({
        rank: flight_dump.read(
            pickle.loads((SAMPLES / "gloo-stuck" / f"trace_rank_{rank}").read_bytes())
        )
        for rank in range(4)
    })  # fmt: skip
    groups = of.ranks[2].groups
    assert groups["1"].ranks == (0, 2) and groups["1"].axis == "dp"
    assert groups["4"].ranks == (2, 3) and groups["0"].ranks == (0, 1, 2, 3)
    assert any("sends and receives" in text for text in of.not_seen)


def test_own_rank_is_found_in_a_dump() -> None:
    dumps = read(JOB)
    assert [own_rank(dump) for dump in dumps.values()] == list(range(8))  # by its sends
    no_pipeline = read(jobs.healthy(jobs.Layout(dp=2, tp=2), steps=1))
    assert [own_rank(dump) for dump in no_pipeline.values()] == [0, 1, 2, 3]  # by its groups
    one_group = read(jobs.healthy(jobs.Layout(dp=2), steps=1))
    assert own_rank(one_group[0]) is None


def test_peers_are_ranks_of_the_world() -> None:
    of = recorded(read(JOB))
    sends = {c.peer for c in of.ranks[1].collectives if c.op == "send"}
    assert sends == {5}


def test_wrapped_rings_align_by_their_positions() -> None:
    """Every rank lost a different number of calls."""
    dumps = {
        rank: flight_dump.read({**raw, "entries": raw["entries"][-(20 + 3 * rank):]})
        for rank, raw in jobs.dumps(JOB)
    }  # fmt: skip
    assert all(dump.wrapped for dump in dumps.values())
    assert diagnosed(dumps).verdict == "clean"


def test_batches_of_older_releases_are_unaligned_only_after_the_ring_wrapped() -> None:
    def older(raw: dict[str, Any], keep: int) -> Dump:
        """Numbers as torch before 2.5: a send uses a number of the collectives' counter."""
        taken: dict[str, int] = {}
        entries = []
        for entry in raw["entries"]:
            name = entry["process_group"][0]
            taken[name] = taken.get(name, 0) + entry["is_p2p"]
            seq = entry["collective_seq_id"] + taken[name]
            entries.append({**entry, "collective_seq_id": seq})
        return flight_dump.read({**raw, "entries": entries[-keep:]})

    pipeline = jobs.Layout(pp=2, dp=2)
    base = jobs.healthy(pipeline, steps=3)
    # A reduction on the pipeline's own group, with unequal numbers of sends before it.
    programs = [[*program, jobs.Op("pp", "all_reduce", 4, 500)] * 1 for program in base.programs]
    job = replace(base, programs=programs)
    whole = {rank: older(raw, 10_000) for rank, raw in jobs.dumps(job)}
    assert diagnosed(whole).verdict == "clean"
    ends = [seen.collectives[-1].position for seen in recorded(whole).ranks.values()]
    assert ends == [0, 0, 0, 0]
    cut = {rank: older(raw, 12) for rank, raw in jobs.dumps(job)}
    of = recorded(cut)
    assert any("numbers them together" in text for text in of.not_seen)
    assert diagnosed(cut).verdict == "clean"


# ------------------------------------------------------------------------ completion


def test_earlier_calls_of_a_group_completed_when_a_later_one_did() -> None:
    raw = dict(jobs.dumps(JOB))
    for entry in raw[0]["entries"][:50:7]:
        entry |= {"state": "scheduled", "time_discovered_completed_ns": None, "retired": False}
    of = recorded({rank: flight_dump.read(one) for rank, one in raw.items()})
    assert all(c.completed for c in of.ranks[0].collectives if c.op not in ("send", "recv"))


def test_dumps_without_completion_are_diagnosed() -> None:
    of = recorded(read(JOB, states=False))
    assert not of.tracked and any("which calls completed" in text for text in of.not_seen)
    assert all(c.completed for seen in of.ranks.values() for c in seen.collectives)
    stuck = jobs.faulty(JOB, "stuck", 1)
    found = diagnosed(read(stuck, states=False))
    assert found.verdict == "hang" and found.culprits == ()  # no rank is known to be elsewhere
    assert "collect" in found.cause


def test_a_rank_without_open_calls_has_an_empty_dump() -> None:
    stuck = jobs.faulty(JOB, "stuck", 1)
    open_only = {
        rank: {**raw, "entries": [e for e in raw["entries"] if e["state"] != "completed"]}
        for rank, raw in jobs.dumps(stuck, ahead=6)
    }
    dumps = {rank: flight_dump.read(raw) for rank, raw in open_only.items()}
    (idle,) = stuck.culprits
    assert not dumps[idle].kind and any(dump.kind for dump in dumps.values())


# ------------------------------------------------------------------------ omitted calls


@pytest.mark.parametrize("fault", ["none", *jobs.FAULTS])
@pytest.mark.parametrize("ring", [2000, 60])
def test_omitted_calls_do_not_change_the_diagnosis(
    monkeypatch: pytest.MonkeyPatch, fault: str, ring: int
) -> None:
    job = jobs.faulty(JOB, fault, 3) if fault != "none" else JOB
    whole = diagnosed(read(job, ring=ring))
    everything = recorded(read(job, ring=ring))
    monkeypatch.setattr(window, "KEEP_ALL", 0)
    few = recorded(read(job, ring=ring))
    some = diagnosed(read(job, ring=ring))
    assert (some.verdict, some.culprits) == (whole.verdict, whole.culprits)
    assert some.culprits == job.culprits
    assert everything.left_out == 0
    if ring == 2000:
        assert few.left_out > 100


def test_calls_in_the_middle_are_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs.faulty(JOB, "size", 3)
    monkeypatch.setattr(window, "KEEP_ALL", 0)
    monkeypatch.setattr(window, "BEFORE", 4)
    monkeypatch.setattr(window, "MOST", 1)
    of = recorded(read(job))
    assert max(len(seen.collectives) for seen in of.ranks.values()) <= 16
    found = diagnosed(read(job))
    # Too few earlier calls to decide the culprit, but the position is the same.
    assert found.verdict == "hang" and set(found.culprits) <= set(job.culprits)
    monkeypatch.undo()
    assert found.first_divergence == diagnosed(read(job)).first_divergence


def test_of_a_long_stretch_its_beginning_and_its_end_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How the last calls ended tells where a rank stopped."""
    monkeypatch.setattr(window, "BEFORE", 4)
    monkeypatch.setattr(window, "MOST", 1)
    dump = Dump()
    dump.kind.extend([0] * 100)
    chosen = window.Chosen(done={0: bytearray(100)})
    split = Tracks(apart={0: ()})
    found = window._wanted({0: dump}, 0, split, {0: 10}, chosen)
    assert list(found) == [*range(6, 14), *range(92, 100)]
    assert list(window._wanted({0: dump}, 0, split, {0: 90}, chosen)) == [*range(86, 100)]


def test_json_and_pickle_give_equal_evidence() -> None:
    of_pickle = read(JOB)
    of_json = {rank: flight_dump.read(json.loads(json.dumps(raw))) for rank, raw in jobs.dumps(JOB)}
    assert recorded(of_pickle).ranks == recorded(of_json).ranks


def test_no_dumps_give_no_ranks() -> None:
    assert flight_recorder.recorded({}).ranks == {}


@pytest.mark.parametrize(
    ("most", "calls", "start", "kept"),
    [
        (1000, 900, 900, [(852, 900)]),  # some before the place of interest
        (1000, 900, 20, [(0, 900)]),
        (1000, 1500, 60, [(12, 512), (1000, 1500)]),  # the beginning and the end
        (10, 900, 100, [(52, 148), (804, 900)]),  # a few of each rank, of however many ranks
    ],
)
def test_a_rank_with_many_calls_keeps_their_beginning_and_end(
    monkeypatch: pytest.MonkeyPatch, most: int, calls: int, start: int, kept: Any
) -> None:
    monkeypatch.setattr(window, "MOST", 2 * most)
    dumps: Any = {0: SimpleNamespace(kind=range(calls)), 1: SimpleNamespace(kind=[])}
    chosen = window.Chosen(done={0: bytearray(calls)})
    rows = window._wanted(dumps, 0, Tracks(apart={0: []}), {0: start}, chosen)
    assert list(rows) == [row for part in kept for row in range(*part)]
