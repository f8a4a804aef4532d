"""`diagnose` finds trials in directories and gives a result without expectations."""

from pathlib import Path
from typing import Any

import pytest

from moediag import examine
from moediag.errors import EvidenceError, ExitCode
from moediag.evidence.model import Evidence, RankEvidence
from moediag.protocol import Trial
from moediag.report.page import exit_code
from moediag.verdicts import Confidence, Verdict


def make(folder: Path, purpose: str = "step") -> Path:
    folder.mkdir(parents=True)
    Trial(name=folder.name, scenario="s", variant=folder.name, role="control",
          purpose=purpose).write(folder)  # fmt: skip
    return folder


def test_a_run_is_its_trials_without_references_and_costs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    unfixed, control = make(run / "unfixed"), make(run / "control")
    make(run / "reference-1", "reference")
    make(run / "cost", "cost")
    assert examine.trial_folders(run) == [control, unfixed]
    assert examine.trial_folders(unfixed) == [unfixed]


@pytest.mark.parametrize("what", ["empty", "file", "nowhere", "only-reference"])
def test_other_paths_are_refused_with_what_to_give(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    make(tmp_path / "only-reference" / "reference-1", "reference")
    with pytest.raises(EvidenceError, match=what) as caught:
        examine.trial_folders(tmp_path / what)
    assert "moediag run" in caught.value.help_text


@pytest.mark.parametrize("text", ["", "[]", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_a_broken_trial_file_is_named(tmp_path: Path, text: str) -> None:
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
    from moediag.diagnosis.model import Diagnosis

    found = Diagnosis(Verdict(verdict), verdict, Confidence.HIGH, culprits=(1,))
    evidence = Evidence(2, {1: RankEvidence(1, versions={"torch": "2.13.0"})})

    def diagnose(given: Any) -> Diagnosis:
        assert given is evidence
        return found

    monkeypatch.setattr(examine, "read_trial", lambda folder: evidence)
    monkeypatch.setattr(examine, "diagnose", diagnose)
    result = examine.examine([make(tmp_path / "t")])
    trial = result.trials[0]
    assert (trial.verdict, trial.expected, trial.stack) == (verdict, "", {"torch": "2.13.0"})
    assert exit_code(result) == code
