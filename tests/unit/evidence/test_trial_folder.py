"""Trial folders are read back as evidence, and truncated lines are counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moediag import protocol
from moediag.diagnosis import diagnose
from moediag.errors import EvidenceError
from moediag.evidence import trial_folder
from moediag.evidence.events import RankLog
from moediag.evidence.exits import read_error_file
from moediag.evidence.model import (
    Evidence,
    ExitStatus,
    Group,
    HeldWeights,
    RankError,
    RankEvidence,
)
from moediag.evidence.trial_folder import read_trial
from moediag.protocol import ExpertRows
from moediag.result import Verdict
from tests.unit.evidence_builder import (
    aborted_on_gloo,
    died,
    events,
    expert_job,
    fsdp2_job,
    measured,
    write,
)

STARVED = {(1, 3)}

# Evidence of trials, with the expected verdict and culprits.
FOLDERS: dict[str, tuple[Evidence, Verdict, tuple[int, ...]]] = {
    "mismatch": (
        aborted_on_gloo(fsdp2_job(set(), STARVED).run(), 0),
        Verdict.COLLECTIVE_MISMATCH,
        (1,),
    ),
    "silent": (
        measured(fsdp2_job({(1, 3)}, {(1, 5)}).run(), ["lm_head.weight"]),
        Verdict.WRONG_GRADIENTS,
        (0, 1),
    ),
    "hang": (expert_job(set(), {3}).run(), Verdict.HANG, (1,)),
    "clean": (measured(fsdp2_job(set(), set()).run()), Verdict.CLEAN, ()),
    "crash": (
        died(fsdp2_job(set(), set()).run(), 1, RankError("KeyError", "'x'", "a.py:1 f", 99.0)),
        Verdict.CRASH,
        (1,),
    ),
}


@pytest.fixture(params=FOLDERS)
def case(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[Path, Evidence, Verdict, tuple[int, ...]]:
    evidence, verdict, culprits = FOLDERS[request.param]
    return write(evidence, tmp_path / "trial"), evidence, verdict, culprits


def test_trial_folder_round_trips(
    case: tuple[Path, Evidence, Verdict, tuple[int, ...]],
) -> None:
    folder, evidence, verdict, culprits = case
    read = read_trial(folder)
    for rank, seen in evidence.ranks.items():
        assert read.ranks[rank].collectives == seen.collectives
        assert read.ranks[rank].groups == seen.groups
        assert read.ranks[rank].tokens == seen.tokens
        assert read.ranks[rank].outcome == seen.outcome
        assert read.ranks[rank].exit == seen.exit
        assert read.ranks[rank].finished == seen.finished
    assert (read.stall, read.world_size, read.backend) == (evidence.stall, 2, "gloo")
    assert read.not_seen == ()
    found = diagnose(read)
    assert (found.verdict, found.culprits) == (verdict, culprits)
    assert found == diagnose(evidence)


def test_held_experts_are_read_back(tmp_path: Path) -> None:
    evidence = held(measured(fsdp2_job(set(), set()).run()))
    read = read_trial(write(evidence, tmp_path))
    for rank, seen in evidence.ranks.items():
        assert read.ranks[rank].weights == seen.weights
        assert read.ranks[rank].experts_used == seen.experts_used
        assert read.ranks[rank].notes == seen.notes
    assert diagnose(read) == diagnose(evidence)
    assert diagnose(read).verdict == Verdict.WRONG_WEIGHTS
    assert "as it was asked" in diagnose(read).notes


def held(evidence: Evidence) -> Evidence:
    """Both ranks hold the same half, recorded at two moments."""
    ranks = {}
    for rank, seen in evidence.ranks.items():
        rows = ExpertRows("layers.0.experts.up", [0, 1], [0, 1], 2, "plain", 0.5, 0.25, 4)
        loaded = HeldWeights("loaded", (rows,), (), 3, asked=2, whole=4)
        prepared = replace(loaded, when="prepared", unequal=("norm.weight",), left_out=True)
        ranks[rank] = replace(
            seen,
            weights=(loaded, prepared),
            experts_used={"layers.0.experts.up": 2},
            notes=("as it was asked",),
        )
    return replace(evidence, ranks=ranks)


@pytest.mark.parametrize("count", [10**12, -1, "many"])
def test_an_impossible_number_of_experts_is_not_read(tmp_path: Path, count: object) -> None:
    folder = write(measured(fsdp2_job(set(), set()).run()), tmp_path)
    row = {"fqn": "up", "held": [0], "declared": [0], "rows": 1, "experts": count}
    told = {"e": "weights", "when": "prepared", "experts": [row], "unequal": []}
    path = folder / protocol.events_file(0)
    path.write_text(path.read_text() + json.dumps(told) + "\n")
    assert read_trial(folder).ranks[0].weights == ()


def test_wrapper_prefixes_are_removed_from_held_experts(tmp_path: Path) -> None:
    folder = write(measured(fsdp2_job(set(), set()).run()), tmp_path)
    path = folder / protocol.events_file(0)
    name = "_fsdp_wrapped_module.layers.0._checkpoint_wrapped_module.experts.up"
    row = {"fqn": name, "held": [0], "declared": [-1], "rows": 1, "of a later version": 1}
    weights = {"e": "weights", "when": "prepared", "experts": [row], "unequal": [name]}
    used = {"e": "experts_used", "rows": {name: 1}}
    path.write_text(path.read_text() + json.dumps(weights) + "\n" + json.dumps(used) + "\n")
    seen = read_trial(folder).ranks[0]
    (told,) = seen.weights
    assert told.experts == (ExpertRows("layers.0.experts.up", [0], [-1], 1),)
    assert told.unequal == ("layers.0.experts.up",)
    assert (told.compared, told.asked, told.whole, told.left_out) == (0, 1, 0, False)
    assert seen.experts_used == {"layers.0.experts.up": 1}


ROW: dict[str, object] = {"fqn": "w", "held": [0, 1], "declared": [0, 1], "rows": 2}


@pytest.mark.parametrize(
    "event",
    [
        {"e": "weights"},
        {"e": "weights", "when": "prepared", "experts": 7},
        {"e": "weights", "when": "prepared", "experts": [{"fqn": "w"}]},
        {"e": "weights", "when": "prepared", "experts": [{**ROW, "held": [0]}]},
        {"e": "weights", "when": "prepared", "experts": [{**ROW, "held": ["x", "y"]}]},
        {"e": "weights", "when": "prepared", "experts": [{**ROW, "first": "x"}]},
        {"e": "weights", "when": "prepared", "experts": [ROW], "asked": "two"},
        {"e": "experts_used", "rows": [1]},
        {"e": "experts_used", "rows": {"w": "many"}},
        {"e": "note"},
    ],
    ids=str,
)
def test_invalid_held_experts_are_counted_as_unreadable(
    tmp_path: Path, event: dict[str, object]
) -> None:
    folder = write(measured(fsdp2_job(set(), set()).run()), tmp_path)
    path = folder / protocol.events_file(1)
    path.write_text(path.read_text() + json.dumps(event) + "\n")
    read = read_trial(folder)
    assert "rank 1: 1 unreadable line of its recorder log" in read.ranks[1].not_seen
    assert read.ranks[1].weights == ()
    assert diagnose(read).verdict == Verdict.CLEAN


def test_a_truncated_log_is_read_up_to_the_last_whole_line(tmp_path: Path) -> None:
    folder = write(fsdp2_job(set(), STARVED).run(), tmp_path)
    path = folder / protocol.events_file(1)
    whole = path.read_bytes()
    complete = len(read_trial(folder).ranks[1].collectives)
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        seen = read_trial(folder).ranks[1]
        assert len(seen.collectives) <= complete
        assert seen.collectives == read_trial(folder).ranks[1].collectives
        diagnose(read_trial(folder))
    path.write_bytes(whole[:-20])
    assert "rank 1: its last event (the recorder log is truncated)" in (
        read_trial(folder).ranks[1].not_seen
    )


def test_unreadable_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    folder = write(measured(fsdp2_job(set(), set()).run()), tmp_path)
    path = folder / protocol.events_file(0)
    lines = path.read_text().splitlines(keepends=True)
    junk = ["{not json}\n", "\xff\xfe\n", "[1, 2]\n", '{"e": "collective", "n": "x"}\n', '"text"\n']
    later = '{"e": "a kind of a later version", "x": 1}\n'
    path.write_text("".join([*lines[:3], *junk, later, *lines[3:]]))
    seen = read_trial(folder).ranks[0]
    assert "rank 0: 5 unreadable lines of its recorder log" in seen.not_seen
    assert len(seen.collectives) == 7 and seen.finished
    assert diagnose(read_trial(folder)).verdict == Verdict.CLEAN


def test_a_lost_name_list_is_unknown_and_not_a_divergence(tmp_path: Path) -> None:
    folder = write(measured(fsdp2_job(set(), set()).run()), tmp_path)
    path = folder / protocol.events_file(0)
    path.write_text(
        "".join(li for li in path.read_text().splitlines(True) if '"e": "names"' not in li)
    )
    read = read_trial(folder)
    assert all(c.parameters is None for c in read.ranks[0].collectives)
    found = diagnose(read)
    assert (found.verdict, found.notes) == (Verdict.CLEAN, ())


def test_equal_name_lists_share_one_object(tmp_path: Path) -> None:
    read = read_trial(write(fsdp2_job(set(), set()).run(), tmp_path))
    first, second = (read.ranks[r].collectives[0].parameters for r in (0, 1))
    assert first is second


def test_missing_files_are_noted(tmp_path: Path) -> None:
    folder = write(fsdp2_job(set(), STARVED).run(), tmp_path)
    (folder / protocol.events_file(1)).unlink()
    (folder / "launch.json").unlink()
    read = read_trial(folder)
    assert sorted(read.ranks) == [0, 1]
    assert read.ranks[1].not_seen == ("rank 1: its collectives (there is no recorder log)",)
    assert read.not_seen == ("exit codes and signals (no launch.json)",)
    assert diagnose(read).verdict == Verdict.INCONCLUSIVE


def test_one_process_needs_no_log_of_collectives(tmp_path: Path) -> None:
    trial = write(measured(fsdp2_job(set(), set()).run()), tmp_path)
    protocol.write_json(trial / protocol.TRIAL_FILE, {"name": "one", "world_size": 1})
    for rank in (0, 1):
        for path in trial.glob(f"rank-{rank}*"):
            path.unlink()
    (trial / "launch.json").write_text('{"exits": {}}')
    assert read_trial(trial).ranks[0].not_seen == ()


@pytest.mark.parametrize("name", ["launch.json", "trial.json", "rank-0.outcome.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', "null"])
def test_broken_files_are_noted_and_skipped(tmp_path: Path, name: str, content: str) -> None:
    folder = write(measured(fsdp2_job(set(), set()).run()), tmp_path)
    (folder / name).write_text(content)
    read = read_trial(folder)
    assert read.world_size == 2
    said = " ".join((*read.not_seen, *read.ranks[0].not_seen))
    if name == "launch.json":
        assert "launch.json is unreadable" in said
    if name == "rank-0.outcome.json":
        assert "outcome file is unreadable" in said
        assert diagnose(read).verdict == Verdict.INCONCLUSIVE


def test_an_empty_folder_is_inconclusive_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    assert diagnose(read_trial(tmp_path)).verdict == Verdict.INCONCLUSIVE
    with pytest.raises(EvidenceError):
        read_trial(tmp_path / "nowhere")


def test_the_older_log_segment_is_read_first(tmp_path: Path) -> None:
    evidence = fsdp2_job(set(), set(), steps=2).run()
    folder = write(evidence, tmp_path)
    path = folder / protocol.events_file(0)
    lines = path.read_text().splitlines(True)
    preamble = [li for li in lines if '"e": "names"' in li or '"e": "group"' in li]
    at = next(i for i, li in enumerate(lines) if '"n": 7,' in li)
    (folder / protocol.older_events_file(0)).write_text("".join(lines[:at]))
    path.write_text("".join([lines[0], *preamble, *lines[at:]]))
    assert read_trial(folder).ranks[0].collectives == evidence.ranks[0].collectives
    (folder / protocol.older_events_file(0)).unlink()
    seen = read_trial(folder)
    assert seen.ranks[0].collectives[0].index == 7
    assert diagnose(measured(seen)).notes == ()


def test_wrapper_prefixes_are_removed_from_names(tmp_path: Path) -> None:
    folder = write(fsdp2_job(set(), set()).run(), tmp_path)
    path = folder / protocol.events_file(0)
    lines = path.read_text().replace(
        "model.layers.1.", "model.layers.1._checkpoint_wrapped_module."
    )
    path.write_text(lines.replace("lm_head.", "_fsdp_wrapped_module.lm_head."))
    own, other = (read_trial(folder).ranks[r].collectives for r in (0, 1))
    assert [c.parameters for c in own] == [c.parameters for c in other]


def test_order_of_deaths_and_exits_are_read(tmp_path: Path) -> None:
    folder = write(replace(fsdp2_job(set(), set()).run(), deaths=(1, 0)), tmp_path)
    raw = json.loads((folder / "launch.json").read_text())
    raw["exits"]["1"] = {"code": None, "signal": "SIGABRT", "by_us": False}
    (folder / "launch.json").write_text(json.dumps(raw))
    read = read_trial(folder)
    assert read.deaths == (1, 0)
    assert read.ranks[1].exit == ExitStatus(None, "SIGABRT", False)


@pytest.mark.parametrize(("written", "read"), [(2, 2), (0, 0), ("x", None), (None, None)])
def test_the_kills_for_memory_are_read(tmp_path: Path, written: object, read: int | None) -> None:
    folder = write(fsdp2_job(set()).run(), tmp_path)
    raw = {**json.loads((folder / "launch.json").read_text()), "oom_kills": written}
    (folder / "launch.json").write_text(json.dumps(raw))
    assert read_trial(folder).oom_kills == read


def test_no_gradient_phase_and_error_events_are_read(tmp_path: Path) -> None:
    folder = write(fsdp2_job(set()).run(), tmp_path)
    more = [
        {"e": "names", "id": 99, "fqns": ["a.weight"]},
        {"e": "no_gradient", "step": 2, "names": 99},
        {"e": "phase", "name": "step 2", "step": 2},
        {"e": "not_seen", "text": "splits of old torch"},
        {"e": "error", "t": 5.0, "type": "KeyError", "message": "'x'", "where": "a.py:1 f"},
    ]
    with (folder / protocol.events_file(0)).open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in more)
    seen = read_trial(folder).ranks[0]
    assert seen.no_gradient == {2: ("a.weight",)}
    assert seen.last_phase == "step 2"
    assert seen.not_seen == ("splits of old torch",)
    assert seen.error == RankError("KeyError", "'x'", "a.py:1 f", 5.0)


def test_the_builder_writes_only_protocol_events() -> None:
    seen = fsdp2_job({(1, 3)}).run().ranks[0]
    assert {e["e"] for e in events(seen, 1)} <= set(protocol.EVENT_KINDS)


@pytest.mark.parametrize(
    ("group", "label"),
    [
        (Group("7", (0, 1), axis="dp_shard", desc="mesh_dp_shard"), "dp_shard"),
        (Group("0", (0, 1), desc="world"), "world"),
        (Group("1", (0, 1), desc="undefined"), "ranks 0, 1"),
        (Group("1", (3, 0, 1, 2)), "ranks 0-3"),
        (Group("1", (0, 2, 4)), "ranks 0, 2, 4"),
        (Group("1", ()), "1"),
    ],
)
def test_group_label_is_its_axis_description_or_ranks(group: Group, label: str) -> None:
    assert group.label == label


@pytest.mark.parametrize(
    ("test", "local_ranks", "single"),
    [
        ("rank == 0", [None, None], 0),
        ("local_rank == 0", [2, 2], 0),
        ("local_rank == 0", [1, 1], None),
        ("local_rank == 0", [2, None], None),
    ],
)
def test_conditions_around_the_lines_that_led_to_a_call(
    tmp_path: Path, test: str, local_ranks: list[int | None], single: int | None
) -> None:
    """There is no stack of a rank that ended, but its log has the lines. A local rank is a global
    one only where all ranks are known to be on one node."""
    train = f"if {test}:\n    finish()\n"
    for rank, count in enumerate(local_ranks):
        protocol.write_json(tmp_path / protocol.pid_file(rank), {"local_ranks": count})
    log: list[dict[str, object]] = [
        {"e": "start", "t": 0.0, "rank": 0, "world_size": 2},
        {"e": "file", "t": 0.0, "path": "/me/train.py"},
        {"e": "names", "t": 0.0, "id": 0, "fqns": ["train.py:2 <module>"]},
        {"e": "collective", "t": 1.0, "n": 0, "group": "0", "k": 0, "op": "barrier",
         "site": "utils.py:9 wait", "callers": 0},
    ]  # fmt: skip
    (tmp_path / protocol.events_file(0)).write_text("".join(json.dumps(e) + "\n" for e in log))
    (tmp_path / "capture").mkdir()
    protocol.write_json(
        tmp_path / "capture" / "source.json", {"files": {"/me/train.py": train}, "lost": {}}
    )
    seen = read_trial(tmp_path).ranks[0]
    assert seen.collectives[0].callers == ("train.py:2 <module>",)
    (condition,) = seen.conditions["train.py:2 <module>"]
    assert (condition.text, condition.singles) == (f"if {test}", single)


CHAIN = """Traceback (most recent call last):
  File "/me/data.py", line 3, in load
    return rows[key]
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/me/train.py", line 9, in <module>
    main()
  File "/me/train.py", line 5, in main
    raise ValueError("no row") from error
