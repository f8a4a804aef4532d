"""Dumps as real NCCL jobs leave them: without completed calls, with several ranks behind, absent
ranks, files of two jobs, and nothing that tells when they were written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence import flight_dump, foreign
from moediag.evidence.sources import Found
from moediag.result import Diagnosis

BEGAN = 1_700_000_000.0
LATER = BEGAN + 3600
WORLD = ("0", "default_pg")

Call = tuple[str, str, bool]  # group, operation, completed
Groups = Mapping[str, tuple[str, Sequence[int]]]  # name -> description, members


def groups_of(rank: int, tp: int, world: int) -> Groups:
    """The world, tensor groups of neighbours and data groups across them."""
    first = rank - rank % tp
    return {
        "0": ("default_pg", range(world)),
        "1": ("tp", range(first, first + tp)),
        "2": ("dp", range(rank % tp, world, tp)),
    }


def raw(
    groups: Groups,
    calls: Iterable[Call],
    *,
    active_only: bool = True,
    entries: bool = True,
    began: float = BEGAN,
    status: bool = True,
) -> dict[str, Any]:
    """A dump in torch's format; groups are numbered in the order of their names."""
    ids = {name: number for number, name in enumerate(sorted(groups, key=int))}
    counts: dict[str, int] = {}
    done: dict[str, int] = {}
    found = []
    for index, (group, op, completed) in enumerate(calls):
        counts[group] = seq = counts.get(group, 0) + 1
        if completed:
            done[group] = seq
        if completed and active_only:
            continue
        at = int((began + index) * 1e9)
        found.append({
            "record_id": index, "pg_id": ids[group],
            "process_group": (group, groups[group][0]), "collective_seq_id": seq,
            "p2p_seq_id": 0, "op_id": seq, "profiling_name": f"nccl:{op}", "time_created_ns": at,
            "input_sizes": [[8]], "input_dtypes": ["Float"], "output_sizes": [[8]],
            "output_dtypes": ["Float"], "state": "completed" if completed else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": at if completed else None,
            "retired": completed, "timeout_ms": 600_000, "is_p2p": False,
        })  # fmt: skip
    told: dict[str, Any] = {
        "version": "2.10",
        "pg_config": {
            name: {"name": name, "desc": desc, "ranks": str(list(ranks))}
            for name, (desc, ranks) in groups.items()
            if name in counts
        },
        "pg_status": {
            str(ids[name]): {
                "last_enqueued_collective": count,
                "last_started_collective": -1,
                "last_completed_collective": done.get(name, -1),
            }
            for name, count in counts.items()
        } if status else {},
    }  # fmt: skip
    return told | ({"entries": found} if entries else {})


STEP: tuple[Call, ...] = (("1", "all_reduce", True), ("2", "reduce_scatter", True),
                          ("0", "all_reduce", True))  # fmt: skip


def program(steps: int, *open_: str) -> list[Call]:
    """Complete steps, then incomplete calls of these groups."""
    ops = {group: op for group, op, _ in STEP}
    return [*STEP * steps, *((group, ops[group], False) for group in open_)]


def stopped(culprits: Iterable[int], world: int = 8, **options: Any) -> dict[int, dict[str, Any]]:
    """Ranks in pairs of tensor groups; ``culprits`` stop after ten steps. Their tensor peers wait
    for them there, all others in the data group or in the world."""
    dumps = {}
    stuck = set(culprits)
    for rank in range(world):
        groups = groups_of(rank, 2, world)
        if rank in stuck:
            calls = program(10)
        elif rank ^ 1 in stuck:
            calls = program(10, "1")
        else:
            calls = [*program(10), STEP[0], ("2", "reduce_scatter", False)]
        dumps[rank] = raw(groups, calls, **options)
    return dumps


def diagnosed(dumps: Mapping[int, dict[str, Any]], **of: Any) -> Diagnosis:
    read = {rank: flight_dump.read(one) for rank, one in dumps.items()}
    return diagnose(foreign.evidence(Found(dumps=read, files=len(read), **of)))


ACTIVE: dict[str, Any] = {"active_only": True}
FORMS = (ACTIVE, {"active_only": False}, {"entries": False}, {"active_only": True, "status": False})


# ------------------------------------------------------------------------ every rank behind


