"""Launches the trials of one family and one relation, beside the references that they share.

All ways are first tried in one launch, whose processes start, import and connect once. A way that
holds there, or does not apply, is done. Any other runs again in a launch of its own, which decides:
what another way left in the processes may be the reason.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from moediag.diagnosis import diagnose
from moediag.evidence.launch_record import LaunchRecord
from moediag.evidence.trial_folder import read_trial
from moediag.lab.campaign.hunt.layouts import LaunchedRelation, LaunchedWay
from moediag.lab.pipeline.trials import last_line
from moediag.launch.base import Launcher
from moediag.protocol import (
    SIZES,
    GenerateTask,
    Outcome,
    ReferenceTask,
    SaveTask,
    SequenceTask,
    Size,
    Trial,
    outcome_file,
    output_file,
)
from moediag.protocol.tolerance import SAME_LOGIT
from moediag.result import Confidence, Diagnosis, Verdict

REFERENCES = "references"
TOGETHER = "together"
DONE = (Verdict.CLEAN, Verdict.NOT_APPLICABLE)
SHOWN = 3  # tensors of which a text says what they hold


class FamilyTrials:
    """Runs each trial once."""

    def __init__(
        self, relation: LaunchedRelation, family: str, launcher: Launcher, folder: Path,
        timeout: float,
    ) -> None:  # fmt: skip
        self.relation = relation
        self.family = family
        self.together: dict[str, Diagnosis] = {}
        """What a way showed in the launch of all, by the name of its trial."""
        self._launcher = launcher
        self._folder = folder
        self._timeout = timeout
        self._references: dict[str, tuple[Path, Diagnosis | None]] = {}
        self._known: dict[str, Diagnosis] = {}
        self._launches = 0

    def try_all(self) -> None:
        """Runs every way in as few launches as possible."""
        trials = [way.trial(self.family, 0, SIZES[0], self._timeout) for way in self.relation.ways]
        self._refer(trials)
        for ranks in dict.fromkeys(trial.world_size for trial in trials):
            left = [
                dataclasses.replace(trial, reference_path=str(path))
                for trial in trials
                for path, refused in [self._reference(trial)]
                if trial.world_size == ranks and refused is None
            ]
            while left:
                left = left[self._together(left) + 1 :]  # without the trial that ended the launch

    def run(
        self, way: LaunchedWay, seed: int = 0, size: Size = SIZES[0], again: bool = False
    ) -> Diagnosis:
        """Returns what a way shows in a launch of its own; ``again``: even if that is known."""
        trial = way.trial(self.family, seed, size, self._timeout)
        key = _key(trial)  # several ways may have one control
        if key in self._known and not again:
            return self._known[key]
        path, refused = self._reference(trial)
        if refused is not None:
            return refused
        folder = self._folder / (f"{trial.name}-again" if again else trial.name)
        self._launcher.run(dataclasses.replace(trial, reference_path=str(path)), folder)
        self._known[key] = found = _shown(trial, folder)
        if found.verdict in DONE:
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def clear(self) -> None:
        """Removes what no page needs."""
        for name in (REFERENCES, TOGETHER):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _together(self, trials: Sequence[Trial]) -> int:
        """Runs trials in one launch. Returns how many of them ran on all ranks, to their end or
        until every rank raised."""
        folder, _ = self._sequence(TOGETHER, trials, single=False)
        for number, trial in enumerate(trials):
            place = folder / trial.name
            ranks = range(trial.world_size)
            ended = all((place / outcome_file(rank)).exists() for rank in ranks)
            if not ended and not all((place / output_file(rank)).exists() for rank in ranks):
                return number
            found = self.together[trial.name] = _shown(trial, place)
            if ended and found.verdict in DONE:
                self._known[_key(trial)] = found
        return len(trials)

    def _sequence(
        self, kind: str, trials: Sequence[Trial], single: bool
    ) -> tuple[Path, LaunchRecord]:
        folder = self._folder / kind / str(self._launches)
        self._launches += 1
        for trial in trials:
            (folder / trial.name).mkdir(parents=True)
            trial.write(folder / trial.name)
        task = SequenceTask([trial.name for trial in trials], single)
        launched = dataclasses.replace(trials[0], name=folder.name, task=task, record=False)
        return folder, self._launcher.run(launched, folder)

    def _reference(self, trial: Trial) -> tuple[Path, Diagnosis | None]:
        """Returns the file of the single process, and the result of every trial that needs it if
        there is none."""
        self._refer([trial])
        return self._references[_shared(trial)]

    def _refer(self, trials: Sequence[Trial]) -> None:
        """Computes the references that these trials need and that do not exist, in one process."""
        missing: dict[str, Trial] = {}
        for trial in trials:
            if (key := _shared(trial)) not in self._references and key not in missing:
                name = f"reference-{len(self._references) + len(missing)}"
                path = self._folder / REFERENCES / f"{name}.pt"
                missing[key] = dataclasses.replace(
                    trial, name=name, task=ReferenceTask(), record=False, reference_path=str(path)
                )
        if not missing:
            return
        folder, record = self._sequence(REFERENCES, list(missing.values()), single=True)
        for key, trial in missing.items():
            refused = _refused(record, folder, trial.name)
            self._references[key] = Path(str(trial.reference_path)), refused


def _shared(trial: Trial) -> str:
    """Returns the key of its reference. Ranks that share a batch, for whatever reason, share it."""
    batches = trial.skew.batches
    batches = "identical" if batches == "per-replica" else batches
    return repr((trial.world_size, batches, trial.step, trial.model))  # they hold dicts


def _key(trial: Trial) -> str:
    """Returns what two trials share that are the same but for their names."""
    return repr(dataclasses.replace(trial, name="", variant="", reference_path=None))


def _shown(trial: Trial, folder: Path) -> Diagnosis:
    found = diagnose(read_trial(folder))
    read = _READERS.get(type(trial.task))
    if read is None or found.verdict != Verdict.INCONCLUSIVE:
        return found
    return read(_outcomes(folder, trial.world_size)) or found


def _refused(record: LaunchRecord, folder: Path, name: str) -> Diagnosis | None:
    """Returns what a reference that was not computed says of every trial."""
    try:
        reason = Outcome.read(folder / name / outcome_file(0)).applicable
    except (OSError, ValueError):
        own, whole = folder / name / output_file(0), folder / output_file(0)
        said = last_line(own) or record.launch_error or last_line(whole) or "it left no output"
        return _undiagnosed(Verdict.INCONCLUSIVE, f"the single-process reference failed: {said}")
    return None if reason is None else _undiagnosed(Verdict.NOT_APPLICABLE, reason)


def _outcomes(folder: Path, ranks: int) -> list[Outcome]:
    """Returns those of all ranks; empty if one wrote none."""
    try:
        return [Outcome.read(folder / outcome_file(rank)) for rank in range(ranks)]
    except (OSError, ValueError):
        return []


def _generated(outcomes: Sequence[Outcome]) -> Diagnosis | None:
    """Returns what the tokens of all ranks show; None if one generated nothing."""
    if not outcomes or not all(one.tokens and one.reference_tokens for one in outcomes):
        return None
    apart = [one for one in outcomes if one.tokens != one.reference_tokens]
    # Rounding is about a hundredth of this; nan is no less.
    wrong = apart or [one for one in outcomes if not (one.logit_error or 0.0) <= SAME_LOGIT]
    if not wrong:
        return _CLEAN
    cause = "; ".join(
        f"rank {one.rank} generated {' '.join(map(str, one.tokens))}, one process "
        f"{' '.join(map(str, one.reference_tokens))}, with logits that differ by "
        f"{one.logit_error or 0.0:.2g} of the largest"
        for one in wrong
    )
    return Diagnosis(Verdict.WRONG_METRICS, "wrong-tokens", Confidence.HIGH, cause=cause)


def _saved(outcomes: Sequence[Outcome]) -> Diagnosis | None:
    """Returns what one process loaded of what the ranks saved; None if nothing was compared."""
    if not outcomes or not outcomes[0].saved_compared:
        return None
    first = outcomes[0]
    if not first.saved:
        return _CLEAN
    shown = [f"{name} {what}".rstrip() for name, what in first.saved.items()]
    cause = (
        f"of {first.saved_compared} parameters and buffers, {len(shown)} of what was saved differ "
        f"from the checkpoint: {'; '.join(shown[:SHOWN])}"
    )
    return Diagnosis(
        Verdict.WRONG_WEIGHTS, f"{Verdict.WRONG_WEIGHTS}:saved", Confidence.HIGH, cause=cause
    )


_CLEAN = Diagnosis(Verdict.CLEAN, str(Verdict.CLEAN), Confidence.HIGH)
# Of trials without gradients, which no detector compares.
_READERS: dict[type, Callable[[Sequence[Outcome]], Diagnosis | None]] = {
    GenerateTask: _generated,
    SaveTask: _saved,
}


def _undiagnosed(verdict: Verdict, cause: str) -> Diagnosis:
    return Diagnosis(verdict, str(verdict), Confidence.HIGH, cause=cause)
