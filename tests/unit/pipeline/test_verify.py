"""The course of a verification, with jobs that do not run: they leave what real ones would."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from moediag.errors import ExitCode, UsageError
from moediag.launch import comparing
from moediag.pipeline import verify as verifier
from moediag.pipeline import watch as watcher
from moediag.pipeline.examine import examine
from moediag.pipeline.measured_jobs import Compared, MeasuringOptions
from moediag.protocol import (
    GradientError,
    Measured,
    MeasuredStep,
    MeasureRequest,
    Outcome,
    write_json,
)
from moediag.protocol.measured import IN_TURN, JOINED
from moediag.result import Confidence, Diagnosis, TrialResult, Verdict

JOB, ALONE = ["torchrun", "train.py"], ["python", "train.py", "--alone"]


@dataclass
class Jobs:
    """Stands in for watched jobs and for the process that compares."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)  # by folder name
    codes: dict[str, int] = field(default_factory=dict)
    silent: tuple[str, ...] = ()  # folders of jobs that measure nothing
    wrong: bool = False
    failed: str = ""
    requests: list[MeasureRequest] = field(default_factory=list)
    compared: list[Path] = field(default_factory=list)

    def watch(
        self, command: Sequence[str], options: watcher.WatchOptions, *_: object
    ) -> watcher.Watched:
        folder, request = options.out, options.job.measure
        assert folder is not None
        assert request is not None
        self.requests.append(request)
        name = folder.name
        world = 1 if "--alone" in command else 2
        attempt = folder / "attempt-0"
        attempt.mkdir(parents=True)
        write_json(attempt / "launch.json", {"schema_version": 1, "started": 0.0, "ended": 1.0})
        if name not in self.silent:
            Path(request.folder).mkdir(parents=True)
            for rank in range(world):
                Measured(
                    rank, world, 1, "python", done=True, steps=[MeasuredStep()],
                    dtypes=["float32", "bfloat16"], layout={"dp_shard": world}, size=500_000,
                ).write(request.folder)  # fmt: skip
        verdict = self.verdicts.get(name, Verdict.CLEAN)
        found = Diagnosis(verdict, str(verdict), Confidence.HIGH, cause="It is so.")
        trial = TrialResult(
            "watched", "unfixed", {}, "", "gloo", world, found, "", True, evidence="attempt-0"
        )
        result = watcher.of_job("train.py", [trial])
        return watcher.Watched(result, folder, self.codes.get(name, 0))

    def compare(self, python: str, target: Path, job: Path, references: Sequence[Path]) -> str:
        self.compared = [job, *references]
        for rank in range(2):
            error = GradientError(0.5 if self.wrong else 0.0, 1.0, wrong=self.wrong)
            Outcome(rank, gradients={"1": {"head.weight": error}}).write(target)
        return self.failed


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    found = Jobs()
    monkeypatch.setattr(watcher, "watch", found.watch)
    monkeypatch.setattr(comparing, "compare", found.compare)
    return found


def verify(folder: Path, tell: Callable[[str], None] = lambda _: None) -> Compared:
    options = MeasuringOptions(steps=3, out=folder / "run", tell=tell)
    return verifier.verify(JOB, ALONE, options)


def test_equal_runs_are_clean(jobs: Jobs, tmp_path: Path) -> None:
    lines: list[str] = []
    done = verify(tmp_path, lines.append)
    assert done.exit_code == ExitCode.OK
    assert [request.steps for request in jobs.requests] == [3] * 4
    job, *references = jobs.requests
    assert job.start_from is None
    assert all(one.start_from == job.folder for one in references)
    assert [one.rounding for one in references] == [None, None, "bfloat16"]
    assert jobs.compared == [Path(request.folder) for request in jobs.requests]
    assert any("1.0 MB" in line for line in lines)
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["overrides"] == [
        "verify --reference 'python train.py --alone' -- torchrun train.py"
    ]


def test_a_difference_is_a_failure_that_diagnose_finds_again(jobs: Jobs, tmp_path: Path) -> None:
    jobs.wrong = True
    done = verify(tmp_path)
    assert done.exit_code == ExitCode.FAILURE_FOUND
    found = done.result.trials[-1]
    assert found.verdict == Verdict.WRONG_GRADIENTS
    assert examine([done.folder]).result.trials[-1].verdict == Verdict.WRONG_GRADIENTS


def test_a_job_that_hangs_has_its_own_page(jobs: Jobs, tmp_path: Path) -> None:
    jobs.verdicts["run"] = Verdict.HANG
    done = verify(tmp_path)
    assert done.exit_code == ExitCode.FAILURE_FOUND
    assert done.result.trials[-1].verdict == Verdict.HANG
    assert len(jobs.requests) == 1


