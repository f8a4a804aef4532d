"""A draft issue for each new failure of a night in which a rank failed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moediag.lab.campaign.nightly.blame import Blame
from moediag.lab.campaign.nightly.changes import Change, Compared
from moediag.lab.campaign.nightly.summary import Summary, versions, what
from moediag.lab.upstream import draft_evidence
from moediag.result import RunResult

FOLDER = "issues"
# The most likely owner of a bug if this package was moved.
_PROJECTS = {"transformers": "transformers", "accelerate": "accelerate", "torch": "pytorch",
             "torchtitan": "torchtitan"}  # fmt: skip


def drafts(summary: Summary, results: Mapping[str, RunResult], folder: Path) -> dict[str, str]:
    """Returns file name -> text: a draft for each new failure, and a program that reproduces it
    without moediag if one can be written. ``results``: by the entries' ``evidence``, below
    ``folder``. An expected failure that is gone has no draft."""
    found = {}
    for one in summary.of(Change.NEW):
        entry = one.entry
        name = f"{entry.scenario}-{entry.variant}-{entry.track.replace('=', '-')}"
        blame = summary.blames.get(entry.key)
        result = results.get(entry.evidence)
        if result is None:
            continue
        project = _PROJECTS.get(entry.track.partition("=")[0], "")
        written = draft_evidence.write(
            result, folder / entry.evidence, project, entry.variant, _began(one, summary, blame)
        )
        if written is not None:
            found[f"{name}.md"] = written.text
            if written.program.text:
                found[f"{name}.py"] = written.program.text
    return found


def _began(one: Compared, summary: Summary, blame: Blame | None) -> str:
    """Returns when the failure began, according to the nights and a bisect."""
    text = f"{what(one)} ({versions(one.entry)}, {summary.night.lane}). With moediag: "
    text += f"`{one.entry.command}`."
    return text if blame is None else f"{text}\n\n{blame.said}\n\n{blame.report}".rstrip()
