"""`moediag resume`: checks that a run which saves, ends and resumes trains as one that is never
interrupted.

Four watched jobs record the states of steps. The first one ends after its checkpoint, the second
one resumes from that, and two are not interrupted: what differs between these is noise.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from moediag.evidence.trial_folder import read_trial
from moediag.masking import masked_command
from moediag.pipeline import watch as watcher
from moediag.pipeline.examine import result_of
from moediag.pipeline.measured_jobs import Compared, MeasuringOptions, measured_job
from moediag.pipeline.recorded_runs import Recording, Runs
from moediag.pipeline.resumed_states import compared
from moediag.pipeline.run_folder import run_folder
from moediag.protocol import Outcome, ResumedTask, StateRequest, Trial
from moediag.records import dataclass
from moediag.result import FAILURES, TrialResult
from moediag.result.wording import plural, ranks

EXAMPLE = (
    "moediag resume --resumed 'python train.py --resume {dir}/ckpt.pt' -- "
    "python train.py --out {dir}"
)
OWN_FOLDER = "{dir}"  # in a command: a folder of the run
RECORDED = "recorded"  # in the folder of each run
RESUMED, STRAIGHT, AGAIN = "resumed", "uninterrupted-1", "uninterrupted-2"
_INTERRUPTED = "interrupted"
_CHECKPOINT = re.compile(r"checkpoint-\d+")  # a folder of transformers' Trainer


@dataclass(frozen=True, slots=True)
class Commands:
    """What the user typed."""

    fresh: Sequence[str]
    """Trains without interruption, and saves unless ``interrupted`` does."""
    resumed: Sequence[str] = ()
    """Resumes; empty: the fresh one again."""
    interrupted: Sequence[str] = ()
    """Saves and ends; empty: the fresh one, which moediag ends after its first checkpoint."""
    after: int = 1
    """Steps before that checkpoint at least."""


def resume(commands: Commands, options: MeasuringOptions) -> Compared:
    """Runs the commands and compares them. Raises UsageError if there is no such command, and
    Interrupted on Ctrl-C after the running job was ended."""
    name = watcher.title(commands.fresh)
    folder = run_folder(options.out, f"resume-{name}")
    return _Proof(commands, options, folder, name).run()


class _Failed(Exception):
    """A run of the proof failed by itself."""

    def __init__(self, found: TrialResult) -> None:
        super().__init__(found.cause)
        self.found = found


class _Undecided(Exception):
    """Nothing can be compared; the text says why."""

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice


class _Proof:
    def __init__(
        self, commands: Commands, options: MeasuringOptions, folder: Path, name: str
    ) -> None:
        self._commands, self._options = commands, options
        self._folder, self._name = folder, name

    def run(self) -> Compared:
        try:
            attempt, runs = self._runs()
        except _Failed as failed:
            return self._written(failed.found)
        self._options.tell("comparing")
        for rank, found in compared(runs).items():
            Outcome(rank, resumed=found).write(attempt)
        return self._written(self._judged(attempt, len(runs.interrupted.ranks)))

    def _runs(self) -> tuple[Path, Runs]:
        """Runs everything; returns the evidence of the first run, and what was recorded."""
        commands, number = self._commands, self._options.steps
        own = commands.interrupted or commands.fresh
        request = StateRequest("", after=commands.after, to_end=bool(commands.interrupted))
        done = self._job(_INTERRUPTED, own, request)
        attempt = self._folder / done.result.trials[-1].evidence
        try:
            interrupted = self._recorded(_INTERRUPTED)
            after = _after(interrupted, bool(commands.interrupted))
            checkpoint = self._checkpoint(interrupted, after)
            self._job(
                RESUMED, commands.resumed or commands.fresh,
                StateRequest("", 1, number, checkpoint=checkpoint),
            )  # fmt: skip
            resumed = self._recorded(RESUMED)
            for name in (STRAIGHT, AGAIN):
                self._job(name, commands.fresh, StateRequest("", after + 1, number))
            straight, again = self._recorded(STRAIGHT), self._recorded(AGAIN)
            _same_ranks({_INTERRUPTED: interrupted, STRAIGHT: straight, AGAIN: again})
            runs = Runs(interrupted, resumed, straight, again, after)
            _comparable(runs, bool(commands.resumed or checkpoint))
        except _Undecided as undecided:
            for rank in range(max(self._size(), 1)):
                text = f"{str(undecided).rstrip('.')}."
                Outcome(rank, incomparable=text, next_step=undecided.advice).write(attempt)
            raise _Failed(self._judged(attempt, self._size())) from undecided
        return attempt, runs

    def _size(self) -> int:
        return len(Recording.read(self._place(_INTERRUPTED) / RECORDED).ranks)

    def _place(self, name: str) -> Path:
        """The first run has the run directory itself, so that its evidence is found there."""
        return self._folder if name == _INTERRUPTED else self._folder / name

    def _job(self, name: str, command: Sequence[str], request: StateRequest) -> watcher.Watched:
        place = self._place(name)
        files = self._folder / "files" / (_INTERRUPTED if name == RESUMED else name)
        typed = [word.replace(OWN_FOLDER, str(files.resolve())) for word in command]
        self._options.tell(f"running {_SAID[name]}, {shlex.join(masked_command(typed))}")
        request = dataclasses.replace(request, folder=str(place / RECORDED))
        done = measured_job(typed, place, request, self._options, EXAMPLE)
        last = done.result.trials[-1]
        if last.verdict in FAILURES:
            where = last.evidence if name == _INTERRUPTED else f"{name}/{last.evidence}"
            cause = f"{_SAID[name].capitalize()} failed. {last.cause}"
            found = dataclasses.replace(last.diagnosis, cause=cause)
            raise _Failed(dataclasses.replace(last, diagnosis=found, evidence=where))
        return done

    def _recorded(self, name: str) -> Recording:
        found = Recording.read(self._place(name) / RECORDED)
        problems = dict.fromkeys(text for one in found.ranks.values() for text in one.problems)
        if problems:
            raise _Undecided(f"{_SAID[name]}: {next(iter(problems))}")
        if not found.made:
            raise _Undecided(
                f"{_SAID[name]} took no step that moediag could see: it must train with an "
                "optimizer of torch.optim, under a Python that reads PYTHONPATH"
            )
        size = max(one.world_size for one in found.ranks.values())
        if silent := sorted({*range(size)} - {*found.ranks}):
            raise _Undecided(f"{_SAID[name]}: {ranks(silent)} of {size} recorded nothing")
        return found

    def _checkpoint(self, interrupted: Recording, after: int) -> str:
        """The folder that a Trainer of transformers saved, unless the user says how to resume."""
        if self._commands.resumed:
            return ""
        for one in interrupted.ranks.values():
            for save in one.saves:
                path = PurePath(save.path)
                found = [p for p in (path, *path.parents) if _CHECKPOINT.fullmatch(p.name)]
                if one.trainer and save.step == after and found:
                    return str(Path(found[0]).resolve())
        return ""

    def _judged(self, attempt: Path, size: int) -> TrialResult:
        trial = Trial(
            name=attempt.name, scenario=self._name, variant=RESUMED, task=ResumedTask(),
            world_size=size, layout={}, backend="", launcher="",
        )  # fmt: skip
        trial.write(attempt)
        evidence = read_trial(attempt)
        found = result_of(trial, evidence, attempt.name)
        return dataclasses.replace(found, backend=evidence.backend, world_size=size)

    def _written(self, found: TrialResult) -> Compared:
        given = [
            f"{option} {shlex.quote(_typed(words))}"
            for option, words in (
                ("--resumed", self._commands.resumed), ("--interrupted", self._commands.interrupted)
            )
            if words
        ]  # fmt: skip
        asked = " ".join(["resume", *given, "--", _typed(self._commands.fresh)])
        result = dataclasses.replace(watcher.of_job(self._name, [found]), overrides=(asked,))
        result.write(self._folder)
        return Compared(result, self._folder)


def _typed(words: Sequence[str]) -> str:
    """The command as a person types it: braces need no quotes unless they hold a comma."""
    return shlex.join(masked_command(words)).replace(f"'{OWN_FOLDER}'", OWN_FOLDER)


_SAID = {
    _INTERRUPTED: "the run that is interrupted",
    RESUMED: "the resumed run",
    STRAIGHT: "the uninterrupted run",
    AGAIN: "the uninterrupted run again",
}


# ------------------------------------------------------------------------ can it be compared?


def _after(interrupted: Recording, ends: bool) -> int:
    """The steps before the checkpoint. Raises _Undecided."""
    saved = [one.saved_after for one in interrupted.ranks.values() if one.saved_after is not None]
    if saved:
        return min(saved)
    if ends:
        return interrupted.made
    raise _Undecided(
        f"the program made {interrupted.made} steps and saved no checkpoint that moediag can see "
        "(torch.save, torch.distributed.checkpoint, safetensors)",
        "Let it save more often, or give --interrupted 'CMD', a command that saves and ends.",
    )


def _same_ranks(runs: Mapping[str, Recording]) -> None:
    sizes = [f"{_SAID[name]} has {plural(len(run.ranks), 'rank')}" for name, run in runs.items()]
    if len({len(run.ranks) for run in runs.values()}) > 1:
        raise _Undecided(
            f"{', '.join(sizes)}: they are not uninterrupted runs of the same layout",
            "Only the resumed run may have another number of ranks.",
        )


def _comparable(runs: Runs, told: bool) -> None:
    """Raises _Undecided if the runs are not what they should be."""
    if runs.straight.made <= runs.after:
        raise _Undecided(
            f"the uninterrupted run ended at step {runs.straight.made}, and the checkpoint is of "
            f"step {runs.after}, so no step after it can be compared",
            "Let it train longer, or give --interrupted 'CMD', a command that saves and ends.",
        )
    new = _saved(runs) - _loaded(runs.interrupted)
    if new & _loaded(runs.straight):
        raise _Undecided(
            "the uninterrupted run resumed, too: it loaded the checkpoint of the interrupted run",
            f"Give each run a folder of its own: write {OWN_FOLDER} where the command names it.",
        )
    if new and not new & _loaded(runs.resumed) and _starts_anew(runs):
        advice = (
            "Check the command of --resumed."
            if told
            else ("Give the command that resumes: --resumed 'CMD'.")
        )
        raise _Undecided("the second run did not resume: it read no checkpoint", advice)


def _saved(runs: Runs) -> set[str]:
    ranks = runs.interrupted.ranks.values()
    return {v for one in ranks for s in one.saves if s.step == runs.after for v in s.values}


def _loaded(run: Recording) -> set[str]:
    return {value for one in run.ranks.values() for load in one.loads for value in load.values}


def _starts_anew(runs: Runs) -> bool:
    """Whether the resumed run trains on the samples of the first step."""
    return all(
        one.batches[:1] == runs.straight.ranks[rank].batches[:1]
        for rank, one in runs.resumed.ranks.items()
        if rank in runs.straight.ranks
    )
