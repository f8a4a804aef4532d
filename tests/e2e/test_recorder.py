"""Two gloo ranks train with the recorder: its record is correct, and their numbers are the same as
without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moediag.evidence import device_progress, flight_dump
from moediag.evidence.events import read_log
from moediag.protocol import EVENT_KINDS, OPS, Heartbeat, flight_file, heartbeat_file

pytestmark = pytest.mark.e2e
JOB = Path(__file__).parents[1] / "victims" / "recorded_job.py"
# The Python of another stack, to hold the recorder to its torch (reports/torch-releases.md).
RANK_PYTHON = os.environ.get("MOEDIAG_TEST_RANK_PYTHON", sys.executable)
SCENES = (
    "on", "off", "divergent", "silent", "checkpoint", "ddp", "fsdp1", "hsdp", "calls", "flight",
    "kill", "disk-full", "broken", "uninstall",
)  # fmt: skip
EXPERT = ("weight", "bias")


@dataclass
class Rank:
    """One rank's log, names resolved."""

    folder: Path
    events: list[dict[str, Any]]
    exit: int
    result: dict[str, Any] | None
    heartbeat: Heartbeat | None

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["e"] == kind]

    @property
    def collectives(self) -> list[dict[str, Any]]:
        return self.of("collective")

    @property
    def open(self) -> list[int]:
        done = {event["n"] for event in self.of("done")}
        return [event["n"] for event in self.collectives if event["n"] not in done]


def read(folder: Path, rank: int) -> Rank:
    path = folder / f"rank-{rank}.events.jsonl"
    events = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    names = {event["id"]: event["fqns"] for event in events if event["e"] == "names"}
    for event in events:
        for field in ("carries", "of", "names"):
            if event["e"] != "names" and event.get(field) is not None:
                event[field] = names[event[field]]
    result = folder / f"rank-{rank}.result.json"
    return Rank(
        folder,
        events,
        json.loads((folder / "exits.json").read_text())[rank],
        json.loads(result.read_text()) if result.exists() else None,
        Heartbeat.read(folder / heartbeat_file(rank)),
    )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Rank]]:
    folder = tmp_path_factory.mktemp("recorder")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run(
        [RANK_PYTHON, str(JOB), str(folder), *SCENES], env=environment, timeout=300, check=True
    )
    return lambda name: [read(folder / name, rank) for rank in range(2)]


def layer(number: int, without: tuple[int, ...] = ()) -> list[str]:
    names = [f"layers.{number}.norm.{x}" for x in EXPERT] + [f"layers.{number}.mlp.gate.weight"]
    for expert in range(4):
        if expert not in without:
            names += [f"layers.{number}.mlp.experts.{expert}.{x}" for x in EXPERT]
    return names


def test_recording_does_not_change_the_results(scene: Callable[[str], list[Rank]]) -> None:
    off = [rank.result for rank in scene("off")]
    assert all(off)
    for name in ("on", "disk-full", "broken"):
        ranks = scene(name)
        assert [rank.exit for rank in ranks] == [0, 0]
        assert [rank.result for rank in ranks] == off, name
    assert [r["losses"] for r in off if r] == [
        rank.result["losses"] for rank in scene("uninstall") if rank.result
    ]


def test_a_healthy_step_has_the_expected_schedule(scene: Callable[[str], list[Rank]]) -> None:
    root = ["embed.weight", "embed.bias"]
    expected = [
        ("all_gather", "forward", "", root, 36),
        ("all_gather", "forward", "layers.0", layer(0), 168),
        ("all_gather", "forward", "layers.1", layer(1), 168),
        ("all_gather", "backward", "layers.1", layer(1), 168),
        # Prefetched while layer 1 runs, yet layer 0's.
        ("all_gather", "backward", "layers.0", layer(0), 168),
        ("reduce_scatter", "backward", "layers.1", layer(1), 336),
        ("reduce_scatter", "backward", "layers.0", layer(0), 336),
        ("reduce_scatter", "backward", "", root, 72),
        ("all_reduce", "other", "", None, 24),  # the norm, for clipping
    ]
    for rank in scene("on"):
        for step in (1, 2, 3):
            seen = [
                (e["op"], e["phase"], e["module"], e["carries"], e["numel_in"])
                for e in rank.collectives
                if e["step"] == step
            ]
            assert sorted(map(repr, seen)) == sorted(map(repr, expected))
            assert [e[:3] for e in seen if e[1] == "forward"] == [e[:3] for e in expected[:3]]
        assert [e["n"] for e in rank.collectives] == list(range(27))
        assert [e["k"] for e in rank.collectives] == list(range(27))
        assert rank.open == []
        for e in rank.collectives:
            assert e["op"] in OPS
            assert e["carries"] == e["of"]
            if e["carries"] is not None:
                assert len(e["sizes"]) == len(e["carries"])
                whole = e["numel_in"] * (2 if e["op"] == "all_gather" else 1)
                assert sum(e["sizes"]) == whole, "this model's sizes need no padding"
            assert e["site"].startswith("recorded_job.py:"), e["site"]