@pytest.mark.parametrize(
    ("change", "words", "runs"),
    [
        ({"silent": ("run",)}, "took no step that moediag could see", 1),
        ({"silent": ("run",), "codes": {"run": 2}}, "ended with exit code 2", 1),
        (
            {"silent": ("reference-1",), "codes": {"reference-1": 2}},
            "the reference ended with exit code 2 before its first step",
            2,
        ),
        (
            {"silent": ("reference-2",), "verdicts": {"reference-2": Verdict.CRASH}},
            "the reference failed before its first step (reference-2): It is so.",
            3,
        ),
        ({"failed": "no module named torch"}, "the comparison failed: no module named torch", 4),
    ],
)
def test_what_cannot_be_compared_is_inconclusive(
    jobs: Jobs, tmp_path: Path, change: dict[str, object], words: str, runs: int
) -> None:
    for name, value in change.items():
        setattr(jobs, name, value)
    done = verify(tmp_path)
    found = done.result.trials[-1]
    assert (found.verdict, done.exit_code) == (Verdict.INCONCLUSIVE, ExitCode.INCONCLUSIVE)
    assert words.lower() in found.cause.lower()
    assert len(jobs.requests) == runs


def test_the_advice_for_a_mistyped_command_is_about_verify(tmp_path: Path) -> None:
    options = MeasuringOptions(out=tmp_path / "run")
    with pytest.raises(UsageError, match="no command 'no-such-launcher'") as caught:
        verifier.verify(["no-such-launcher"], ALONE, options)
    assert verifier.EXAMPLE in caught.value.help_text
    assert "moediag watch" not in caught.value.help_text


def measured(
    rows: Sequence[str], losses: int = 1, elements: int = 0, totals: str = "", **more: object
) -> Measured:
    """``totals``: one digit a step."""
    step = MeasuredStep(samples=list(rows), losses=[0.0] * losses, elements=elements)
    steps = [replace(step, total=total) for total in totals or [""]]
    return Measured(0, 2, 1, "python", steps=steps, **{"drawn": "batches", **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "alone", "ways"),
    [
        ((measured("ab"), measured("cd")), measured("abcd"), []),
        ((measured("ab"), measured("cd")), measured("ac"), [(2, "")]),
        ((measured("ab"), measured("cd")), measured("xy"), [(1, JOINED), (2, IN_TURN)]),
        ((measured("ab"), measured("cd")), measured("wxyz", 2), [(1, IN_TURN)]),
        # Batches of other forms, and layers whose result depends on the batch.
        ((measured("ab", form="1"), measured("cd")), measured("xy"), [(2, IN_TURN)]),
        ((measured("ab", across_samples="BatchNorm"), measured("cd")), measured("xy"),
         [(2, IN_TURN)]),
        ((measured("ab"), measured("cd", drawn="")), measured("xy"), []),
        ((measured("ab"), measured("ab")), measured("xy"), []),  # no sampler
        ((measured("ab"), measured("cd")), measured("xy", 3), []),
        # Two ranks that share a model, beside two with other samples; a pipeline's second stage.
        ((measured("ab"), measured("ab"), measured("cd"), measured("cd")), measured("ac"),
         [(2, "")]),
        ((measured("ab"), measured(""), measured("cd"), measured("")), measured("ac"), [(2, "")]),
        # Ranks that average, and repeat each other's work.
        ((measured("ab", averages_over=[0, 1]), measured("ab"), measured("cd"), measured("cd")),
         measured("ac"), []),
        # Halves of sequences: each of two pairs has those of another step of one process.
        ((measured("ab", elements=8), measured("cd", elements=8), measured("ef", elements=8),
          measured("gh", elements=8)), measured("xy", elements=16), [(2, "")]),
        ((measured("ab", elements=8), measured("ab", elements=8), measured("ef", elements=8),
          measured("ef", elements=8)), measured("x", elements=8), [(2, "")]),
        ((measured("ab", elements=8), measured("cd", elements=8)), measured("xy", elements=8),
         [(1, JOINED), (2, IN_TURN)]),  # other sequences, not shorter ones
        ((measured("ab", elements=8, totals="1"), measured("cd", elements=8, totals="2")),
         measured("x", elements=8, totals="12"), [(2, "")]),
        ((measured("ab", elements=8, totals="1"), measured("cd", elements=8, totals="2")),
         measured("x", elements=8, totals="13"), [(1, JOINED), (2, IN_TURN)]),
    ],
)  # fmt: skip
def test_how_the_reference_sees_the_samples_of_all_ranks(
    ranks: Sequence[Measured], alone: Measured, ways: Sequence[tuple[int, str]]
) -> None:
    found = verifier._ways(dict(enumerate(ranks)), {0: alone})
    assert [(one.merged, one.replayed) for one in found] == ways
