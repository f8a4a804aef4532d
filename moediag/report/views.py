"""Outputs of views: results as files of each format."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moediag.errors import EvidenceError, UsageError, says_disk_full
from moediag.report import stdout
from moediag.report.printable import printable
from moediag.result import RESULT_FILE, RunResult, read_result

if TYPE_CHECKING:
    from moediag.report.trace import Traced


def load(path: Path) -> tuple[RunResult, Path]:
    """Returns the result at ``path`` (a run directory or its result.json) and the run directory."""
    file = path / RESULT_FILE if path.is_dir() else path
    try:
        return read_result(file), file.parent
    except FileNotFoundError:
        # A bisect, a matrix, a hunt and a check write files of their own.
        own = next((one for kind in ("md", "json") for one in path.glob(f"[!.]*.{kind}")), None)
        instead = f"The answer of this one is in {own}. " if own is not None else ""
        raise EvidenceError(
            f"{file} does not exist",
            f"{instead}Give the directory of a finished `moediag run`, `watch`, `verify` or "
            "`resume`.",
        ) from None
    except (OSError, ValueError) as error:
        why = "not JSON" if isinstance(error, json.JSONDecodeError) else error
        raise EvidenceError(
            f"{file} is not a result of moediag: {why}",
            "Give the directory of a finished `moediag run`.",
        ) from error


def write(
    results: Sequence[RunResult],
    wanted: Mapping[str, Path],
    traced: Callable[[], Mapping[str, Traced]],
    made: Mapping[str, str] | None = None,
) -> list[str]:
    """Writes each requested format (``html``, ``markdown``, ``junit``, ``trace``); ``-`` is stdout.
    ``made``: already rendered texts. ``traced``: returns the evidence of all trials by name, called
    only for a trace. Returns what :func:`put` says of each file. Raises UsageError if one cannot be
    written."""
    written = []
    if sum(str(target) == "-" for target in wanted.values()) > 1:
        raise UsageError("stdout can hold only one format", "Give files for the others.")
    for kind, target in wanted.items():
        given = (made or {}).get(kind)
        text = given if given is not None else _render(kind, results, traced)
        text = printable(text) if kind == "markdown" else text
        if str(target) == "-":
            stdout.write(text)
            continue
        written.append(put(target, text, f"--{kind}"))
    return written


def put(target: Path, text: str, option: str) -> str:
    """Writes a file named by ``option``. Returns ``wrote FILE``, or ``replaced FILE`` if there was
    one. Raises UsageError if it cannot be written."""
    try:
        verb = "replaced" if target.exists() else "wrote"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        if says_disk_full(error):
            raise
        raise UsageError(
            f"{option} {target}: {error.strerror or error}",
            "Give a file in a folder that exists and can be written.",
        ) from error
    return f"{verb} {target}"


def _render(
    kind: str, results: Sequence[RunResult], traced: Callable[[], Mapping[str, Traced]]
) -> str:
    """Renders a format; imports only that format's libraries."""
    if kind == "trace":
        from moediag.report import trace

        return trace.render(traced())
    if kind == "html":
        from moediag.report.html import render
    elif kind == "markdown":
        from moediag.report.markdown import render
    else:
        from moediag.report.junit import render
    return render(results)


def evidence_of(loaded: Sequence[tuple[RunResult, Path]]) -> dict[str, Traced]:
    """Returns the evidence beside the results, by trial. Raises EvidenceError if there is none."""
    from moediag.evidence.trial_folder import read_trial
    from moediag.report.trace import traced

    trials = {}
    for result, folder in loaded:
        for t in result.trials:
            if not t.evidence or not (folder / t.evidence).is_dir():
                continue
            name = f"{t.variant} #{t.repeat + 1}" if t.repeat else t.variant
            label = name if len(loaded) == 1 else f"{folder.name}/{name}"
            trials[label] = traced(read_trial(folder / t.evidence), t)
    if not trials:
        raise EvidenceError(
            "no evidence directory of these runs is left",
            "A trace is drawn from the trial directories beside result.json: keep them.",
        )
    return trials


def short(folder: Path) -> Path:
    """Returns the folder as a user would type it: relative if it is below the current one."""
    with contextlib.suppress(ValueError):
        return folder.resolve().relative_to(Path.cwd())
    return folder