def test_the_log_has_first_and_last_events(scene: Callable[[str], list[Rank]]) -> None:
    for number, rank in enumerate(scene("on")):
        assert rank.events[0]["e"] == "start"
        assert rank.events[-1]["e"] == "end"
        assert (rank.events[0]["rank"], rank.events[0]["world_size"]) == (number, 2)
        assert {event["e"] for event in rank.events} <= set(EVENT_KINDS)
        assert rank.of("not_seen") == []
        (group,) = rank.of("group")
        assert (group["axis"], group["ranks"], group["backend"]) == ("dp_shard", [0, 1], "gloo")
        assert rank.heartbeat is not None
        assert (rank.heartbeat.state, rank.heartbeat.step) == ("finished", 3)


def test_tokens_are_counted_once_per_forward(scene: Callable[[str], list[Rank]]) -> None:
    for name in ("on", "checkpoint", "ddp", "fsdp1"):
        for rank in scene(name):
            seen = [(e["step"], e["layer"]) for e in rank.of("tokens")]
            assert seen == [(s, f"layers.{n}.mlp") for s in (1, 2, 3) for n in (0, 1)]
            assert all(sum(e["counts"]) == 2 * 64 for e in rank.of("tokens"))


def test_a_starved_expert_is_missing_in_the_sent_parameters(
    scene: Callable[[str], list[Rank]],
) -> None:
    """The mismatch kills a rank with SIGABRT inside the reduce-scatter: the log has it."""
    healthy, starved = scene("divergent")
    assert -6 in (healthy.exit, starved.exit), "gloo aborts where sizes differ"
    last = [rank.collectives[-1] for rank in (healthy, starved)]
    assert [e["op"] for e in last] == ["reduce_scatter"] * 2
    assert [e["carries"] for e in last] == [layer(1), layer(1, without=(3,))]
    assert [e["of"] for e in last] == [layer(1)] * 2
    assert last[0]["numel_in"] - last[1]["numel_in"] == 72
    assert starved.of("tokens")[1]["counts"][3] == 0
    assert healthy.of("tokens")[1]["counts"][3] > 0
    assert last[0]["n"] in healthy.open
    assert last[1]["n"] in starved.open
    for rank in (healthy, starved):
        assert rank.heartbeat is not None
        assert rank.of("error") if rank.exit == 1 else rank.heartbeat.state == "in-collective"


def test_different_parameters_of_equal_size_are_recorded(
    scene: Callable[[str], list[Rank]],
) -> None:
    ranks = scene("silent")
    assert [rank.exit for rank in ranks] == [0, 0]
    wire = []
    for rank in ranks:
        (event,) = [
            e
            for e in rank.collectives
            if e["op"] == "reduce_scatter" and e["module"] == "layers.1" and e["step"] == 1
        ]
        wire.append(event)
    assert wire[0]["numel_in"] == wire[1]["numel_in"]
    assert [e["carries"] for e in wire] == [layer(1, without=(1,)), layer(1, without=(3,))]
    for rank, expert in zip(ranks, (1, 3), strict=True):
        first = rank.of("no_gradient")[0]
        missing = [f"layers.1.mlp.experts.{expert}.{x}" for x in EXPERT]
        assert (first["step"], first["names"]) == (1, missing)


def test_no_missing_gradient_is_reported_if_all_arrived(scene: Callable[[str], list[Rank]]) -> None:
    for name in ("on", "fsdp1", "hsdp"):
        assert all(rank.of("no_gradient") == [] for rank in scene(name))


def test_replicated_and_flat_parameters_have_names(scene: Callable[[str], list[Rank]]) -> None:
    for rank in scene("hsdp"):
        axes = [group["axis"] for group in rank.of("group")]
        assert axes == [None, "dp_replicate"]  # all ranks make the groups of the mesh
        backward = [e for e in rank.collectives if e["phase"] == "backward" and e["step"] == 1]
        assert [(e["op"], e["module"]) for e in backward] == [
            ("all_reduce", "layers.1"),
            ("all_reduce", "layers.0"),
            ("all_reduce", ""),
        ]
        assert backward[0]["carries"] == layer(1)
    for rank in scene("fsdp1"):
        ops = [(e["op"], e["phase"], len(e["carries"])) for e in rank.collectives if e["carries"]]
        assert ops[:2] == [("all_gather", "forward", 24), ("reduce_scatter", "backward", 24)]


