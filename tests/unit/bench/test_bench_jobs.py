"""The simulator: its dumps have the fields of torch's recorder, and each dimension does what it
says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench import jobs
from bench.jobs import dimensions

BASE = jobs.healthy(jobs.Layout(2, 4, 2, 2), 3)
STUCK = jobs.faulty(BASE, "stuck", 11)
UNTIMED: dict[str, Any] = {"timing": False}
BY_NAME = {dimension.name: dimension for dimension in jobs.DIMENSIONS}


def opened(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in raw["entries"] if e["time_discovered_completed_ns"] is None]


def test_an_entry_has_the_fields_of_the_recorder_in_its_order() -> None:
    timed, plain = (dict(jobs.dumps(STUCK, timing=timing))[0] for timing in (True, False))
    assert list(plain) == ["version", "pg_config", "comm_lib_version", "pg_status", "entries"]
    fields = list(plain["entries"][0])
    assert fields[:4] == ["frames", "record_id", "pg_id", "process_group"]
    assert fields[-3:] == ["retired", "timeout_ms", "is_p2p"] and "duration_ms" not in fields
    assert "duration_ms" in timed["entries"][0]
    states = {entry["state"] for entry in plain["entries"]}
    assert states == {"completed", "scheduled"}
    assert all(entry["time_discovered_started_ns"] is None for entry in plain["entries"])
    first_open = opened(timed)[0]
    assert first_open["state"] == "started" and first_open["time_discovered_started_ns"]


def test_the_status_of_a_group_goes_by_its_number_in_the_process() -> None:
    dumps = dict(jobs.dumps(STUCK, **UNTIMED))
    waiting = next(raw for raw in dumps.values() if opened(raw))
    call = opened(waiting)[0]
    status = waiting["pg_status"][str(call["pg_id"])]
    assert status["last_started_collective"] == -1
    assert status["last_enqueued_collective"] > status["last_completed_collective"]
    # Names are the same in all processes, numbers are not.
    names = {e["process_group"][0]: e["pg_id"] for e in waiting["entries"]}
    assert sorted(names.values()) == list(range(len(names))) != sorted(map(int, names))


def test_active_only_leaves_open_calls_without_a_gap() -> None:
    whole, active = (dict(jobs.dumps(STUCK, active_only=only, **UNTIMED)) for only in (False, True))
    assert active[STUCK.culprits[0]]["entries"] == []
    for rank, raw in active.items():
        assert raw["entries"] == opened(whole[rank])
        ids = [entry["record_id"] for entry in raw["entries"]]
        assert ids == list(range(ids[0], ids[0] + len(ids))) if ids else True
        assert raw["pg_status"] == whole[rank]["pg_status"]


def test_the_json_form_is_that_of_the_recorder(tmp_path: Path) -> None:
    folder = jobs.write(STUCK, tmp_path / "d", form="json", active_only=True, **UNTIMED)
    culprit = json.loads((folder / f"nccl_trace_rank_{STUCK.culprits[0]}").read_text())
    assert "entries" not in culprit
    assert {type(v) for s in culprit["pg_status"].values() for v in s.values()} == {str}
    raw = json.loads((folder / "nccl_trace_rank_0").read_text())
    assert raw["entries"][0]["time_discovered_started_ns"] == 0
    assert "frames" not in raw["entries"][0]


@pytest.mark.parametrize("where", ["node", "apart"])
@pytest.mark.parametrize("fault", ["stuck", "device", "size"])
def test_the_device_of_each_culprit_reaches_its_fault(fault: str, where: str) -> None:
    job = jobs.another(jobs.faulty(BASE, fault, 12), 12, where)
    assert len(job.culprits) == len(job.at) == 2
    assert jobs.Run(job).reached()
    if fault == "stuck":
        dumps = dict(jobs.dumps(job, **UNTIMED))
        assert not any(opened(dumps[rank]) for rank in job.culprits)
    first, second = job.culprits
    shared = [axis for axis, of in job.layout.groups().items() if axis != "world"
              and any({first, second} <= set(ranks) for ranks in of)]  # fmt: skip
    assert first // 8 == second // 8 if where == "node" else not shared


def test_a_watchdog_dumps_when_the_oldest_call_times_out(tmp_path: Path) -> None:
    folder = BY_NAME["no started times"].folder(STUCK, 11)
    oldest = min(e["time_created_ns"] for raw in folder.dumps.values() for e in opened(raw))
    assert folder.taken > oldest / 1e9 + 600
    copy = BY_NAME["copied files"].folder(STUCK, 11)
    ages = [next(f.write(tmp_path / str(i)).iterdir()).stat().st_mtime
            for i, f in enumerate((folder, copy))]  # fmt: skip
    assert ages[0] == pytest.approx(folder.taken) and ages[1] > ages[0] + 86_400


def changed(name: str, job: jobs.Job = STUCK) -> jobs.Folder:
    return BY_NAME[name].folder(job, 11)


def test_absent_ranks_are_innocent_unless_the_dimension_says_so() -> None:
    assert len(changed("an innocent rank absent").absent) == 1
    assert len(changed("half of the innocent absent").absent) == 7
    for name in ("an innocent rank absent", "half of the innocent absent"):
        assert changed(name).absent.isdisjoint(STUCK.culprits)
    both = changed("culprit and an innocent absent").absent
    assert len(both) == 2 and both > set(STUCK.culprits)
    assert len(changed("one dump of all").dumps) == 1


def test_files_of_other_attempts_and_jobs_are_an_hour_older() -> None:
    for name in ("dumps of two attempts", "dumps of two jobs"):
        newest = {max(e["time_created_ns"] for e in raw["entries"]) // 10**12
                  for raw in changed(name).dumps.values()}  # fmt: skip
        assert len(newest) == 2 and max(newest) - min(newest) == 4
    groups = {len(raw["pg_config"]) for raw in changed("dumps of two jobs").dumps.values()}
    assert len(groups) == 2


def test_a_second_dump_shows_whether_the_job_still_runs(tmp_path: Path) -> None:
    hangs, runs = changed("dumped twice"), changed("dumped twice", jobs.running(BASE, 11))
    assert hangs.second == hangs.dumps
    later = [len(runs.second[r]["entries"]) - len(runs.dumps[r]["entries"]) for r in runs.dumps]
    assert min(later) >= 0 < max(later)
    assert {p.parent.name for p in hangs.write(tmp_path / "d").rglob("nccl*")} == {
        "first",
        "second",
    }


def test_clocks_differ_by_node_and_damaged_files_are_innocent() -> None:
    plain, apart = changed("no started times"), changed("clocks apart")
    shifts = {apart.dumps[r]["entries"][0]["time_created_ns"]
              - plain.dumps[r]["entries"][0]["time_created_ns"] for r in plain.dumps}  # fmt: skip
    assert len(shifts) == 2 and all(abs(shift) <= 20e9 for shift in shifts)
    for name in ("a file of random bytes", "a file cut short"):
        folder = changed(name)
        assert len(folder.damaged) == 1 and folder.damaged.keys().isdisjoint(STUCK.culprits)
        assert folder.absent == set(folder.damaged)


def test_a_late_rank_is_no_fault() -> None:
    job = BY_NAME["one rank late"].job(BASE, "straggler", 11)
    folder = BY_NAME["one rank late"].folder(job, 11)
    newest = max(e["time_created_ns"] for r in folder.dumps.values() for e in r["entries"])
    assert job.culprits == () and folder.taken == pytest.approx(newest / 1e9)


def test_a_layout_without_a_place_for_a_second_culprit_has_no_case() -> None:
    flat = jobs.faulty(jobs.healthy(jobs.Layout(dp=4), 3), "stuck", 11)
    with pytest.raises(ValueError, match="no place"):
        jobs.another(flat, 11, "apart")


def test_the_draws_of_a_dimension_are_its_own() -> None:
    names = [dimension.name for dimension in jobs.DIMENSIONS]
    assert len(set(names)) == len(names)
    change = dimensions.without_innocents(0)
    folders = [jobs.folder_of(STUCK) for _ in range(2)]
    for folder in folders:
        change(folder, random.Random("x"))
    assert folders[0].absent == folders[1].absent