@pytest.mark.parametrize("form", FORMS, ids=("active", "all calls", "only counts", "no counts"))
@pytest.mark.parametrize("culprits", [(3,), (1, 6), (0, 3, 4)])
def test_every_rank_that_others_wait_for_is_named(
    culprits: tuple[int, ...], form: dict[str, Any]
) -> None:
    found = diagnosed(stopped(culprits, **form), taken_at=LATER)
    assert (found.verdict, found.culprits) == ("hang", culprits), found.cause
    assert found.victims == tuple(rank for rank in range(8) if rank not in culprits)


def test_healthy_ranks_are_not_named() -> None:
    found = diagnosed({r: raw(groups_of(r, 2, 8), program(10), **ACTIVE) for r in range(8)})
    assert found.verdict != "hang" and not found.culprits


def test_a_rank_that_is_behind_in_a_call_that_others_completed_is_named() -> None:
    dumps = {}
    for rank in range(8):
        last = program(10, "1") if rank == 5 else [*program(10), STEP[0]]
        last += [("2", "reduce_scatter", False)] if rank != 5 else []
        dumps[rank] = raw(groups_of(rank, 2, 8), last)
    found = diagnosed(dumps, taken_at=LATER)
    assert (found.verdict, found.culprits) == ("hang", (5,)), found.cause


def test_peers_of_one_call_that_all_issued_are_not_named() -> None:
    """A stuck device and its peer leave the same dump unless starts are recorded."""
    dumps = {}
    for rank in range(8):
        wait = program(10, "1") if rank in (4, 5) else [*program(10), STEP[0]]
        wait += [("2", "reduce_scatter", False)] if rank not in (4, 5) else []
        dumps[rank] = raw(groups_of(rank, 2, 8), wait)
    found = diagnosed(dumps, taken_at=LATER)
    assert (found.verdict, found.culprits) == ("hang", ())
    assert "ranks 4, 5" in found.cause and "not known which rank is stuck" in found.cause


def test_a_dump_that_lists_no_call_but_counts_incomplete_ones_is_unknown() -> None:
    dumps = stopped((3,))
    dumps[6]["entries"] = []
    found = diagnosed(dumps, taken_at=LATER)
    assert found.culprits == (3,) and 6 not in found.victims
    assert any("rank 6" in text for text in found.not_seen)
    alone = stopped((3,))
    alone[3] = dict(alone[7], entries=[])
    assert "Nothing is known of rank 3" in diagnosed(alone, taken_at=LATER).cause


def test_two_wrong_sizes_in_different_groups_are_two_culprits() -> None:
    """The members of the first one's group have queued the call in which the second one differs."""
    dumps = {}
    for rank in range(8):
        calls = [*program(10), STEP[0], ("2", "reduce_scatter", rank % 2 == 1)]
        dumps[rank] = raw(groups_of(rank, 2, 8), [*calls, ("0", "all_reduce", False)])
        for entry in dumps[rank]["entries"]:
            if (rank, entry["process_group"][0]) in ((2, "2"), (5, "0")):
                entry["input_sizes"] = entry["output_sizes"] = [[16]]
    found = diagnosed(dumps)
    assert (found.verdict, found.culprits) == ("hang", (2, 5)), found.cause
    assert "Independently" in found.cause


# ------------------------------------------------------------------------ what is not seen


@pytest.mark.parametrize("lost", range(8))
def test_an_absent_rank_is_named_only_if_it_explains_every_waiting_rank(lost: int) -> None:
    dumps = stopped((1, 6))
    del dumps[lost]
    found = diagnosed(dumps, taken_at=LATER)
    assert set(found.culprits) <= {1, 6} and found.confidence != "high"
    assert set(found.culprits) >= {1, 6} - {lost}
    assert f"rank {lost}: no evidence found" in found.not_seen


def test_the_only_absent_rank_that_all_wait_for_is_named() -> None:
    dumps = stopped((6,))
    del dumps[6]
    found = diagnosed(dumps, taken_at=LATER)
    assert (found.culprits, found.confidence) == ((6,), "medium")
    del dumps[2]
    found = diagnosed(dumps, taken_at=LATER)
    assert found.culprits == () and "not known which rank" in found.cause


def test_half_of_the_dumps_exonerate_nobody() -> None:
    dumps = {rank: one for rank, one in stopped((1,)).items() if rank in (2, 4, 6)}
    found = diagnosed(dumps, taken_at=LATER)
    assert (found.verdict, found.culprits, found.confidence) == ("hang", (), "low")
    for claim in ("All ranks", "no rank is missing", "no rank is at fault"):
        assert claim.lower() not in found.cause.lower()


