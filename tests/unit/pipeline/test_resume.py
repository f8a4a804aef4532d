"""The course of `moediag resume`, with jobs that do not run: they leave what real ones would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from moediag.cli import app
from moediag.diagnosis.numbers import resumed_run
from moediag.errors import ExitCode
from moediag.pipeline import resume as resumer
from moediag.pipeline import watch as watcher
from moediag.pipeline.measured_jobs import Compared, MeasuringOptions
from moediag.pipeline.recorded_runs import Recording, Runs
from moediag.pipeline.resumed_states import compared
from moediag.protocol import StateRequest, write_json
from moediag.protocol import recorded_state as words
from moediag.protocol.recorded_state import (
    Item,
    Part,
    Recorded,
    RecordedStep,
    ResumedRun,
    Transfer,
)
from moediag.result import Confidence, Diagnosis, TrialResult, Verdict

JOB, AGAIN = ["python", "train.py", "{dir}"], ["python", "train.py", "{dir}", "--resume"]
SAVED = 2  # steps before the checkpoint
CHECKPOINT = Transfer(SAVED, "torch.save", "train.py:9", "ckpt.pt", ["weight 2"])
INTERRUPTED = Recorded(0, 1, 1, True, 2, saved_after=SAVED, batches=["a", "b", "c"])
RESUMED = Recorded(0, 1, 1, True, 2, batches=["c", "d"], loads=[CHECKPOINT])
STRAIGHT = Recorded(0, 1, 1, True, 4, batches=["a", "b", "c", "d"])


@dataclass
class Jobs:
    """Stands in for watched jobs; a name is that of the run's folder."""

    resumes_with: str = "weight 2"  # what the resumed run begins with
    recorded: dict[str, Recorded] = field(default_factory=dict)
    silent: set[tuple[str, int]] = field(default_factory=set)  # names and ranks
    stateless: set[tuple[str, int]] = field(default_factory=set)  # names and steps
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    commands: list[Sequence[str]] = field(default_factory=list)

    def watch(
        self, command: Sequence[str], options: watcher.WatchOptions, *_: object
    ) -> watcher.Watched:
        folder, request = options.out, options.job.measure
        assert folder is not None
        assert isinstance(request, StateRequest)
        self.commands.append(command)
        name = "interrupted" if len(self.commands) == 1 else folder.name
        (folder / "attempt-0").mkdir(parents=True)
        write_json(
            folder / "attempt-0" / "launch.json",
            {"schema_version": 1, "started": 0.0, "ended": 1.0},
        )
        self._record(name, Path(request.folder))
        verdict = self.verdicts.get(name, Verdict.CLEAN)
        found = Diagnosis(verdict, str(verdict), Confidence.HIGH, cause="It died.")
        trial = TrialResult(
            "watched", "unfixed", {}, "", "gloo", 1, found, "", True, evidence="attempt-0"
        )
        return watcher.Watched(watcher.of_job("train.py", [trial]), folder, 0)

    def _record(self, name: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        plain = {"interrupted": replace(INTERRUPTED, saves=[CHECKPOINT]), "resumed": RESUMED}
        recorded = self.recorded.get(name, plain.get(name, STRAIGHT))
        for rank in range(recorded.world_size):
            if (name, rank) not in self.silent:
                replace(recorded, rank=rank).write(folder)
        for step in (1, 2) if name == "resumed" else (3, 4):
            weight = f"weight {step if name != 'resumed' else step + SAVED}".replace("3", "2")
            weight = self.resumes_with if (name, step) == ("resumed", 1) else weight
            items = {words.PARAMETER: {"up": Item(weight)}}
            if (name, step) not in self.stateless:
                RecordedStep(step, items).write(folder, 0)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    found = Jobs()
    monkeypatch.setattr(watcher, "watch", found.watch)
    return found


def resume(folder: Path, *interrupted: str) -> Compared:
    commands = resumer.Commands(JOB, AGAIN, interrupted)
    return resumer.resume(commands, MeasuringOptions(steps=2, out=folder / "run"))


def test_a_resumed_run_that_is_the_same_is_clean(jobs: Jobs, tmp_path: Path) -> None:
    done = resume(tmp_path)
    assert done.exit_code == ExitCode.OK, done.result.trials[-1].cause
    folders = [Path(command[2]).name for command in jobs.commands]
    assert folders == ["interrupted", "interrupted", "uninterrupted-1", "uninterrupted-2"]
    assert ["--resume" in command for command in jobs.commands] == [False, True, False, False]
    (asked,) = json.loads((tmp_path / "run" / "result.json").read_text())["overrides"]
    assert asked == ("resume --resumed 'python train.py {dir} --resume' -- python train.py {dir}")


def test_a_lost_value_is_a_failure(jobs: Jobs, tmp_path: Path) -> None:
    jobs.resumes_with = "weight 0"
    done = resume(tmp_path)
    found = done.result.trials[-1]
    assert (done.exit_code, found.verdict) == (ExitCode.FAILURE_FOUND, Verdict.RESUME_DRIFT)
    assert "1 parameter differs from its value at the save: up" in found.cause


@pytest.mark.parametrize(
    ("name", "recorded", "cause"),
    [
        ("interrupted", replace(INTERRUPTED, saved_after=None), "saved no checkpoint that moediag"),
        ("interrupted", replace(INTERRUPTED, batches=[]), "took no step that moediag could see"),
        ("interrupted", replace(INTERRUPTED, problems=["it cannot"]), "it cannot"),
        ("resumed", replace(RESUMED, batches=["a", "b"], loads=[]), "did not resume: it read no"),
        ("uninterrupted-2", replace(STRAIGHT, world_size=2), "again has 2 ranks: they are no"),
        ("uninterrupted-1", replace(STRAIGHT, batches=["a"]), "ended at step 1"),
        ("uninterrupted-1", replace(STRAIGHT, loads=[CHECKPOINT]), "resumed, too"),
    ],
)
def test_what_cannot_be_compared_is_inconclusive(
    jobs: Jobs, tmp_path: Path, name: str, recorded: Recorded, cause: str
) -> None:
    jobs.recorded[name] = recorded
    done = resume(tmp_path)
    assert done.exit_code == ExitCode.INCONCLUSIVE
    assert cause in done.result.trials[-1].cause


@pytest.mark.parametrize("name", ["interrupted", "resumed", "uninterrupted-1", "uninterrupted-2"])
def test_a_rank_that_recorded_nothing_is_not_taken_for_a_right_one(
    jobs: Jobs, tmp_path: Path, name: str
) -> None:
    one = {"interrupted": replace(INTERRUPTED, saves=[CHECKPOINT]), "resumed": RESUMED}
    for each in ("interrupted", "resumed", "uninterrupted-1", "uninterrupted-2"):
        jobs.recorded[each] = replace(one.get(each, STRAIGHT), world_size=2)
    jobs.silent = {(name, 1)}
    done = resume(tmp_path)
    assert done.exit_code == ExitCode.INCONCLUSIVE
    assert "rank 1 of 2 recorded nothing" in done.result.trials[-1].cause


def test_only_steps_whose_state_is_known_are_said_to_be_equal(jobs: Jobs, tmp_path: Path) -> None:
    assert "steps 3 to 4 equal those" in resume(tmp_path / "both").result.trials[-1].cause
    jobs.commands.clear()
    jobs.stateless = {("resumed", 2)}
    assert "step 3 equals that of" in resume(tmp_path / "one").result.trials[-1].cause
    jobs.commands.clear()
    jobs.stateless = {("resumed", 1)}
    done = resume(tmp_path / "none")
    assert done.exit_code == ExitCode.INCONCLUSIVE
    assert "could not be compared" in done.result.trials[-1].cause


def test_numbers_of_ranks_that_no_job_has_are_not_read(tmp_path: Path) -> None:
    for rank, size in ((0, 1), (1, 2**40), (2, 2), (2**40, 2**40)):
        replace(STRAIGHT, rank=rank, world_size=size).write(tmp_path)
    assert list(Recording.read(tmp_path).ranks) == [0, 2]


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 1, "items": {"parameter": 7}}'])
def test_a_damaged_state_is_not_known(tmp_path: Path, text: str) -> None:
    (tmp_path / words.state_file(0, 1)).write_text(text)
    assert Recording(tmp_path, {}).state(0, 1) == {}


