"""Commands as functions: ``moediag.diagnose``, and ``moediag.run`` and ``moediag.check`` of the
laboratory.

Each returns the object that ``--json`` prints and prints nothing. What a command explains on stderr
is raised as :class:`moediag.errors.MoediagError`, with ``help_text``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moediag.result import RunResult

__all__ = ["diagnose"]


def diagnose(*paths: str | Path, taken_at: float | None = None) -> RunResult:
    """Diagnoses runs, dumps, stacks and logs, as ``moediag diagnose``; also what `moediag.laws`
    recorded. ``taken_at``: when dumps of another job were written, in seconds since 1970; 0: when
    NCCL's watchdog gave up.

        import moediag

        result = moediag.diagnose("dumps/", taken_at=0)
        for trial in result.trials:
            print(trial.verdict, trial.culprits, trial.cause)
    """
    from moediag import arguments
    from moediag.errors import UsageError
    from moediag.pipeline.examine import examine

    if not paths:
        raise UsageError("diagnose() has no path", "Give the files or folders to read.")
    for path in paths:
        arguments.path("paths", path)
    if taken_at not in (None, 0):
        arguments.moment(f"taken_at={taken_at!r}", taken_at)
    return examine([Path(path) for path in paths], taken_at).result