def test_half_of_the_dumps_of_a_healthy_job_are_not_clean() -> None:
    whole = {r: raw(groups_of(r, 2, 8), program(10), active_only=False) for r in range(8)}
    assert diagnosed(whole).verdict == "clean"
    found = diagnosed({rank: whole[rank] for rank in (0, 1, 6, 7)})
    assert found.verdict == "inconclusive" and "4 of 8 ranks" in found.cause


# ------------------------------------------------------------------------ the moment


def running(world: int = 8) -> dict[int, dict[str, Any]]:
    """All ranks are in the same call."""
    return {r: raw(groups_of(r, 2, world), program(10, "1")) for r in range(world)}


def test_calls_that_may_be_under_way_are_no_hang() -> None:
    found = diagnosed(running())
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert "--taken-at" in found.next_step and "--taken-at" not in found.cause
    assert diagnosed(running(), taken_at=BEGAN + 40).verdict == "inconclusive"
    assert diagnosed(running(), taken_at=LATER).verdict == "hang"
    assert diagnosed(running(), stood=True).verdict == "hang"


def test_a_call_older_than_its_timeout_is_a_hang() -> None:
    dumps = running()
    for entry in dumps[0]["entries"]:
        entry["time_created_ns"] -= 3600 * 10**9
    for one in dumps.values():
        one["entries"][-1]["timeout_ms"] = 60_000
    assert diagnosed({0: dumps[0], 1: dumps[1]}).verdict == "inconclusive"  # not of one job
    dumps = running()
    dumps[0]["entries"].append(dumps[0]["entries"][0] | {
        "record_id": 40, "collective_seq_id": 12,
        "time_created_ns": int((BEGAN + 700) * 1e9),
    })  # fmt: skip
    assert diagnosed(dumps).verdict == "hang"


def test_dumps_written_while_the_job_moved_are_no_hang() -> None:
    dumps = {r: raw(groups_of(r, 2, 8), program(10, "1"), active_only=False) for r in range(8)}
    for rank in (2, 3, 4):
        dumps[rank] = raw(groups_of(rank, 2, 8), program(13, "1"), active_only=False)
    found = diagnosed(dumps)
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert any("dump was written" in text for text in found.not_seen), found.not_seen


def test_a_rank_that_moved_between_two_dumps_shows_no_hang() -> None:
    assert diagnosed(stopped((3,)), moved=True).verdict == "inconclusive"
    assert diagnosed(stopped((3,))).verdict == "hang"


def test_a_late_rank_is_no_culprit_if_the_dumps_were_written_at_once() -> None:
    found = diagnosed(stopped((3,)), taken_at=BEGAN + 40)
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert "may have been running" in found.cause
    assert diagnosed(stopped((3,)), taken_at=BEGAN + 90).culprits == (3,)


def test_late_ranks_on_gloo_are_no_hang_without_a_time() -> None:
    dumps = stopped((3,), active_only=False)
    for one in dumps.values():
        for entry in one["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("nccl", "gloo")
    found = diagnosed(dumps)
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert "If it hung: " in found.cause and "rank 3 never reached that call" in found.cause
    assert diagnosed(dumps, taken_at=LATER).culprits == (3,)


# ------------------------------------------------------------------------ one job


def test_dumps_of_another_attempt_are_left_out() -> None:
    dumps = stopped((3,), active_only=False)
    dumps[5] = raw(groups_of(5, 2, 8), program(4), active_only=False, began=BEGAN - 7200)
    found = diagnosed(dumps)
    assert found.culprits == (3,)
    assert any("rank 5" in text and "minutes apart" in text for text in found.not_seen)


def test_dumps_of_another_configuration_are_left_out() -> None:
    dumps = stopped((3,))
    dumps[0] = raw(groups_of(0, 4, 8), program(10, "1"))
    found = diagnosed(dumps)
    assert found.culprits == (3,)
    assert any("rank 0" in text and "configuration" in text for text in found.not_seen)


def test_two_equal_halves_of_two_jobs_are_not_compared() -> None:
    dumps = {r: one for r, one in stopped((3,)).items() if r < 4}
    dumps |= {r: raw(groups_of(r, 4, 8), program(10, "1")) for r in range(4, 8)}
    found = diagnosed(dumps)
    assert (found.verdict, found.culprits) == ("inconclusive", ())
    assert "not of one job" in found.cause


def test_clocks_that_are_seconds_apart_do_not_matter() -> None:
    dumps = {}
    for rank, one in stopped((1, 6), active_only=False).items():
        for entry in one["entries"]:
            entry["time_created_ns"] += rank * 7 * 10**9
        dumps[rank] = one
    assert diagnosed(dumps).culprits == (1, 6)
