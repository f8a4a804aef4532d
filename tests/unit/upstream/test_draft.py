"""Drafts of upstream bug reports: the order of each template, content and length."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moediag import hardware
from moediag.cli import app
from moediag.errors import ExitCode, UsageError
from moediag.lab.scenario import catalogue
from moediag.lab.scenario import load as loading
from moediag.lab.stacks.environment import Stack
from moediag.lab.upstream import draft as drafting
from moediag.lab.upstream import draft_evidence
from moediag.lab.upstream.draft import Material, Program, draft, failing
from moediag.lab.upstream.draft_sentences import releases
from moediag.lab.upstream.templates import TEMPLATES, upstream
from moediag.report.markdown import LIMIT
from moediag.result import Conclusion, FixJudgement, RunResult, TrialResult
from tests.unit.trial_results import changed, trial_result

FAILED = trial_result(
    stack={"python": "3.12.1", "torch": "2.13.0+cpu", "transformers": "4.53.2",
           "accelerate": "1.8.1"},
    verdict="collective-mismatch", expected="collective-mismatch", met=True, signature="s",
    confidence="high", culprits=(1,), victims=(0,),
    cause="On rank 1 expert 3 of layer 1 received 0 tokens.", evidence="unfixed",
)  # fmt: skip
FIX = changed(FAILED, variant="touch", role="fix", verdict="clean", culprits=(), cause="")
CONTROL = replace(FIX, variant="identical", role="control")
MACHINE = {"os": "Other OS 1", "kernel": "0.0", "arch": "m68k", "cores": 8, "gpus": ["H200"]}


def run_of(*trials: TrialResult, scenario: str = "expert-starvation") -> RunResult:
    fixes = tuple(FixJudgement(t.variant, True) for t in trials if t.role == "fix")
    return RunResult(scenario, "2025-01-31T12:00:00+00:00", "0.1", dict(MACHINE), trials,
                     Conclusion(True, fixes))  # fmt: skip


RESULT = run_of(FAILED, FIX, CONTROL)
PROGRAM = Program("x.py", "import torch\nprint('shows it')\n", "moediag run x", run="torchrun x.py")
MATERIAL = Material(("- torch: 2.13.0", "- OS: Other"), PROGRAM, "It breaks", ("https://e.org/1",))

HEADINGS = {
    "transformers": ["System Info", "Who can help?", "Information", "Tasks", "Reproduction",
                     "Expected behavior"],
    "accelerate": ["System Info", "Information", "Tasks", "Reproduction", "Expected behavior"],
    "pytorch": ["🐛 Describe the bug", "Versions"],
    "torchtitan": ["Bug description", "Versions"],
}  # fmt: skip


@pytest.mark.parametrize("project", TEMPLATES)
def test_sections_follow_the_template_of_the_project(project: str) -> None:
    text = draft(project, RESULT, FAILED, MATERIAL)
    assert re.findall(r"^### (.+)$", text, re.MULTILINE) == HEADINGS[project]
    for part in ("# Collective mismatch: It breaks (transformers 4.53.2, torch 2.13.0)",
                 "not filed. Check it", "- torch: 2.13.0", "received 0 tokens", "CULPRIT  rank 1",
                 "https://e.org/1", "torchrun x.py", "print('shows it')", "`touch`", "`identical`",
                 TEMPLATES[project].repository):  # fmt: skip
        assert part in text, part
    assert text.count("received 0 tokens") == 1
    after = text.index("### " + ("Versions" if len(HEADINGS[project]) == 2 else "System Info"))
    assert text.index("- torch: 2.13.0") > after


def test_a_project_without_a_template_is_refused() -> None:
    with pytest.raises(UsageError, match="--for slime: one of transformers"):
        draft("slime", RESULT, FAILED, MATERIAL)


@pytest.mark.parametrize("project", TEMPLATES)
@pytest.mark.parametrize("size", [30_000, 64_000, 400_000])
def test_a_draft_stays_below_githubs_limit(project: str, size: int) -> None:
    long = replace(PROGRAM, text="x = 1\n" * (size // 6))
    many = changed(FAILED, cause="c" * 3000, not_seen=tuple(f"thing {n}" for n in range(900)))
    text = draft(project, run_of(many), many, replace(MATERIAL, program=long))
    assert len(text) <= LIMIT < 65_536
    assert "torchrun x.py" in text and text.count("```") % 2 == 0
    assert drafting.inlined(text, long) == (size == 30_000)
    assert ("is attached" in text) == (size != 30_000)
    assert [h for h in HEADINGS[project] if f"### {h}\n" in text] == HEADINGS[project]


def test_a_text_that_is_too_long_is_truncated() -> None:
    endless = changed(FAILED, cause="c" * 70_000)
    text = draft("pytorch", run_of(endless), endless, MATERIAL)
    assert len(text) <= LIMIT and "cut at the size limit" in text


def test_code_fences_in_quoted_text_are_escaped() -> None:
    odd = replace(PROGRAM, text='"""\n```\nnot the end\n```\n"""\n')
    text = draft("transformers", RESULT, FAILED, replace(MATERIAL, program=odd))
    assert '````python\n"""\n```\nnot the end' in text


def test_a_report_is_about_the_unfixed_failure() -> None:
    broken_fix = changed(FIX, verdict="hang")
    assert failing(run_of(broken_fix, FAILED)) == FAILED
    assert failing(run_of(broken_fix, FAILED), "touch") == broken_fix
    assert failing(run_of(FIX, CONTROL)) is None
    assert failing(run_of(changed(FAILED, verdict="inconclusive"))) is None


@pytest.mark.parametrize(
    ("sources", "stack", "whose"),
    [
        (["https://github.com/huggingface/accelerate/pull/1"], ["transformers"], "accelerate"),
        (["https://github.com/THUDM/slime/pull/1", "https://github.com/pytorch/pytorch/issues/2"],
         ["transformers"], "pytorch"),
        (["https://github.com/pytorch/torchtitan/issues/2387"], [], "torchtitan"),
        (["accelerate 1.15.0, accelerate/utils/fsdp_utils.py"], ["transformers"], "accelerate"),
        (["torch 2.13.0, torch/nn"], [], "pytorch"),
        ([], ["accelerate", "transformers"], "transformers"),
        ([], ["torch"], "pytorch"),
        (["https://github.com/THUDM/slime/pull/1"], [], None),
    ],
)  # fmt: skip
def test_upstream_project_is_found(sources: list[str], stack: list[str], whose: str | None) -> None:
    assert upstream(sources, stack) == whose


def test_every_scenario_has_a_project_to_report_to() -> None:
    for name in catalogue.names():
        scenario = loading.load(catalogue.find(name))
        assert upstream(scenario.sources, scenario.stack) in TEMPLATES, name


# ------------------------------------------------------------------------ the words


def test_each_fix_is_explained_and_says_whether_it_works() -> None:
    touch = replace(FIX, what="adds 0 * p[0] to the output", source="https://e.org/2")
    wrong = changed(FIX, variant="clip", verdict="hang")
    less = replace(FIX, variant="same-batch", other_batch=True)
    elsewhere = replace(FIX, variant="for-another", repairs="another-unfixed")
    judged = (FixJudgement("touch", True), FixJudgement("clip", False, why="hangs as before"),
              FixJudgement("same-batch", True), FixJudgement("for-another", True))  # fmt: skip
    run = run_of(FAILED, touch, wrong, less, elsewhere)
    result = replace(run, conclusion=Conclusion(True, judged))
    text = draft("pytorch", result, FAILED, replace(MATERIAL, titles={"clip": "no clipping"}))
    works, fails = text.partition("These do not:")[::2]
    assert "- `touch`: adds 0 * p[0] to the output (https://e.org/2)" in works
    assert "- `clip`: no clipping: hangs as before" in fails
    assert "same-batch" not in text and "for-another" not in text
    assert "These fixes" not in draft("pytorch", run_of(FAILED), FAILED, MATERIAL)


def test_releases_that_ran_are_told_apart() -> None:
    def on(version: str, **fields: str) -> TrialResult:
        stack = {**FAILED.stack, "transformers": version}
        return replace(changed(FAILED, **fields), variant=f"v{version}", stack=stack)

    older, newer = on("4.53.0"), on("5.0.0", verdict="clean")
    result = run_of(FAILED, older, newer, on("4.60.0", signature="another"))
    said = releases(result, FAILED, ["unfixed", "v4.53.0", "v5.0.0", "v4.60.0"])
    assert said == (
        "Fails with transformers 4.53.2, torch 2.13.0; transformers 4.53.0. "
        "Clean with transformers 5.0.0. Other releases were not run."
    )
    assert releases(run_of(FAILED, FIX), FAILED, ["unfixed", "touch"]) == "", "the same release"
    unsure = replace(newer, repeat=1, diagnosis=older.diagnosis)
    assert releases(run_of(FAILED, newer, unsure), FAILED, ["v5.0.0"]) == "", "one repeat failed"


def test_what_is_expected_follows_from_the_verdict() -> None:
    for verdict, words in (("resume-drift", "continues like one"), ("crash", "No rank raises")):
        failed = changed(FAILED, verdict=verdict)
        text = draft("pytorch", run_of(failed), failed, MATERIAL)
        assert "Expected: " in text and words in text and "same collectives" not in text


def test_a_traceback_in_the_cause_is_a_block() -> None:
    words = 'raised E at a.py:1: E Traceback (most recent call last): (RANK 0) File "b.py", line 2'
    failed = changed(FAILED, verdict="crash", cause=words)
    text = draft("pytorch", run_of(failed), failed, MATERIAL)
    assert 'raised E at a.py:1: E\n\n```text\n(RANK 0)\nFile "b.py", line 2\n```' in text


# ------------------------------------------------------------------------ from a run directory


def test_the_description_is_there_only_if_it_is_about_this_failure(tmp_path: Path) -> None:
    mechanism = "loop only over those"  # also in the exported file, which comes last
    found = draft_evidence.write(RESULT, run_directory(tmp_path / "run"))
    assert found is not None and mechanism in found.text.partition("<details>")[0]
    for name, other in (
        ("changed", replace(RESULT, overrides=("--set model.experts=16",))),
        ("unexpected", run_of(replace(FAILED, met=False), FIX)),
    ):
        found = draft_evidence.write(other, run_directory(tmp_path / name, other))
        assert found is not None and mechanism not in found.text.partition("<details>")[0]


def run_directory(folder: Path, result: RunResult = RESULT) -> Path:
    folder.mkdir()
    text = loading.load(catalogue.find("expert-starvation")).to_yaml()
    (folder / "scenario.yaml").write_text(text)
    result.write(folder)
    return folder


def test_a_scenario_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    folder = run_directory(tmp_path / "run")
    said: list[str] = []
    found = draft_evidence.of_runs([(RESULT, folder)], "", said.append)
    assert found is not None and not said
    (folder / "scenario.yaml").write_text("name: [")
    assert draft_evidence.of_runs([(RESULT, folder)], "", said.append) is None
    assert draft_evidence.of_runs([(RESULT, folder)], "transformers", said.append) is not None
    assert len(said) == 2 and "scenario.yaml" in said[0]
    (folder / "scenario.yaml").unlink()
    assert draft_evidence.of_runs([(RESULT, folder)], "", said.append) is None
    assert len(said) == 2


def test_a_draft_contains_the_exported_python_file(tmp_path: Path) -> None:
    found = draft_evidence.write(RESULT, run_directory(tmp_path / "run"))
    assert found is not None and found.project == "transformers"
    (code,) = re.findall(r"```python\n(.*?)\n```\n", found.text, re.DOTALL)
    ast.parse(code)
    assert code.strip() == found.program.text.strip()
    assert 'pip install "torch==2.13.0" "transformers==4.53.2" "accelerate==1.8.1"' in code


def test_system_information_comes_from_the_run(tmp_path: Path) -> None:
    """Another machine produced this result, so nothing about this machine is shown."""
    lines = draft_evidence.system(RESULT, FAILED)
    assert "- os: Other OS 1" in lines and "- gpus: H200" in lines
    assert "- transformers: 4.53.2" in lines and lines[-1] == "- launched: 2 ranks, gloo, fork"
    assert not any(str(hardware.machine()["kernel"]) in line for line in lines)


def test_system_information_comes_from_the_failed_stack_if_it_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = replace(RESULT, machine=hardware.machine())
    versions = {n: FAILED.stack[n] for n in ("torch", "transformers", "accelerate")}
    stack = Stack(Path(sys.executable), versions, "transformers-4.53.2-abc", 0.0, [])
    monkeypatch.setattr(draft_evidence.environment, "ready", lambda _: stack)
    lines = draft_evidence.system(here, FAILED)
    assert "- environment: transformers-4.53.2-abc, built by moediag" in lines
    assert any(line.startswith("- CPU: ") for line in lines)
    other = replace(stack, versions={**versions, "accelerate": "1.0"})  # moved on since
    monkeypatch.setattr(draft_evidence.environment, "ready", lambda _: other)
    assert "- accelerate: 1.8.1" in draft_evidence.system(here, FAILED)


def test_a_home_folder_is_not_in_the_draft(tmp_path: Path) -> None:
    at_home = changed(FAILED, cause=f"raised in {Path.home()}/secret-project/train.py")
    found = draft_evidence.write(run_of(at_home), run_directory(tmp_path / "run"))
    assert found is not None and "raised in ~/secret-project/train.py" in found.text


def test_a_file_that_is_too_long_is_written_beside_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, page = run_directory(tmp_path / "run"), tmp_path / "issue.md"
    monkeypatch.setattr(draft_evidence, "export", lambda *_: "x = 1\n" * 20_000)
    assert app.main(["report", str(folder), "--markdown", str(page)]) == ExitCode.OK
    assert "`expert-starvation-unfixed.py` is attached" in page.read_text()
    assert (tmp_path / "expert-starvation-unfixed.py").read_text().startswith("x = 1\n")


def test_a_draft_without_an_export_contains_the_command(tmp_path: Path) -> None:
    folder = run_directory(tmp_path / "run")
    text = loading.load(catalogue.find("ep-resume")).to_yaml()
    (folder / "scenario.yaml").write_text(text)
    shared = replace(FAILED, shared_gpu=True)
    result = replace(
        run_of(shared, scenario="ep-resume"), overrides=("--set step.steps=3", "--share-gpu")
    )
    found = draft_evidence.write(result, folder)
    assert found is not None and found.program.text == ""
    assert "There is no file without moediag: " in found.text and "resume" in found.text
    command = "moediag run ep-resume --variant unfixed --gpus 2 --share-gpu --set step.steps=3"
    assert command in found.text


def test_a_watched_job_has_a_draft_for_a_chosen_project(tmp_path: Path) -> None:
    watched = replace(FAILED, expected="", variant="watched")
    result = replace(
        run_of(watched, scenario="train.py"), overrides=("watch -- torchrun train.py",)
    )
    assert draft_evidence.write(result, tmp_path) is None
    found = draft_evidence.write(result, tmp_path, "pytorch")
    assert found is not None and "moediag watch -- torchrun train.py" in found.text


# ------------------------------------------------------------------------ the command


def test_the_report_command_writes_a_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = run_directory(tmp_path / "run"), tmp_path / "page.md"
    assert app.main(["report", str(folder), "--markdown", str(page)]) == ExitCode.OK
    said = capsys.readouterr()
    assert "a draft for huggingface/transformers; nothing is filed" in said.err
    assert "### Who can help?" in page.read_text()
    assert app.main(["report", str(folder), "--markdown", "-", "--for", "pytorch"]) == ExitCode.OK
    assert "### 🐛 Describe the bug" in capsys.readouterr().out


def test_a_draft_without_a_failure_contains_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_directory(tmp_path / "run")
    clean = run_directory(tmp_path / "clean", run_of(FIX, CONTROL))
    for words in (
        ["report", str(folder), "--markdown", "-", "--for", "tables"],
        ["report", str(clean), "--markdown", "-"],
        ["report", str(folder), str(clean), "--markdown", "-"],
    ):
        assert app.main(words) == ExitCode.OK
        assert "| trial | stack | verdict |" in capsys.readouterr().out


def test_a_wrong_command_line_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_directory(tmp_path / "run")
    clean = run_directory(tmp_path / "clean", run_of(FIX, CONTROL))
    for words, says in (
        ([str(folder), "--for", "pytorch"], "--for pytorch needs --markdown"),
        ([str(folder), "--markdown", "-", "--for", "slime"], "--for slime: one of transformers"),
        ([str(clean), "--markdown", "-", "--for", "pytorch"], "nothing failed in"),
        ([str(folder), str(clean), "--markdown", "-", "--for", "pytorch"], "about one run"),
    ):
        assert app.main(["report", *words]) == ExitCode.USAGE
        assert says in capsys.readouterr().err
