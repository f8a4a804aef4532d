"""`moediag diagnose --trace --html --json`: the same result in each, marks where ranks diverge, and
none where nothing is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import jobs
from moediag.cli import app
from moediag.diagnosis import diagnose
from moediag.errors import ExitCode
from moediag.evidence.model import Evidence
from moediag.report import html, json_view, trace
from moediag.result import RESULT_FILE, RunResult, read_result
from tests.unit.evidence_builder import expert_job, write

LAYOUT = jobs.Layout(pp=2, dp=2, tp=2, ep=2)
Capture = pytest.CaptureFixture[str]


def dumps(folder: Path, fault: str) -> tuple[Path, jobs.Job]:
    job = jobs.healthy(LAYOUT, 3)
    job = jobs.faulty(job, fault, 1) if fault != "none" else job
    return jobs.write(job, folder / "dumps"), job


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def processes(found: list[dict[str, Any]]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}


@pytest.mark.parametrize("fault", ["stuck", "order", "op", "size", "skip-p2p"])
def test_trace_has_one_process_per_rank_and_marks_the_divergence(
    tmp_path: Path, capsys: Capture, fault: str
) -> None:
    folder, job = dumps(tmp_path, fault)
    target = tmp_path / "trace.json"
    assert app.main(["diagnose", str(folder), "--trace", str(target), "--json"]) == 1
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    found = events(target)
    assert processes(found) == {rank: f"as found rank {rank}" for rank in range(LAYOUT.world)}
    marks = [e for e in found if e["name"] == trace.MARK]
    assert {str(e["pid"]) for e in marks} == set(trial["first_divergence"]["ranks"])
    assert len(marks) == len({e["pid"] for e in marks}), "each rank once"
    labels = {e["pid"]: e["args"]["labels"] for e in found if e["name"] == "process_labels"}
    assert [rank for rank, label in labels.items() if label == "culprit"] == list(job.culprits)


def test_a_healthy_job_has_no_mark(tmp_path: Path, capsys: Capture) -> None:
    folder, _ = dumps(tmp_path, "none")
    target, page = tmp_path / "trace.json", tmp_path / "page.html"
    arguments = ["diagnose", str(folder), "--trace", str(target), "--html", str(page)]
    assert app.main(arguments) == ExitCode.OK
    found = events(target)
    assert len(processes(found)) == LAYOUT.world
    assert not [e for e in found if e["name"] in (trace.MARK, "process_labels")]
    assert not [e for e in found if e.get("cname")]
    assert 'class="lanes"' not in page.read_text()
    assert "no failure found" in capsys.readouterr().out, "the page on the terminal comes as well"


def test_trace_has_a_process_for_a_rank_without_evidence(tmp_path: Path) -> None:
    folder, job = dumps(tmp_path, "killed")
    target = tmp_path / "t" / "trace.json"
    assert app.main(["diagnose", str(folder), "--trace", str(target)]) == 1
    (gone,) = job.culprits
    assert processes(events(target))[gone] == f"as found rank {gone} (nothing was found)"


def test_trace_keeps_the_newest_calls_of_long_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MOST_CALLS", 4)
    monkeypatch.setattr(trace, "FEWEST_CALLS", 1)
    evidence = expert_job(set(), set()).whole()
    whole = json.loads(trace.render({"t": trace.Traced(evidence)}))
    drawn = [e["args"]["index"] for e in whole["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    calls = len(evidence.ranks[0].collectives)
    assert drawn == [calls - 2, calls - 1]
    assert whole["otherData"]["left out"].startswith(f"{2 * (calls - 2):,} calls")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run directory whose trial hangs: rank 1 skips an expert."""
    return write(expert_job(set(), {3}).run(), tmp_path / "run" / "unfixed").parent


def test_a_run_directory_has_the_same_views(run_folder: Path, capsys: Capture) -> None:
    target, page = run_folder / "trace.json", run_folder / "page.html"
    arguments = ["diagnose", str(run_folder), "--trace", str(target), "--html", str(page)]
    assert app.main(arguments) == 1
    assert f"wrote {page}" in capsys.readouterr().err
    assert {e["pid"] for e in events(target) if e["name"] == trace.MARK} == {0, 1}
    text = page.read_text()
    assert "<script" not in text
    assert not re.search(r"(src|href)=\"(?!#)", text)
    assert '<g class="culprit waiting"><title>rank 1: culprit, waiting in ' in text
    assert 'class="here"' in text


def test_stdout_accepts_only_one_view(run_folder: Path, capsys: Capture) -> None:
    assert app.main(["diagnose", str(run_folder), "--trace", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["traceEvents"]
    assert app.main(["diagnose", str(run_folder), "--html", "-"]) == 1
    assert capsys.readouterr().out.startswith("<!doctype html>")
    for both in (["--json", "--html", "-"], ["--html", "-", "--trace", "-"]):
        assert app.main(["diagnose", str(run_folder), *both]) == ExitCode.USAGE
        assert "stdout can hold only one format" in capsys.readouterr().err


def test_a_result_keeps_schedules_and_states(tmp_path: Path) -> None:
    """`moediag report` then shows the same as `diagnose`."""
    result = of_evidence(expert_job(set(), {3}).run())
    (tmp_path / RESULT_FILE).write_text(json_view.render(result))
    again = read_result(tmp_path)
    assert again.trials[0].diagnosis.schedules is not None
    assert again.trials[0].diagnosis.states != ()
    assert again == result
    assert html.render([again]) == html.render([result])


def test_text_from_the_job_is_escaped(tmp_path: Path) -> None:
    job = expert_job(set(), {3})
    nasty = "<script>alert(1)</script>"
    groups = {name: (ranks, nasty) for name, (ranks, _) in job.groups.items()}
    job.groups = groups
    page = html.render([of_evidence(job.run())])
    assert nasty not in page
    assert "&lt;script&gt;" in page


def of_evidence(evidence: Evidence) -> RunResult:
    from moediag.pipeline import examine
    from moediag.protocol import Trial
    from moediag.result import Conclusion

    world = evidence.world_size
    trial = Trial(name="t", scenario="s", variant="as found", world_size=world)
    made = examine.result_of(trial, evidence, "here")
    assert made.verdict == str(diagnose(evidence).verdict)
    return RunResult("s", "2025-01-31T12:00:00+00:00", "0", {}, (made,), Conclusion(None))
