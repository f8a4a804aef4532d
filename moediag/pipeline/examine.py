"""`moediag diagnose`: turns directories left by ranks into a result. It has no expectations, unless
`moediag run` has judged it before."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import moediag
from moediag import extension, hardware, protocol
from moediag.diagnosis import diagnose
from moediag.errors import EvidenceError, UsageError
from moediag.evidence import foreign, sources
from moediag.evidence.model import Evidence
from moediag.launch.attach import archives
from moediag.pipeline import rows
from moediag.pipeline.attempts import removed
from moediag.protocol import TRIAL_FILE, natural
from moediag.records import dataclass
from moediag.report.trace import Traced, traced
from moediag.result import (
    Conclusion,
    Role,
    RunResult,
    TrialResult,
    read_result,
    wording,
)

HELP = (
    "Give the directory of a `moediag run` or of one of its trials, or files and folders with "
    "Flight Recorder dumps, stacks (py-spy, pystack, gdb), reports (NCCL RAS, Horovod), torchrun's "
    "error files or the ranks' logs."
)
_SHOWN = 4  # refused files, or runs, that an error lists


@dataclass(frozen=True, slots=True)
class Examined:
    """The diagnosis of the given paths."""

    result: RunResult  # like a run's, one trial per job
    evidence: tuple[Evidence, ...]  # of each trial, in order

    def traced(self) -> dict[str, Traced]:
        """Returns the trials by name, for a trace."""
        of_trials: dict[str, Traced] = {}
        for trial, evidence in zip(self.result.trials, self.evidence, strict=True):
            again = trial.variant in of_trials
            name = trial.evidence if again else trial.variant
            of_trials[name] = traced(evidence, trial)
        return of_trials


def examine(paths: Sequence[Path], taken_at: float | None = None) -> Examined:
    """Diagnoses what is at ``paths``, also in archives; see :func:`_examine`."""
    with archives.unpacked(paths) as found:
        examined = _examine(found, taken_at)
        names = {str(place): str(path) for place, path in zip(found, paths, strict=True)}
    trials = tuple(_named(trial, names) for trial in examined.result.trials)
    return replace(examined, result=replace(examined.result, trials=trials))


def _named(trial: TrialResult, names: Mapping[str, str]) -> TrialResult:
    """The trial with the paths that the user gave in place of those that were read."""
    where = trial.evidence
    for place, path in names.items():
        where = where.replace(place, path)
    return replace(trial, evidence=where)


def _examine(paths: Sequence[Path], taken_at: float | None) -> Examined:
    """Diagnoses every trial found at ``paths``. Several nodes' parts of a trial are diagnosed
    together, and all other paths as one job. A run that was judged keeps its judgement; otherwise
    ``expected`` stays empty. ``taken_at``: when the dumps of another job were written (0: when its
    watchdog gave up). Raises EvidenceError if nothing is known."""
    trials: list[Path] = []
    others = []
    for path in paths:
        folders = trial_folders(path)
        trials += folders
        others += [path] if not folders else []
    if len(paths) == 1 and (judged := _judged(paths[0])) is not None:
        again = {folder.name: _examined(folder) for folder in trials}
        result, evidence = extension.provided("judged again")(judged, again)
        return Examined(result, evidence)
    found = [one for folders in _by_job(trials) if (one := _unless_removed(folders)) is not None]
    if trials and not found:
        raise EvidenceError(f"{trials[0]} was removed while it was read", HELP)
    if others:
        found.append(_foreign(others, taken_at))
    scenarios = dict.fromkeys(name for name, _, _ in found)
    result = RunResult(
        scenario=", ".join(scenarios),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        moediag_version=moediag.__version__,
        machine=hardware.machine(),
        trials=tuple(trial for _, trial, _ in found),
        conclusion=Conclusion(reproduced=None),
        removed="; ".join(text for path in paths if (text := removed(path))),
    )
    return Examined(result, tuple(evidence for _, _, evidence in found))


def trial_folders(path: Path) -> list[Path]:
    """Returns the trial directories at ``path``: itself, or those in it that ran what is judged;
    none if ``path`` is no run of moediag. Raises EvidenceError for a run that cannot be judged."""
    if not path.is_dir():
        if not path.exists():
            raise EvidenceError(f"{path} does not exist", HELP)
        return []
    if (path / TRIAL_FILE).is_file():
        return [path]
    found = sorted((file.parent for file in path.glob(f"*/{TRIAL_FILE}")), key=_in_order)
    judged = [folder for folder in found if _is_judged(folder)]
    if found and not judged:
        raise EvidenceError(f"{path} holds no trial that ran the step under test", HELP)
    runs = [] if found else sorted({file.parts[-3] for file in path.glob(f"*/*/{TRIAL_FILE}")})
    if runs:
        raise EvidenceError(
            f"{path} is no run; it holds {wording.plural(len(runs), 'run')}: "
            + ", ".join([*runs[:_SHOWN], *(["…"] if len(runs) > _SHOWN else [])]),
            f"Give one of them: moediag diagnose {path / runs[0]}",
        )
    return judged


def _in_order(folder: Path) -> tuple[str, int, str]:
    """attempt-10 is later than attempt-9."""
    name, _, number = folder.name.rpartition("-")
    return name, natural(number) or 0, folder.name


def _is_judged(folder: Path) -> bool:
    try:
        task = _trial(folder).task
    except EvidenceError:
        if _is_removed(folder):
            return False
        raise
    return not isinstance(task, protocol.ReferenceTask | protocol.CostTask)


def _is_removed(folder: Path) -> bool:
    """Whether a watcher removed this attempt, of a job that restarts often, after it was listed."""
    return not os.path.lexists(folder / TRIAL_FILE)


def _trial(folder: Path) -> protocol.Trial:
    try:
        return protocol.Trial.read(folder / TRIAL_FILE)
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{folder / TRIAL_FILE} cannot be read: {error}", HELP) from error


def _judged(path: Path) -> RunResult | None:
    """Returns the result of a run that compared its trials with expectations."""
    try:
        result = read_result(path)
    except (OSError, ValueError):
        return None
    return result if any(trial.expected for trial in result.trials) else None


def _foreign(paths: Sequence[Path], taken_at: float | None) -> tuple[str, TrialResult, Evidence]:
    found = sources.read(paths)
    found.taken_at, found.stood = taken_at or None, found.stood or taken_at == 0
    if not found.files:
        why = "; ".join(found.refused[:_SHOWN]) or "no file"
        more = len(found.refused) - _SHOWN
        why += f"; and {more} more" if more > 0 else ""
        folders = ", ".join(str(path) for path in paths if path.is_dir())
        where = f" in {folders}" if folders else ""  # a file is named in the reason
        raise EvidenceError(f"nothing to diagnose{where}: {why}", HELP)
    newest = max((dump.created[-1] for dump in found.dumps.values() if dump.created), default=0)
    if taken_at and taken_at < newest / 1e9 - 60:  # a minute: clocks differ
        issued = datetime.fromtimestamp(newest / 1e9).isoformat(" ", "seconds")
        raise UsageError(
            f"these dumps cannot have been written at that time: their newest call is of {issued}",
            "Correct --taken-at, or leave it out.",
        )
    evidence = foreign.evidence(found)
    place = ", ".join(path.resolve().name for path in paths)
    result = TrialResult(
        variant="as found", role=Role.UNFIXED, stack=_versions(evidence), launcher="",
        backend=evidence.backend, world_size=evidence.world_size if evidence.size_known else 0,
        diagnosis=diagnose(evidence), expected="", met=True, evidence=", ".join(map(str, paths)),
    )  # fmt: skip
    return place, result, evidence


def _by_job(folders: Sequence[Path]) -> list[list[Path]]:
    """Groups folders that watchers on several nodes left of the same start of a job."""
    from moediag.evidence.nodes import job_of

    found: dict[str, list[Path]] = {}
    for folder in folders:
        found.setdefault(job_of(folder) or str(folder.resolve()), []).append(folder)
    return list(found.values())


def _unless_removed(folders: Sequence[Path]) -> tuple[str, TrialResult, Evidence] | None:
    """Returns what was found; None if an attempt was removed meanwhile: files may be missing."""
    try:
        found = _examined(*folders)
    except EvidenceError:
        if any(map(_is_removed, folders)):
            return None
        raise
    return None if any(map(_is_removed, folders)) else found


def _examined(*folders: Path) -> tuple[str, TrialResult, Evidence]:
    from moediag.evidence.trial_folder import read_trial

    trial, evidence = _trial(folders[0]), read_trial(*folders)
    where = ", ".join(map(str, folders))
    return trial.scenario, result_of(trial, evidence, where), evidence


def result_of(trial: protocol.Trial, evidence: Evidence, where: str) -> TrialResult:
    """Returns the diagnosis of ``evidence`` without expectations. ``where``: the evidence, as a
    reader of the result finds it."""
    known = replace(
        trial,
        world_size=trial.world_size or evidence.world_size,
        backend=trial.backend or evidence.backend,
    )
    return rows.row(known, diagnose(evidence), _versions(evidence), where)


def _versions(evidence: Evidence) -> dict[str, str | None]:
    versions = next((dict(r.versions) for r in evidence.ranks.values() if r.versions), {})
    if not evidence.nccl:
        versions.pop("nccl", None)  # torch includes it, but the job did not use it
    return versions