ValueError: no row
"""


@pytest.mark.parametrize(
    ("text", "after"),
    [(CHAIN, "KeyError: 'x' at data.py:3 load"), (CHAIN[CHAIN.rindex("Tra") :], "")],
)
def test_a_crash_has_the_traceback_and_what_it_was_raised_from(
    tmp_path: Path, text: str, after: str
) -> None:
    extra = {"py_callstack": text, "timestamp": "5"}
    message = {"message": "ValueError: no row", "extraInfo": extra}
    protocol.write_json(tmp_path / protocol.error_file(0), {"message": message})
    error = read_error_file(tmp_path / protocol.error_file(0))
    evidence = Evidence(1, {0: RankEvidence(0, error=error, exit=ExitStatus(code=1))})
    found = diagnose(replace(evidence, watched=True))
    assert found.stacks[0] == ("main (train.py:5)", "<module> (train.py:9)")
    assert "raised ValueError at train.py:5 main: no row" in found.cause
    assert (f"(after {after})" in found.cause) == bool(after)


def test_a_crash_without_a_traceback_has_no_frames(tmp_path: Path) -> None:
    protocol.write_json(tmp_path / protocol.error_file(0), {"message": "ValueError: no row"})
    error = read_error_file(tmp_path / "rank-0.error.json")
    assert error is not None and (error.frames, error.after) == ((), "")


@pytest.mark.parametrize(
    ("started", "runs", "earlier"),
    [
        ((0.0, 0.0), ("a", "b"), []),  # not known
        ((5000.0, 5000.0), ("a", "a"), []),
        ((5000.0, 5000.0), ("", "b"), []),
        ((5000.0, 5001.0), ("a", "b"), [0]),
        ((5000.0, 5700.0), ("", ""), []),  # it ended 600 s before the other began
        ((5000.0, 5700.5), ("", ""), [0]),
        ((0.0, 9000.0), ("a", "b"), []),
    ],
)
def test_records_that_an_earlier_run_left(
    started: tuple[float, float], runs: tuple[str, str], earlier: list[int]
) -> None:
    logs = {
        rank: RankLog(rank, run=run, started=began, last=began + 100)
        for rank, (run, began) in enumerate(zip(runs, started, strict=True))
    }
    assert list(trial_folder._of_earlier_runs(logs)) == earlier
