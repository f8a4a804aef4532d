"""Matching of torch's Flight Recorder of NCCL with our own log, call by call."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moediag import protocol
from moediag.diagnosis import diagnose
from moediag.evidence import device_progress, flight_dump
from moediag.evidence.model import Collective, Evidence
from moediag.evidence.trial_folder import read_trial
from moediag.launch.capture import machine
from tests.unit.device_dumps import dump, on_nccl
from tests.unit.evidence_builder import fsdp2_job, write

JOB = on_nccl(fsdp2_job(set(), set()).whole())
CALLS = JOB.ranks[0].collectives


def told(calls: tuple[Collective, ...], raw: dict[str, Any]) -> list[str]:
    found = device_progress.told(calls, flight_dump.read(raw), 0)
    assert found.not_seen == ()
    return [c.on_device for c in found.calls]


def test_calls_get_the_state_of_the_device() -> None:
    found = device_progress.told(CALLS, flight_dump.read(dump(CALLS, done=3)), 0)
    assert [c.on_device for c in found.calls] == ["completed"] * 3 + ["started"] + ["issued"] * 3
    assert [c.completed for c in found.calls] == [True] * 3 + [False] * 4
    assert [c.started for c in found.calls] == [True] * 4 + [False] * 3
    assert [c.parameters for c in found.calls] == [c.parameters for c in CALLS]
    assert found.library == "2.29.3"


def test_calls_completed_in_our_log_stay_completed() -> None:
    seen = (replace(CALLS[0], completed=True), *CALLS[1:])
    assert told(seen, dump(CALLS, done=0))[:2] == ["completed", "issued"]


def test_calls_of_a_group_complete_in_order() -> None:
    raw = dump(CALLS, done=4)
    raw["entries"][1]["state"] = "scheduled"  # its end was not polled
    assert told(CALLS, raw)[:5] == ["completed"] * 4 + ["started"]


def test_a_wrapped_ring_buffer_matches_the_last_calls() -> None:
    assert told(CALLS, dump(CALLS, done=5, first=3)) == ["", "", ""] + ["completed"] * 2 + [
        "started", "issued",
    ]  # fmt: skip


def test_a_call_that_never_left_the_host_has_no_state() -> None:
    """The rank is inside the call, before NCCL accepted it."""
    assert told(CALLS, dump(CALLS[:-1], done=6)) == ["completed"] * 6 + [""]


def test_calls_before_our_recorder_are_skipped() -> None:
    late = tuple(replace(c, index=i, position=i) for i, c in enumerate(CALLS[2:]))
    assert told(late, dump(CALLS, done=3))[:3] == ["completed", "started", "issued"]


def test_collectives_in_one_batch_are_matched() -> None:
    raw = dump(CALLS, done=2)
    first, second = raw["entries"][0], raw["entries"][1]
    for entry in raw["entries"][1:]:
        entry["collective_seq_id"] -= 1
    first["state"] = second["state"] = "scheduled"  # only the entry that closes a batch completes
    closing = {**second, "profiling_name": "nccl:all_gather_into_tensor_coalesced",
               "input_sizes": [], "output_sizes": [], "state": "completed"}  # fmt: skip
    raw["entries"].insert(2, closing)
    for index, entry in enumerate(raw["entries"]):
        entry["record_id"] = index
    assert told(CALLS, raw) == ["completed"] * 2 + ["started"] + ["issued"] * 4


def test_a_different_schedule_is_not_matched() -> None:
    other = [replace(c, numel_in=c.numel_in + 1, numel_out=c.numel_out + 3) for c in CALLS]
    found = device_progress.told(CALLS, flight_dump.read(dump(other, done=3)), 0)
    assert found.calls == CALLS
    assert len(found.not_seen) == 1 and "rank 0: how far its device is" in found.not_seen[0]


def test_gloo_has_no_device() -> None:
    raw = dump(CALLS, done=7)
    for entry in raw["entries"]:
        entry["profiling_name"] = entry["profiling_name"].replace("nccl:", "gloo:")
    assert told(CALLS, raw) == [""] * 7


# ------------------------------------------------------------------------ files


def trial(tmp_path: Path, evidence: Evidence = JOB) -> Path:
    return write(evidence, tmp_path / "t")


def put(folder: Path, rank: int, raw: dict[str, Any], by_watchdog: bool = False) -> None:
    if by_watchdog:
        (folder / protocol.watchdog_dump(rank)).write_bytes(pickle.dumps(raw, protocol=2))
    else:
        (folder / protocol.flight_file(rank)).write_text(json.dumps(raw))


def states(folder: Path, rank: int = 0) -> list[str]:
    return [c.on_device for c in read_trial(folder).ranks[rank].collectives]


@pytest.mark.parametrize("by_watchdog", [False, True])
def test_a_dump_in_the_trials_folder_is_evidence_of_the_trial(
    tmp_path: Path, by_watchdog: bool
) -> None:
    folder = trial(tmp_path)
    put(folder, 0, dump(CALLS, done=3), by_watchdog)
    assert states(folder)[2:5] == ["completed", "started", "issued"]
    assert set(states(folder, 1)) == {""}
    assert read_trial(folder).ranks[0].versions["nccl"] == "2.29.3"


def test_a_requested_dump_is_preferred_to_the_watchdogs(tmp_path: Path) -> None:
    folder = trial(tmp_path)
    put(folder, 0, dump(CALLS, done=1), by_watchdog=True)
    put(folder, 0, dump(CALLS, done=3))
    assert states(folder).count("completed") == 3
    put(folder, 0, {"version": "2.10", "pg_config": {}, "entries": []})
    assert states(folder).count("completed") == 1


def test_a_truncated_dump_is_noted(tmp_path: Path) -> None:
    folder = trial(tmp_path)
    data = pickle.dumps(dump(CALLS, done=3), protocol=2)
    (folder / protocol.watchdog_dump(0)).write_bytes(data[: len(data) // 2])
    evidence = read_trial(folder)
    assert not evidence.devices_known
    assert any("rank-flight-dump-0" in text for text in evidence.ranks[0].not_seen)


def test_device_state_is_unknown_without_dumps(tmp_path: Path) -> None:
    evidence = read_trial(trial(tmp_path))
    assert not evidence.devices_known
    assert not any("device" in t for seen in evidence.ranks.values() for t in seen.not_seen)


def test_machine_information_at_the_stall_is_attached(tmp_path: Path) -> None:
    folder = trial(tmp_path)
    assert read_trial(folder).attached == {}
    (folder / "capture").mkdir()
    (folder / "capture" / machine.SMI_FILE).write_text("== GPUs\n" + "x" * 30_000)
    (folder / "capture" / machine.RAS_FILE).write_text("lags behind\n")
    found = diagnose(read_trial(folder))
    assert found.attached["NCCL's RAS"] == "lags behind"
    assert len(found.attached["nvidia-smi"]) < 21_000


def test_the_nccl_version_is_reported_if_the_ranks_used_it(tmp_path: Path) -> None:
    folder = trial(tmp_path)
    put(folder, 0, dump(CALLS, done=3))
    assert read_trial(folder).nccl == "2.29.3"
    on_gloo = write(replace(fsdp2_job(set(), set()).whole(), backend="gloo"), tmp_path / "g")
    assert read_trial(on_gloo).nccl == ""
