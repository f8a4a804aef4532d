"""`diagnose` finds trials in directories and gives a result without expectations."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import jobs
from moediag.cli import app
from moediag.errors import EvidenceError, ExitCode, UsageError
from moediag.evidence import trial_folder
from moediag.evidence.model import Evidence, RankEvidence
from moediag.pipeline import examine, watch
from moediag.protocol import CostTask, ReferenceTask, StepTask, Task, Trial
from moediag.report.page import exit_code, page_of
from moediag.report.terminal import as_text
from moediag.result import Confidence, Diagnosis, Verdict, read_result
from tests.unit.evidence_builder import fsdp2_job, write


def make(folder: Path, task: Task | None = None) -> Path:
    folder.mkdir(parents=True)
    Trial(name=folder.name, scenario="s", variant=folder.name, role="control",
          task=task or StepTask()).write(folder)  # fmt: skip
    return folder


def test_a_run_contains_its_trials_without_references_and_costs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    unfixed, control = make(run / "unfixed"), make(run / "control")
    make(run / "reference-1", ReferenceTask())
    make(run / "cost", CostTask())
    assert examine.trial_folders(run) == [control, unfixed]
    assert examine.trial_folders(unfixed) == [unfixed]


@pytest.mark.parametrize("what", ["empty", "file", "nowhere", "only-reference", "hostile"])
def test_other_paths_are_refused_with_advice(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "hostile").write_bytes(b"\x80\x02cos\nsystem\n.")
    make(tmp_path / "only-reference" / "reference-1", ReferenceTask())
    with pytest.raises(EvidenceError, match=what) as caught:
        examine.examine([tmp_path / what])
    assert "moediag run" in caught.value.help_text and "Flight Recorder" in caught.value.help_text
    assert what != "hostile" or "asks for os.system" in caught.value.message


def test_a_folder_of_several_runs_is_refused_with_their_names(tmp_path: Path) -> None:
    for name in "abcdef":
        make(tmp_path / name / "unfixed")
    with pytest.raises(EvidenceError, match=r"no run; it holds 6 runs: a, b, c, d, …") as caught:
        examine.examine([tmp_path])
    assert caught.value.help_text.endswith(f"moediag diagnose {tmp_path / 'a'}")


def test_trials_of_one_variant_have_names_of_their_own_in_a_trace(tmp_path: Path) -> None:
    for number in (0, 1):
        write(fsdp2_job(set(), set()).run(), tmp_path / "run" / f"attempt-{number}")
    found = examine.examine([tmp_path / "run"])
    assert list(found.traced()) == ["unfixed", str(tmp_path / "run" / "attempt-1")]


@pytest.mark.parametrize(("files", "more"), [(4, 0), (6, 2)])
def test_a_refusal_names_the_first_files(tmp_path: Path, files: int, more: int) -> None:
    for number in range(files):
        (tmp_path / f"hostile{number}").write_bytes(b"\x80\x02cos\nsystem\n.")
    with pytest.raises(EvidenceError, match=r"asks for os\.system") as caught:
        examine.examine([tmp_path])
    assert caught.value.message.count("asks for") == 4
    assert caught.value.message.endswith(f"; and {more} more") is bool(more)
    assert (" more" in caught.value.message) is bool(more)


@pytest.mark.parametrize(
    ("fault", "code"),
    [("none", ExitCode.OK), ("stuck", ExitCode.FAILURE_FOUND), ("log", ExitCode.INCONCLUSIVE)],
)
def test_files_of_other_tools_are_one_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, code: int
) -> None:
    job = jobs.healthy(jobs.Layout(dp=2, tp=2), 3)
    if fault == "log":
        (tmp_path / "rank_0.log").write_text("step 1 loss 2.0\n")
        paths = [tmp_path]
    else:
        job = jobs.faulty(job, fault, 1) if fault != "none" else job
        jobs.write(job, tmp_path / "dumps", form="json")
        (tmp_path / "rank_0.log").write_text("step 1 loss 2.0\n")
        (tmp_path / "notes").write_text("ask Ann\n")
        paths = [tmp_path / "dumps", tmp_path / "rank_0.log", tmp_path / "notes"]
    assert app.main(["diagnose", "--json", *map(str, paths)]) == code
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert trial["culprits"] == list(job.culprits) and trial["expected"] == ""
    assert fault == "log" or any("notes" in text for text in trial["not_seen"])
    assert app.main(["diagnose", *map(str, paths)]) == code
    page = capsys.readouterr().out
    assert fault != "stuck" or f"CULPRIT  rank {job.culprits[0]}" in page


def test_dumps_cannot_be_older_than_their_newest_call() -> None:
    dumps = Path(__file__).parents[2] / "samples" / "flight-recorder" / "gloo-stuck"
    with pytest.raises(UsageError, match="their newest call is of 2026-11-21"):
        examine.examine([dumps], 1_700_000_000.0)
    assert examine.examine([dumps], 1_800_000_000.0).result.trials[0].diagnosis.verdict == "hang"


def test_a_run_and_dumps_beside_it_are_two_results(tmp_path: Path) -> None:
    trial = make(tmp_path / "run" / "unfixed")
    dumps = jobs.write(jobs.healthy(jobs.Layout(dp=2), 1), tmp_path / "dumps")
    result = examine.examine([trial, dumps]).result
    assert [t.variant for t in result.trials] == ["unfixed", "as found"]


def test_torch_is_not_imported(tmp_path: Path) -> None:
    job = jobs.faulty(jobs.healthy(jobs.Layout(dp=4), 2), "skip", 1)
    jobs.write(job, tmp_path / "d")
    code = (
        "import sys; from moediag import cli; "
        f"assert cli.main(['diagnose', {str(tmp_path / 'd')!r}]) == 1; "
        "assert not {'torch', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_steps_of_a_job_whose_watcher_was_killed_are_read(tmp_path: Path) -> None:
    """Its folder has what the ranks recorded and what the watcher wrote at the start."""
    attempt = tmp_path / "watch" / "attempt-0"
    write(fsdp2_job(set(), set(), steps=3).run(), attempt)
    (attempt / "launch.json").unlink()
    for log in attempt.glob("*.events.jsonl"):  # the ranks were ended with their launcher
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if '"e": "end"' not in line))
    job = watch._Watch(
        ["train.py"], "train.py", tmp_path, watch.WatchOptions(), lambda *_: None, None
    )
    job._trial(tmp_path).write(attempt)
    assert Trial.read(attempt / "trial.json").world_size == 0
    found = examine.examine([tmp_path / "watch"])
    (trial,) = found.result.trials
    assert (trial.world_size, trial.verdict, trial.culprits) == (2, "inconclusive", ())
    assert "exit codes and signals (no launch.json)" in trial.diagnosis.not_seen
    assert max(call.step for call in found.evidence[0].ranks[1].collectives) == 3


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema_version": 99}', '{"schema_version": 1}', "[" * 100_000]
)
def test_a_broken_trial_file_is_an_error_with_its_path(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "run" / "t"
    folder.mkdir(parents=True)
    (folder / "trial.json").write_text(text)
    with pytest.raises(EvidenceError, match=r"trial\.json cannot be read"):
        examine.trial_folders(tmp_path / "run")


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("clean", ExitCode.OK), ("hang", ExitCode.FAILURE_FOUND),
     ("inconclusive", ExitCode.INCONCLUSIVE)],
)  # fmt: skip
def test_exit_code_says_whether_a_failure_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, code: int
) -> None:
    found = Diagnosis(Verdict(verdict), verdict, Confidence.HIGH, culprits=(1,))
    evidence = Evidence(2, {1: RankEvidence(1, versions={"torch": "2.13.0"})})

    def diagnose(given: Any) -> Diagnosis:
        assert given is evidence
        return found

    monkeypatch.setattr(trial_folder, "read_trial", lambda folder: evidence)
    monkeypatch.setattr(examine, "diagnose", diagnose)
    result = examine.examine([make(tmp_path / "t")]).result
    trial = result.trials[0]
    assert (trial.verdict, trial.expected, trial.stack) == (verdict, "", {"torch": "2.13.0"})
    assert exit_code(result) == code


RESULTS = Path(__file__).parents[2] / "golden" / "results"


def judged_run(folder: Path) -> Path:
    """A run as `moediag run` leaves it, with the folders of its trials."""
    shutil.copy(RESULTS / "starvation.json", folder / "result.json")
    for trial in read_result(folder).trials:
        make(folder / trial.evidence)
    return folder


def diagnosed_as(monkeypatch: pytest.MonkeyPatch, **other: Diagnosis) -> None:
    """Lets each trial's diagnosis be what the run had found, or ``other`` by name."""
    kept = {t.evidence: t.diagnosis for t in read_result(RESULTS / "starvation.json").trials}
    monkeypatch.setattr(trial_folder, "read_trial", lambda folder: folder.name)
    monkeypatch.setattr(examine, "result_of", lambda trial, name, where: examine.rows.row(
        trial, other.get(name, kept[name]), {}, where))  # fmt: skip


