"""The page of a hunt, and its JSON. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from moediag.lab.campaign.hunt.findings import Finding, Hunt, HuntCell, Shown, State
from moediag.lab.campaign.hunt.pursued import Pursued
from moediag.lab.campaign.hunt.release_changes import Changes, changes, version
from moediag.protocol import CONDITIONS
from moediag.result import Table, wording
from moediag.result.answer_blocks import Answer, AnswerState, Case, Row, Section

SCHEMA_VERSION = 1
_TITLES = {
    State.NEW: "NEW",
    State.UNREPORTED: "FOUND",
    State.KNOWN: "KNOWN",
    State.BY_DESIGN: "BY DESIGN",
    State.NOT_CONFIRMED: "UNSURE",
}
_APPEARED, _GONE = "APPEARED", "GONE"
_NAMED = 12  # families named in a line


def to_json(hunt: Hunt) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": dict(hunt.versions),
        "incomplete": hunt.incomplete,
        "missing": hunt.missing,
        "families": {family.name: family.kind for family in hunt.families},
        "resolutions": list(hunt.resolutions),
        "not_built": hunt.not_built,
        "undecided": [
            {"family": family, "relation": relation, "reason": reason}
            for (family, relation), reason in sorted(hunt.undecided.items())
        ],
        "not_run": hunt.not_run,
        "findings": [_finding(f, hunt.traces.get(f.signature)) for f in hunt.findings],
        "cells": [dataclasses.asdict(cell) for _, cell in sorted(hunt.cells.items())],
        "against": None if hunt.before is None else _against(hunt.before, changes(hunt)),
    }


def _against(before: Hunt, found: Changes) -> dict[str, Any]:
    return {
        "versions": dict(before.versions),
        "appeared": [_finding(finding) for finding in found.appeared],
        "gone": [_finding(finding) for finding in found.gone],
        "same": found.same,
        "undecided": [
            {"family": family, "relation": relation, "reason": reason}
            for (family, relation), reason in sorted(found.undecided.items())
        ],
        "added": list(found.added),
        "removed": list(found.removed),
        "cells": [dataclasses.asdict(cell) for _, cell in sorted(before.cells.items())],
    }


def _finding(finding: Finding, trace: Pursued | None = None) -> dict[str, Any]:
    return {
        "signature": finding.signature,
        "state": str(finding.state),
        "relation": finding.relation,
        "kind": finding.kind,
        "what": finding.what,
        "entry": dataclasses.asdict(finding.entry) if finding.entry else None,
        "trace": None if trace is None else dataclasses.asdict(trace),
        "shown": [
            {"family": s.family, "evidence": s.evidence, **dataclasses.asdict(s.way)}
            for s in finding.shown
        ],
    }


def cell_line(cell: HuntCell) -> tuple[str, bool | None]:
    """Returns a finished cell in one line, and whether it is good."""
    outcome = cell.outcome
    spent = "" if cell.seconds is None else f"  {wording.seconds(cell.seconds)}"
    release = cell.release and f" on {cell.release}"
    head = f"{outcome.family}  {outcome.relation}{release}{spent}  "
    confirmed = [way for way in outcome.ways if way.confirmed]
    doubtful = [way for way in outcome.ways if way.holds is False and not way.confirmed]
    if confirmed:
        return f"{head}{confirmed[0].kind} ({_ways([w.way for w in confirmed])})", False
    if cell.undecided:
        return f"{head}not decided: {cell.undecided}", None
    if doubtful:
        return f"{head}not confirmed: {doubtful[0].failed} ({doubtful[0].way})", None
    if outcome.lacks:
        return f"{head}not run: {outcome.lacks} is not in this stack", None
    if outcome.applicable is not None:
        return f"{head}not applicable: {outcome.applicable}", None
    return f"{head}holds", True


# ------------------------------------------------------------------------ the page


def answer(hunt: Hunt) -> Answer:
    against = f" against {version(hunt.before)}" if hunt.before else ""
    versions = ", ".join(f"{n} {v}" for n, v in hunt.versions.items() if v)
    rest = tuple(Row(label, text, "doubt") for label, text in _rest(hunt))
    return Answer(
        "hunt",
        f"Hunt of transformers {version(hunt)}{against}",
        state(hunt),
        summary(hunt),
        (
            Section((f"{versions}.",), brief=()),
            *(_section(hunt, label, finding) for label, finding in _shown(hunt)),
            Section(rest, "Not decided"),
            Section(tuple(Row("families", text) for text in hunt.resolutions), "Families"),
        ),
        tuple(_rows_of_answer(hunt)),
        cases=tuple(_cases(hunt)),
        facts=to_json(hunt),
    )


def _rows_of_answer(hunt: Hunt) -> Iterator[Row]:
    """Yields the most important finding, or why nothing can be said."""
    doubtful = (*hunt.of(State.NEW), *hunt.of(State.NOT_CONFIRMED))
    shown = doubtful if hunt.before is None else changes(hunt).appeared
    if not shown:
        yield from (Row("WHY", f"{label}: {text}", "doubt") for label, text in [*_rest(hunt)][:1])
        return
    first, more = shown[0], len(shown) - 1
    worst, entry = strongest(first), first.entry
    others = f" (and {wording.plural(more, 'more finding')})" if more else ""
    yield Row("WHAT", f"{first.relation} ({_ways(first.ways)}): {worst.way.text}{others}")
    yield Row("WHERE", _named(first.families))
    unsure = f"not confirmed, not met: {_not_met(first)}" * (first.state == State.NOT_CONFIRMED)
    says = f"it should hold that {hunt.relations.get(first.relation, '')}"
    yield Row("WHY", unsure or (entry.summary if entry else says))
    yield Row("NEXT", _next(hunt, first))


def _next(hunt: Hunt, finding: Finding) -> str:
    trace = hunt.traces.get(finding.signature)
    if trace is not None and trace.draft:
        return f"Read the draft {trace.draft}; {trace.program or 'no file'} repeats it."
    if finding.entry is not None:
        return f"Read {finding.entry.where}"
    words = f"--family {strongest(finding).family} --relation {finding.relation} --pursue"
    return f"moediag hunt --release {version(hunt)} {words}"


def strongest(finding: Finding) -> Shown:
    """Returns where the finding differs most."""
    return max(finding.shown, key=lambda shown: shown.way.error or 0.0)


def state(hunt: Hunt) -> AnswerState:
    """Returns a failure if a finding is new, or appeared and is not in the register."""
    if hunt.before is not None:
        found = changes(hunt)
        failing = any(finding.state == State.NEW for finding in found.appeared)
        doubtful: object = found.undecided or hunt.missing or hunt.before.missing
    else:
        failing = bool(hunt.of(State.NEW))
        unsure = hunt.of(State.NOT_CONFIRMED)
        doubtful = unsure or hunt.undecided or hunt.not_built or hunt.missing
    return AnswerState.of(failing, doubtful, AnswerState.AS_EXPECTED)


def _section(hunt: Hunt, label: str, finding: Finding) -> Section:
    """Returns a finding; a terminal shows one that is not new in short."""
    style = "bad" if finding.state == State.NEW and label != _GONE else "doubt"
    details = [Row(*one) for one in _details(finding, hunt.traces.get(finding.signature))]
    whole = (Row(label, _headline(hunt, finding), style), *details)
    short = hunt.before is None and finding.state != State.NEW
    brief = (Row(label, _headline(hunt, finding, short=True), style), Row(*_briefly(finding)))
    table = _in_register(finding) if finding.entry else _rows(finding)
    title = f"{label.lower()}: {finding.signature}"
    return Section((*whole, table), title, brief=brief if short else whole)


def _cases(hunt: Hunt) -> Iterator[Case]:
    """Yields a case for each cell. What the register lists is as expected."""
    found = hunt.findings if hunt.before is None else changes(hunt).appeared
    states = {State.NEW: AnswerState.FAILURE, State.NOT_CONFIRMED: AnswerState.INCONCLUSIVE}
    shown = {(s.family, f.relation): states.get(f.state) for f in reversed(found) for s in f.shown}
    for key, cell in sorted(hunt.cells.items()):
        doubtful = AnswerState.of(False, cell.undecided, AnswerState.AS_EXPECTED)
        outcome = shown.get(key) or doubtful
        skipped = cell.outcome.built and not cell.undecided and cell.outcome.applicable is not None
        yield Case(
            cell.outcome.relation, cell.outcome.family, None if skipped else outcome,
            cell_line(cell)[0], seconds=cell.seconds or 0.0, suite=cell.outcome.relation,
        )  # fmt: skip


def _briefly(finding: Finding) -> tuple[str, str]:
    if finding.entry is not None:
        return "see", f"{finding.entry.summary} ({finding.entry.where})"
    return "not met", _not_met(finding)


def _shown(hunt: Hunt) -> Iterator[tuple[str, Finding]]:
    """Yields the findings of the page, each with its title."""
    if hunt.before is None:
        yield from ((_TITLES[finding.state], finding) for finding in hunt.findings)
        return
    found = changes(hunt)
    yield from ((_APPEARED, finding) for finding in found.appeared)
    yield from ((_GONE, finding) for finding in found.gone)


def summary(hunt: Hunt) -> str:
    """Returns what was checked and how much was found, in one line."""
    if hunt.before is not None:
        found = changes(hunt)
        return (
            f"transformers {version(hunt)} against {version(hunt.before)}: "
            f"{len(hunt.cells)} and {wording.plural(len(hunt.before.cells), 'cell')}; "
            f"{wording.plural(len(found.appeared), 'finding')} appeared, {len(found.gone)} went "
            f"away; {wording.plural(found.same, 'way')} of a relation failed on both"
        )
    built = len(hunt.families) - len(hunt.not_built)
    others = [state for state in State if state != State.NEW and hunt.of(state)]
    counts = [f"{len(hunt.of(State.NEW)) or 'nothing'} new"] if hunt.findings else []
    counts += [f"{len(hunt.of(state))} {state}" for state in others]
    return (
        f"transformers {version(hunt)}: {wording.plural(len(hunt.cells), 'cell')}, "
        f"{built} of {families(len(hunt.families))} built; "
        f"{', '.join(counts) or 'no finding'}"
    )


def _headline(hunt: Hunt, finding: Finding, short: bool = False) -> str:
    failed = f"{finding.relation} ({_ways(finding.ways)})"
    if short:
        return f"{failed}: {_named(finding.families)}"
    says = hunt.relations.get(finding.relation, "")
    return f"{failed}, {families(len(finding.families))}. It should hold that {says}."


def _details(finding: Finding, trace: Pursued | None) -> Iterator[tuple[str, str]]:
    yield "families", _named(finding.families)
    worst = strongest(finding)
    yield worst.family, worst.way.text
    if finding.entry is not None or finding.state == State.NOT_CONFIRMED:
        yield _briefly(finding)
    if worst.evidence:
        yield "evidence", worst.evidence
    if trace is not None:
        size = ", ".join(f"{name} {n}" for name, n in dataclasses.asdict(trace.size).items())
        yield "smallest", f"{trace.family} with {size}"
        yield "since", trace.since or "the time was up before it was found"
        yield "file", trace.program if not trace.problem else f"none: {trace.problem}"
        yield "draft", trace.draft


def _not_met(finding: Finding) -> str:
    failed = dict.fromkeys(shown.way.failed for shown in finding.shown)
    return "; ".join(CONDITIONS.get(name, "checked in part") for name in failed)


def _rest(hunt: Hunt) -> Iterator[tuple[str, str]]:
    if hunt.before is not None:
        yield from _not_compared(hunt, hunt.before)
        return
    for family, why in sorted(hunt.not_built.items()):
        yield "not built", f"{family}: {why}"
    for (family, relation), why in sorted(hunt.undecided.items()):
        yield "undecided", f"{family} {relation}: {why}"
    for relation, package in hunt.not_run.items():
        yield "not run", f"{relation}: {package} is not in this stack (--stack {package}=VERSION)"
    if hunt.missing:
        reason = hunt.incomplete or "the time limit was reached"
        yield "not run", f"{wording.plural(hunt.missing, 'cell')}: {reason}"


def _not_compared(hunt: Hunt, before: Hunt) -> Iterator[tuple[str, str]]:
    found = changes(hunt)
    for names, one, other in ((found.added, hunt, before), (found.removed, before, hunt)):
        if names:
            yield "families", f"{version(one)} has {', '.join(names)}; {version(other)} has not"
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (family, relation), why in sorted(found.undecided.items()):
        by_reason.setdefault((relation, why), []).append(family)
    for (relation, why), names_ in by_reason.items():
        yield "unknown", f"{relation} of {_named(names_)}: {why}"
    for one in (hunt, before):
        if one.missing:
            yield "not run", f"{wording.plural(one.missing, 'cell')} of {version(one)}"


def _rows(finding: Finding) -> Table:
    rows = ((s.family, s.way.way, s.way.text, _met(s.way.conditions)) for s in finding.shown)
    return Table("", ("family", "way", "difference", "conditions"), tuple(rows))


def _in_register(finding: Finding) -> Table:
    """Returns a row for the families that show one way alike. The register says what it is."""
    rows: dict[tuple[str, str], list[str]] = {}
    for shown in finding.shown:
        rows.setdefault((shown.way.way, _met(shown.way.conditions)), []).append(shown.family)
    cells = ((way, ", ".join(names), met) for (way, met), names in rows.items())
    return Table("", ("way", "families", "conditions"), tuple(cells))


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