def test_collectives_issued_by_ddp_in_cpp_are_recorded(scene: Callable[[str], list[Rank]]) -> None:
    for rank in scene("ddp"):
        reduced = [e for e in rank.collectives if e["op"] == "all_reduce"]
        assert {e["phase"] for e in reduced} == {"backward"}
        for step in (1, 2, 3):
            # find_unused_parameters: 24 flags beside the gradients
            assert sum(e["numel_in"] for e in reduced if e["step"] == step) == 744 + 24
        assert rank.open == []


def test_every_kind_of_call_is_recorded(scene: Callable[[str], list[Rank]]) -> None:
    for number, rank in enumerate(scene("calls")):
        assert rank.exit == 0
        ops = [e["op"] for e in rank.collectives]
        p2p = ["send"] if number == 0 else ["recv"]
        assert ops == [
            "all_gather", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather",
            "scatter", "all_to_all", *p2p, "send", "recv", "barrier", "all_reduce",
            "all_reduce", "all_reduce",
        ]  # fmt: skip
        peers = [e["peer"] for e in rank.collectives]
        other = 1 - number
        assert peers[3:11] == [1, 1, 0, 1, None, other, other, other]
        exchange = rank.collectives[7]
        assert exchange["splits_in"] == exchange["splits_out"] == [[1, 2], [2, 3]][number]
        assert rank.collectives[2]["reduce"] == "max"
        assert [e["async"] for e in rank.collectives[-3:]] == [True, True, True]
        assert not rank.collectives[0]["async"]
        assert rank.open == [14], "only the one that nobody waited for"


def test_a_killed_rank_leaves_its_record(scene: Callable[[str], list[Rank]]) -> None:
    survivor, killed = scene("kill")
    assert killed.exit == -9
    assert killed.of("end") == []
    last = killed.collectives[-1]
    # The second step begins with its forward.
    assert (last["op"], last["step"], last["async"]) == ("all_reduce", 1, True)
    assert last["n"] in killed.open
    (error,) = survivor.of("error")
    assert error["type"] == "RuntimeError"
    assert error["where"].startswith("recorded_job.py:")


def test_a_failing_recorder_is_reported(scene: Callable[[str], list[Rank]]) -> None:
    for rank in scene("broken"):
        (text,) = [e["text"] for e in rank.of("not_seen")]
        assert text.startswith("collectives: the recorder failed")
        assert {e["step"] for e in rank.collectives} == {1}
    for rank in scene("disk-full"):
        assert {e["step"] for e in rank.collectives} == {1}
        assert rank.heartbeat is not None
        assert rank.heartbeat.step == 3, "the pulse goes on"


def test_uninstall_restores_every_attribute(scene: Callable[[str], list[Rank]]) -> None:
    for rank in scene("uninstall"):
        assert rank.result is not None
        assert (rank.result["changed"], rank.result["added"]) == ([], [])
        assert len(rank.collectives) == 27, "nothing is recorded after it"


def test_the_flight_recorder_is_dumped_on_request(scene: Callable[[str], list[Rank]]) -> None:
    for number, rank in enumerate(scene("flight")):
        assert rank.result == {"answered": True}
        records = json.loads((rank.folder / flight_file(number)).read_text())
        assert any(entry["input_sizes"] == [[7]] for entry in records["entries"])


def test_flight_recorder_and_our_log_have_the_same_calls(
    scene: Callable[[str], list[Rank]],
) -> None:
    """gloo's dumps have no device state, so they get NCCL's name here. This tests that calls are
    matched one by one, with real dumps of torch."""
    for number, rank in enumerate(scene("flight")):
        calls = read_log(rank.folder, number).collectives
        records = json.loads((rank.folder / flight_file(number)).read_text())
        assert device_progress.told(calls, flight_dump.read(records), number).calls == tuple(calls)
        for entry in records["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
            entry["state"] = "completed" if entry["retired"] else "started"
        told = device_progress.told(calls, flight_dump.read(records), number)
        assert told.not_seen == ()
        sent = [call for call in told.calls if call.members is None]  # not the making of groups
        assert len(sent) >= 7 and {call.on_device for call in sent} == {"completed"}
        assert {call.group for call in sent} == {"0", "1"}