def test_a_judged_run_keeps_its_judgement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed_as(monkeypatch)
    before = read_result(judged_run(tmp_path))
    after = examine.examine([tmp_path])
    assert after.result.conclusion == before.conclusion and before.conclusion.fixes
    for old, new in zip(before.trials, after.result.trials, strict=True):
        assert new == replace(old, evidence=str(tmp_path / old.evidence))
    assert list(after.evidence) == [trial.evidence for trial in before.trials]
    text = as_text(page_of(after.result), 100, tmp_path)
    assert "unknown" not in text and "failure found in" not in text


def test_another_answer_is_judged_again_and_the_older_one_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_result(judged_run(tmp_path))
    fix = next(t for t in run.trials if t.role == "fix" and t.verdict == Verdict.CLEAN)
    hang = Diagnosis(Verdict.HANG, "hang", Confidence.HIGH, culprits=(1,))
    diagnosed_as(monkeypatch, **{fix.evidence: hang})
    result = examine.examine([tmp_path]).result
    again = next(t for t in result.trials if t.variant == fix.variant)
    assert again.verdict == Verdict.HANG and not again.met and again.expected == fix.expected
    assert "the run itself found clean" in again.notes
    judged = {one.variant: one.correct for one in result.conclusion.fixes}
    assert judged[fix.variant] is False


