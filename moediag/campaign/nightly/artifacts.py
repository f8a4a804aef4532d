"""Files of a night beside its history: JUnit XML and a draft issue for each new failure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from moediag.campaign.nightly.blame import Blame
from moediag.campaign.nightly.changes import Change, Compared
from moediag.campaign.nightly.night import State
from moediag.campaign.nightly.summary import Summary, title, versions, what
from moediag.report.finding import finding_of
from moediag.report.junit import WIDTH, clean
from moediag.report.markdown import LIMIT
from moediag.report.terminal import finding_lines
from moediag.report.text_layout import plain
from moediag.result import RunResult
from moediag.upstream import draft_evidence, system_info

FOLDER = "issues"
# Whose bug it is first of all where this package was moved.
_PROJECTS = {"transformers": "transformers", "accelerate": "accelerate", "torch": "pytorch",
             "torchtitan": "torchtitan"}  # fmt: skip
_DRAFT = "> Draft, written by `moediag nightly`. Nobody has filed it: read it, check it, then do.\n"


def junit(summary: Summary) -> str:
    """One suite a track, one case a variant. What fails is a failure, also where that is known;
    what could not be judged is an error, what does not apply is skipped."""
    root = ElementTree.Element("testsuites", name="moediag nightly")
    by_track: dict[str, list[Compared]] = {}
    for one in summary.compared:
        by_track.setdefault(one.entry.track, []).append(one)
    for track, own in by_track.items():
        cases = [_case(one) for one in own]
        kinds = [child.tag for case in cases for child in case]
        suite = ElementTree.SubElement(
            root, "testsuite", name=clean(track), timestamp=summary.night.started,
            tests=str(len(cases)), failures=str(kinds.count("failure")),
            errors=str(kinds.count("error")), skipped=str(kinds.count("skipped")),
        )  # fmt: skip
        suite.extend(cases)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def _case(one: Compared) -> ElementTree.Element:
    entry = one.entry
    case = ElementTree.Element(
        "testcase", name=clean(entry.variant), classname=clean(f"{entry.scenario}.{entry.track}")
    )
    message = clean(f"{one.change}: {what(one)}")
    if entry.state == State.BAD:
        child = ElementTree.SubElement(case, "failure", message=message, type=str(one.change))
        child.text = clean(f"{entry.why}\n\n{entry.command}\n{entry.evidence}")
    elif entry.state == State.UNKNOWN:
        tag = "skipped" if entry.verdict == "not-applicable" else "error"
        ElementTree.SubElement(case, tag, message=message)
    return case


def drafts(summary: Summary, results: Mapping[str, RunResult], folder: Path) -> dict[str, str]:
    """File name -> text: a draft for each new failure, and beside it the file that shows it
    without moediag, where one can be written. ``results``: by the entries' ``evidence``, below
    ``folder``."""
    found = {}
    for one in summary.of(Change.NEW):
        entry = one.entry
        name = f"{entry.scenario}-{entry.variant}-{entry.track.replace('=', '-')}"
        blame = summary.blames.get(entry.key)
        result = results.get(entry.evidence)
        written = None
        if result is not None:
            project = _PROJECTS.get(entry.track.partition("=")[0], "")
            written = draft_evidence.write(
                result, folder / entry.evidence, project, entry.variant, _began(one, summary, blame)
            )
        if written is None:
            found[f"{name}.md"] = _draft(one, summary, result, blame)
            continue
        found[f"{name}.md"] = written.text
        if written.program.text:
            found[f"{name}.py"] = written.program.text
    return found


def _began(one: Compared, summary: Summary, blame: Blame | None) -> str:
    """When it began, as far as the nights and a bisect tell."""
    text = f"{what(one)} ({versions(one.entry)}, {summary.night.lane}). With moediag: "
    text += f"`{one.entry.command}`."
    return text if blame is None else f"{text}\n\n{blame.said}\n\n{blame.report}".rstrip()


def _draft(one: Compared, summary: Summary, result: RunResult | None, blame: Blame | None) -> str:
    """Where no rank failed (an expected failure that is gone) or the run is not there: what the
    night knows. Below the length of an issue body."""
    entry = one.entry
    parts = [f"# {entry.verdict} in {title(entry)}\n", _DRAFT]
    parts += ["### System info\n", f"{versions(entry)}, {summary.night.lane}\n"]
    parts += ["\n".join([*system_info.here().lines(), ""])]
    parts += ["### What happens\n", f"{what(one)}\n", f"{entry.why}\n"]
    trial = next((t for t in result.trials if t.variant == entry.variant), None) if result else None
    if trial is not None and result is not None:
        page = (plain(line) for line in finding_lines(finding_of([trial], result), WIDTH, None))
        parts += ["```text\n" + "\n".join(page).replace("```", "'''") + "\n```\n"]
    parts += ["### To reproduce\n", f"```console\n{entry.command}\n```\n"]
    parts += ["### Expected\n", f"{entry.expected if entry.track == 'pinned' else 'clean'}\n"]
    if blame is not None:
        parts += ["### When it began\n", f"{blame.said}\n", blame.report]
    text = "\n".join(part for part in parts if part)
    return text if len(text) <= LIMIT else text[: LIMIT - 30] + "\n\n*cut at the size limit*\n"
