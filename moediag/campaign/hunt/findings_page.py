"""A hunt as lines, as JSON and as markdown. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from moediag.campaign.hunt.findings import Finding, Hunt, HuntCell, State
from moediag.protocol import CONDITIONS
from moediag.report.text_layout import Line, labelled
from moediag.result import wording

SCHEMA_VERSION = 1
_TITLES = {
    State.NEW: "NEW",
    State.KNOWN: "KNOWN",
    State.BY_DESIGN: "BY DESIGN",
    State.NOT_CONFIRMED: "UNSURE",
}
_NAMED = 12  # families named in a line


def to_json(hunt: Hunt) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": dict(hunt.versions),
        "incomplete": hunt.incomplete,
        "missing": hunt.missing,
        "families": {family.name: family.kind for family in hunt.families},
        "not_built": hunt.not_built,
        "undecided": [
            {"family": family, "relation": relation, "reason": reason}
            for (family, relation), reason in sorted(hunt.undecided.items())
        ],
        "findings": [_finding(finding) for finding in hunt.findings],
        "cells": [cell.to_json() for _, cell in sorted(hunt.cells.items())],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "signature": finding.signature,
        "state": str(finding.state),
        "relation": finding.relation,
        "kind": finding.kind,
        "what": finding.what,
        "entry": dataclasses.asdict(finding.entry) if finding.entry else None,
        "shown": [
            {"family": s.family, "evidence": s.evidence, **dataclasses.asdict(s.way)}
            for s in finding.shown
        ],
    }


def cell_line(cell: HuntCell) -> tuple[str, bool | None]:
    """Returns a finished cell in one line, and whether it is good."""
    outcome = cell.outcome
    spent = "" if cell.seconds is None else f"  {wording.seconds(cell.seconds)}"
    head = f"{outcome.family}  {outcome.relation}{spent}  "
    confirmed = [way for way in outcome.ways if way.confirmed]
    doubtful = [way for way in outcome.ways if way.holds is False and not way.confirmed]
    if confirmed:
        return f"{head}{confirmed[0].kind} ({_ways([w.way for w in confirmed])})", False
    if cell.undecided:
        return f"{head}not decided: {cell.undecided}", None
    if doubtful:
        return f"{head}not confirmed: {doubtful[0].failed} ({doubtful[0].way})", None
    if outcome.applicable is not None:
        return f"{head}not applicable: {outcome.applicable}", None
    return f"{head}holds", True


# ------------------------------------------------------------------------ the page


def lines(hunt: Hunt, width: int) -> Iterator[Line]:
    """Yields the page: what is new first."""
    yield ((f" HUNT     {summary(hunt)}", "plain"),)
    for finding in hunt.findings:
        style = "bad" if finding.state == State.NEW else "doubt"
        yield ()
        yield from labelled(_TITLES[finding.state], _headline(hunt, finding), width, style)
        for label, text in _details(finding):
            yield from labelled(label, text, width)
    yield ()
    for label, text in _rest(hunt):
        yield from labelled(label, text, width)


def summary(hunt: Hunt) -> str:
    """Returns what was checked and how much was found, in one line."""
    built = len(hunt.families) - len(hunt.not_built)
    counts = [f"{len(hunt.of(state))} {state}" for state in State if hunt.of(state)]
    return (
        f"transformers {hunt.versions.get('transformers')}: {len(hunt.cells)} cells, "
        f"{built} of {families(len(hunt.families))} built; "
        f"{', '.join(counts) or 'no finding'}"
    )


def _headline(hunt: Hunt, finding: Finding) -> str:
    says = hunt.relations.get(finding.relation, "")
    failed = f"{finding.relation} ({_ways(finding.ways)})"
    return f"{failed}, {families(len(finding.families))}. It should hold that {says}."


def _details(finding: Finding) -> Iterator[tuple[str, str]]:
    yield "families", _named(finding.families)
    worst = max(finding.shown, key=lambda shown: shown.way.error or 0.0)
    yield worst.family, worst.way.text
    if finding.state == State.NOT_CONFIRMED:
        failed = dict.fromkeys(shown.way.failed for shown in finding.shown)
        yield "not met", "; ".join(CONDITIONS.get(name, "checked in part") for name in failed)
    if finding.entry is not None:
        yield "see", f"{finding.entry.summary} ({finding.entry.where})"
    if worst.evidence:
        yield "evidence", worst.evidence


def _rest(hunt: Hunt) -> Iterator[tuple[str, str]]:
    for family, why in sorted(hunt.not_built.items()):
        yield "not built", f"{family}: {why}"
    for (family, relation), why in sorted(hunt.undecided.items()):
        yield "undecided", f"{family} {relation}: {why}"
    if hunt.missing:
        reason = hunt.incomplete or "the time limit was reached"
        yield "not run", f"{wording.plural(hunt.missing, 'cell')}: {reason}"


def markdown(hunt: Hunt) -> str:
    """Returns the page as markdown."""
    parts = [f"# Hunt: {summary(hunt)}", ""]
    versions = ", ".join(f"{n} {v}" for n, v in hunt.versions.items() if v)
    parts += [f"{versions}.", ""]
    for finding in hunt.findings:
        parts += [f"## {finding.state}: {finding.signature}", "", _headline(hunt, finding), ""]
        parts += [f"- {label}: {text}" for label, text in _details(finding)]
        parts += ["", "| family | way | difference | conditions |", "|---|---|---|---|"]
        for shown in finding.shown:
            way = shown.way
            text = way.text.replace("|", "\\|")
            parts.append(f"| {shown.family} | {way.way} | {text} | {_met(way.conditions)} |")
        parts.append("")
    rest = list(_rest(hunt))
    if rest:
        parts += ["## Not decided", ""]
        parts += [f"- {label}: {text}" for label, text in rest]
        parts.append("")
    return "\n".join(parts)


def _met(conditions: Any) -> str:
    words = {True: "yes", False: "no", None: "-"}
    return ", ".join(f"{name} {words[met]}" for name, met in conditions.items())


def families(number: int) -> str:
    """Returns ``1 family``, ``12 families``."""
    return f"{number} {'family' if number == 1 else 'families'}"


def _ways(ways: Sequence[str]) -> str:
    return ", ".join(ways)


def _named(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