def test_a_run_whose_reference_is_gone_keeps_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_result(judged_run(tmp_path))
    nothing = Diagnosis(Verdict.INCONCLUSIVE, "inconclusive", Confidence.LOW)
    diagnosed_as(monkeypatch, **{t.evidence: nothing for t in run.trials})
    assert examine.examine([tmp_path]).result.conclusion == run.conclusion


def test_a_run_without_expectations_is_diagnosed_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = read_result(judged_run(tmp_path))
    free = tuple(replace(trial, expected="") for trial in result.trials)
    replace(result, trials=free).write(tmp_path)
    diagnosed_as(monkeypatch)
    found = examine.examine([tmp_path]).result
    assert {t.expected for t in found.trials} == {""} and found.conclusion.fixes == ()


def test_a_trial_whose_folder_is_gone_keeps_what_the_run_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only some trials of the run had an expectation."""
    result = read_result(judged_run(tmp_path))
    first, *others = result.trials
    free = replace(others[-1], expected="")
    replace(result, trials=(first, *others[:-1], free)).write(tmp_path)
    shutil.rmtree(tmp_path / first.evidence)
    diagnosed_as(monkeypatch)
    found = examine.examine([tmp_path])
    assert found.result.trials[0] == first
    assert found.result.conclusion == result.conclusion
    assert found.evidence[0] == Evidence(0, {})