def test_a_run_that_fails_is_the_answer(jobs: Jobs, tmp_path: Path) -> None:
    jobs.verdicts["resumed"] = Verdict.CRASH
    done = resume(tmp_path)
    found = done.result.trials[-1]
    assert (done.exit_code, found.verdict) == (ExitCode.FAILURE_FOUND, Verdict.CRASH)
    assert found.cause == "The resumed run failed. It died."
    assert len(jobs.commands) == 2


class TestAnotherLayout:
    """Two ranks saved half a tensor each; one resumed with all of it."""

    HALVES = (
        Item("half 1", rows=["a", "b"], part=Part("10", "p", 4, 8, 0)),
        Item("half 2", rows=["c", "d"], part=Part("fffffffffffffff5", "q", 4, 8, 2)),
    )

    def found(self, folder: Path, whole: Item, second: Item = HALVES[1]) -> ResumedRun:
        recordings = []
        for name in ("interrupted", "resumed", "straight", "again"):
            place = folder / name
            place.mkdir()
            held = [whole] if name == "resumed" else [self.HALVES[0], second]
            for rank, item in enumerate(held):
                one = replace(STRAIGHT, batches=["1", "2", "3"]) if len(held) > 1 else RESUMED
                replace(one, rank=rank, world_size=len(held)).write(place)
                step = 1 if name == "resumed" else SAVED + 1
                items = {words.PARAMETER: {"up": item}, words.GENERATOR: {"torch": Item(name)}}
                RecordedStep(step, items).write(place, rank)
            recordings.append(Recording.read(place))
        (found,) = compared(Runs(*recordings, after=SAVED)).values()
        return found

    def test_the_whole_tensor_is_equal(self, tmp_path: Path) -> None:
        found = self.found(tmp_path, Item("x", part=Part("5", "r", 8, 8, 0)))
        assert (found.compared, found.lost, found.layouts) == (1, [], [2, 1])
        text = resumed_run.said({0: found}).text
        assert text.startswith("After resuming on 1 rank, 1 value of the state")

    def test_its_rows_moved(self, tmp_path: Path) -> None:
        moved = Item("x", rows=["c", "d", "a", "b"], part=Part("6", "r", 8, 8, 0))
        (lost,) = self.found(tmp_path, moved).lost
        assert (lost.why, lost.other[:29]) == (words.MOVED, "row 0 is row 2 of the save, r")

    def test_without_all_parts_it_is_not_compared(self, tmp_path: Path) -> None:
        other = replace(self.HALVES[0], part=replace(self.HALVES[0].part, value="11"))
        found = self.found(tmp_path, Item("x", part=Part("5", "r", 8, 8, 0)), other)
        assert (found.compared, found.lost) == (0, [])
        assert found.not_known == ["up (parameter)"]
        assert resumed_run.said({0: found}).verdict == Verdict.INCONCLUSIVE


