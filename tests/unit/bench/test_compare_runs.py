"""`bench.compare_runs`: equal runs are equal, and each kind of difference is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.compare_runs import compare, main

GROUPS = [
    {"e": "group", "t": 1.0, "group": "g7", "desc": "", "axis": "ep", "ranks": [0, 1]},
    {"e": "group", "t": 1.0, "group": "g9", "desc": "", "axis": "dp_shard", "ranks": [0, 1]},
]


def call(n: int, op: str, group: str = "g7", numel: int = 8) -> dict[str, Any]:
    return {
        "e": "collective", "t": float(n), "n": n, "group": group, "k": n, "op": op,
        "numel_in": numel, "numel_out": numel, "dtype": "float32", "phase": "forward", "step": 1,
    }  # fmt: skip


def run(
    folder: Path,
    calls: list[dict[str, Any]],
    verdict: str = "clean",
    culprits: tuple[int, ...] = (),
    trials: tuple[str, ...] = ("unfixed",),
    rename: str = "g7",
) -> Path:
    """A directory as `moediag run --all` writes it, with one scenario and two ranks a trial."""
    scenario = folder / "s"
    for trial in trials:
        (scenario / trial).mkdir(parents=True)
        lines = [json.dumps(event) for event in (*GROUPS, *calls)]
        for rank in (0, 1):
            path = scenario / trial / f"rank-{rank}.events.jsonl"
            path.write_text("\n".join(lines).replace("g7", rename) + "\n")
    results = [
        {"evidence": t, "verdict": verdict, "culprits": list(culprits), "met": True} for t in trials
    ]
    (scenario / "result.json").write_text(json.dumps({"scenario": "s", "trials": results}))
    return folder


CALLS = [call(0, "all_gather"), call(1, "reduce_scatter"), call(2, "barrier", numel=0)]


def test_equal_runs_with_different_group_names_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = run(tmp_path / "a", CALLS), run(tmp_path / "b", CALLS, rename="g8")
    found = compare(before, after)
    assert (found.scenarios, found.trials, found.met) == (1, 1, 1)
    assert (found.schedules, found.calls, found.differences) == (2, 6, [])
    assert main([str(before), str(after)]) == 0
    assert "2 ranks with 6 recorded calls: 0 differences" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("calls", "reported"),
    [
        ([CALLS[1], CALLS[0], CALLS[2]], "rank 1: call 0: "),
        ([CALLS[0], call(1, "all_reduce"), CALLS[2]], "rank 1: call 1: "),
        ([CALLS[0], call(1, "reduce_scatter", numel=9), CALLS[2]], "rank 1: call 1: "),
        ([CALLS[0], call(1, "reduce_scatter", group="g9"), CALLS[2]], "rank 1: call 1: "),
        (CALLS[:2], "rank 1: 3 calls -> 2; the shorter"),
    ],
)
def test_a_different_schedule_is_reported(
    tmp_path: Path, calls: list[dict[str, Any]], reported: str
) -> None:
    before, after = run(tmp_path / "a", CALLS), run(tmp_path / "b", calls)
    found = compare(before, after).differences
    assert len(found) == 2  # one line for each rank
    assert found[1].startswith(f"s/unfixed: {reported}")
    assert main([str(before), str(after), "--json"]) == 1


def test_different_verdicts_and_culprits_are_reported(tmp_path: Path) -> None:
    before = run(tmp_path / "a", CALLS, "hang", (1,))
    after = run(tmp_path / "b", CALLS, "crash", (0,))
    assert compare(before, after).differences == [
        "s/unfixed: verdict hang -> crash",
        "s/unfixed: culprits [1] -> [0]",
    ]


def test_trials_in_only_one_run_are_reported(tmp_path: Path) -> None:
    before = run(tmp_path / "a", CALLS, trials=("unfixed", "fix"))
    after = run(tmp_path / "b", CALLS)
    (after / "s" / "unfixed" / "rank-1.events.jsonl").unlink()
    found = compare(before, after).differences
    assert f"s/fix: only in {before / 's'}" in found
    assert f"s/unfixed: rank 1: recorded only in {before / 's'}" in found
    (after / "s" / "result.json").unlink()
    assert compare(before, after).differences == [f"s: only in {before}"]
    assert compare(before, after, skip=("s",)).differences == []
    with pytest.raises(SystemExit):  # runs with nothing in common are not equal
        main([str(before), str(after)])
