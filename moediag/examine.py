"""`moediag diagnose`: from directories that ranks left behind to a result without expectations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import moediag
from moediag import doctor
from moediag.diagnosis.diagnose import diagnose
from moediag.errors import EvidenceError
from moediag.evidence.read import read_trial
from moediag.protocol import TRIAL_FILE, Trial
from moediag.report.model import Conclusion, RunResult, TrialResult

HELP = (
    "Give the directory of a `moediag run` (it holds result.json) or of one of its trials "
    "(it holds trial.json). Dumps of other tools are not read yet."
)


def examine(paths: Sequence[Path]) -> RunResult:
    """Reads and diagnoses every trial found at ``paths``; ``expected`` stays empty, because
    nothing was. Raises EvidenceError for a path that is neither a run nor a trial."""
    results = [_examined(folder) for path in paths for folder in trial_folders(path)]
    scenarios = dict.fromkeys(name for name, _ in results)
    return RunResult(
        scenario=", ".join(scenarios),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        moediag_version=moediag.__version__,
        machine=doctor.machine(),
        trials=tuple(trial for _, trial in results),
        conclusion=Conclusion(reproduced=None),
    )


def trial_folders(path: Path) -> list[Path]:
    """The trial directories at ``path``: itself, or those in it that ran what is judged."""
    if not path.is_dir():
        what = "is a file, not a directory" if path.exists() else "does not exist"
        raise EvidenceError(f"{path} {what}", HELP)
    if (path / TRIAL_FILE).is_file():
        return [path]
    found = [file.parent for file in sorted(path.glob(f"*/{TRIAL_FILE}"))]
    judged = [folder for folder in found if _trial(folder).purpose not in ("reference", "cost")]
    if not judged:
        raise EvidenceError(f"{path} is not a moediag run or trial directory", HELP)
    return judged


def _trial(folder: Path) -> Trial:
    try:
        return Trial.read(folder / TRIAL_FILE)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EvidenceError(f"{folder / TRIAL_FILE} cannot be read: {error}", HELP) from error


def _examined(folder: Path) -> tuple[str, TrialResult]:
    trial = _trial(folder)
    evidence = read_trial(folder)
    found = diagnose(evidence)
    versions = next((dict(r.versions) for r in evidence.ranks.values() if r.versions), {})
    return trial.scenario, TrialResult(
        variant=trial.variant,
        role=trial.role,
        stack=versions,
        launcher=trial.launcher,
        backend=trial.backend,
        world_size=trial.world_size,
        verdict=str(found.verdict),
        expected="",
        met=True,
        signature=found.signature,
        confidence=str(found.confidence),
        culprits=tuple(found.culprits),
        victims=tuple(found.victims),
        cause=found.cause,
        not_seen=tuple(found.not_seen),
        first_divergence=found.first_divergence,
        gradient_error=found.gradient_error,
        worst_parameter=found.worst_parameter,
        evidence=str(folder),
        stacks={str(rank): list(frames) for rank, frames in found.stacks.items()},
        wrong_parameters=tuple(found.wrong_parameters),
        parameters_compared=found.parameters_compared,
        notes=tuple(found.notes),
        tables=tuple(found.tables),
    )