@pytest.mark.parametrize("given", ["", "'"])
def test_a_mistyped_command_is_told(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["resume", "--resumed", given, "--", "train.py"]) == ExitCode.USAGE
    assert "--resumed" in capsys.readouterr().err


def test_the_programs_own_step_is_not_taken_for_the_optimizers(tmp_path: Path) -> None:
    """A checkpoint has both under the key `step`; only the program's was loaded."""
    whole = {
        words.PARAMETER: {"up": Item("weight")},
        words.STATE: {"exp_avg of up": Item("moment", [1.0, 1.0])},
        words.COUNT: {"up": Item("2")},
    }
    lost = {words.PARAMETER: whole[words.PARAMETER], words.COUNT: {"up": Item("1")}}
    saved = replace(CHECKPOINT, values=["weight", "moment"], scalars={"step": ["2"]})
    loaded = replace(CHECKPOINT, values=["weight"], scalars={"step": ["2"]})
    runs = {}
    for name, recorded, step, state in (
        ("interrupted", replace(INTERRUPTED, saves=[saved]), 3, whole),
        ("resumed", replace(RESUMED, batches=["c"], loads=[loaded]), 1, lost),
        ("straight", STRAIGHT, 3, whole),
        ("again", STRAIGHT, 3, whole),
    ):
        folder = tmp_path / name
        folder.mkdir()
        recorded.write(folder)
        RecordedStep(step, state).write(folder, 0)
        runs[name] = Recording.read(folder)
    found = compared(Runs(**runs, after=SAVED))[0].lost
    assert [(one.kind, one.why) for one in found] == [
        (words.STATE, words.NOT_LOADED), (words.COUNT, words.NOT_LOADED)
    ]  # fmt: skip


@pytest.mark.parametrize(("weight", "generator"), [("a", "lost"), ("b", "lost"), ("a", "drawn")])
def test_a_random_state_that_nothing_depends_on(
    tmp_path: Path, weight: str, generator: str
) -> None:
    """It differs from the first step on, or from the second one, where numbers were drawn."""
    runs = {}
    for name in ("interrupted", "resumed", "straight", "again"):
        folder = tmp_path / name
        folder.mkdir()
        here = name == "resumed"
        replace(RESUMED if here else STRAIGHT).write(folder)
        for step in (1, 2) if here else (SAVED + 1, SAVED + 2):
            second = step in (2, SAVED + 2)
            other = here and (second or generator == "lost")
            state = {
                words.PARAMETER: {"up": Item(weight if here and second else "a")},
                words.GENERATOR: {"torch": Item("other" if other else "own")},
            }
            RecordedStep(step, state).write(folder, 0)
        runs[name] = Recording.read(folder)
    found = compared(Runs(**runs, after=SAVED))
    told = resumed_run.said(found)
    if (weight, generator) == ("a", "lost"):
        assert told.verdict == Verdict.CLEAN
        assert any("nothing that was compared depended" in note for note in told.notes)
    else:
        assert told.verdict == Verdict.RESUME_DRIFT
