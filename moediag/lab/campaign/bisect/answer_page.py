"""A bisect's answer as sentences, JSON and a page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from moediag.lab.campaign.bisect.beyond import Beyond
from moediag.lab.campaign.bisect.probe_verdict import ProbeVerdict, describe
from moediag.lab.campaign.bisect.search.answer import Answer, Boundary, Status
from moediag.lab.campaign.bisect.timeline import ProbeRecord, timeline
from moediag.records import dataclass
from moediag.result import Table
from moediag.result import answer_blocks as page
from moediag.result.wording import plural

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a page about a bisect needs."""

    package: str
    scenario: str
    answer: Answer
    releases: tuple[str, ...]  # all that were searched, oldest first
    # index -> combined verdict of its probes (``Search.verdicts``)
    verdicts: Mapping[int, ProbeVerdict]
    probes: tuple[ProbeRecord, ...] = ()
    signatures: tuple[str, ...] = ()
    match: str = "exact"
    reproduce: tuple[str, ...] = ()  # command lines
    # system information for a bug report
    environment: Mapping[str, str] = field(default_factory=dict)
    # what is known of "began" and "ended" beyond their releases
    beyond: Mapping[str, Beyond] = field(default_factory=dict)
    extras: tuple[ProbeRecord, ...] = ()  # probes made for ``beyond``


# ------------------------------------------------------------------------ sentences


def sentences(package: str, releases: Sequence[str], answer: Answer) -> list[str]:
    """Returns the findings, the most important first."""
    name = f"{package} {releases[answer.end]}"
    if answer.status == Status.NOT_REPRODUCED:
        return [f"Not reproduced: {name}, the bad end, is good."]
    if answer.status == Status.UNDECIDED:
        return [f"{name}, the bad end, could not be judged: {describe(answer.end_verdict)}."]
    found = []
    for boundary in answer.boundaries:
        found.append(_boundary(package, releases, boundary))
        for bad, good, again in boundary.returns:
            found.append(
                f"It is not one stretch: {releases[bad]} is {_is(boundary, bad)}, "
                f"{releases[good]} {_is(boundary, good)}, {releases[again]} "
                f"{_is(boundary, again)}. The answer is the stretch around {releases[answer.end]}."
            )
    if answer.given_good is not None:
        index, verdict = answer.given_good
        found.append(f"{releases[index]} was given as good; it is not: {describe(verdict)}.")
    for index, kind in answer.beside:
        found.append(f"It is not one stretch: {releases[index]} is {kind}.")
    return found


def _is(boundary: Boundary, index: int) -> str:
    return "good" if index == boundary.good else "bad"


def _boundary(package: str, releases: Sequence[str], boundary: Boundary) -> str:
    if boundary.good is None:
        return _open(package, releases, boundary)
    bad, good = releases[boundary.bad], releases[boundary.good]
    first, last = ("good release", "bad") if boundary.after else ("bad release", "good")
    new, old = (good, bad) if boundary.after else (bad, good)
    after = " after it" if boundary.after else ""
    candidates = [releases[i] for i in boundary.candidates]
    if boundary.exact:
        text = f"{package} {new} is the first {first}{after}; {old} is the last {last} one."
    else:
        text = (
            f"The first {first}{after} is one of {package} {candidates[0]} to {candidates[-1]}: "
            f"{old} is still {last}, {new} is {'good' if boundary.after else 'bad'}"
            f"{_hidden(releases, boundary)}."
        )
    if not boundary.confirmed:
        text += " The two were not confirmed by a second probe."
    return text


def _open(package: str, releases: Sequence[str], boundary: Boundary) -> str:
    bad, limit = releases[boundary.bad], releases[boundary.limit]
    if boundary.to_the_end:
        if boundary.after:
            return f"Still bad in {package} {bad}, the newest release that was searched."
        return f"Bad as far back as {package} {bad}, the oldest release that was searched."
    if boundary.since_it_exists:
        return f"Bad since {package} {bad}, the first release that can run it."
    way = "newer" if boundary.after else "older"
    return (
        f"No good release {way} than {package} {bad}, the last that is bad, was found up to {limit}"
        f"{_hidden(releases, boundary)}."
    )


def _hidden(releases: Sequence[str], boundary: Boundary) -> str:
    """Returns ``; 2 could not be judged: 4.53.0, 4.53.1 (skipped (…))``, each reason once."""
    text = ""
    if boundary.undecided:
        reasons: dict[str, list[str]] = {}
        for index, verdict in boundary.undecided:
            # A reason that names the release would be different for each.
            reason = describe(verdict).replace(f" {releases[index]} ", " ")
            reasons.setdefault(reason, []).append(releases[index])
        listed = "; ".join(f"{_named(names)}: {reason}" for reason, names in reasons.items())
        text += f"; {len(boundary.undecided)} could not be judged ({listed})"
    if boundary.untried:
        names = [releases[i] for i in boundary.untried]
        text += f"; {len(names)} between them not tried ({_named(names)})"
    return text


def _named(names: Sequence[str]) -> str:
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:2])}, … {names[-1]}"


# ------------------------------------------------------------------------ pages


def to_json(report: Report) -> dict[str, Any]:
    """Returns JSON with versions instead of indexes, readable without the list of releases."""
    answer, releases = report.answer, report.releases
    return {
        "schema_version": SCHEMA_VERSION,
        "scenario": report.scenario,
        "package": report.package,
        "status": str(answer.status),
        "confidence": str(answer.confidence),
        "bad_end": releases[answer.end],
        "bad_end_verdict": answer.end_verdict.to_json(),
        "began": _boundary_json(report, "began", answer.began),
        "ended": _boundary_json(report, "ended", answer.ended),
        "monotone": answer.monotone,
        "beside": [{"version": releases[i], "kind": str(kind)} for i, kind in answer.beside],
        "given_good": None
        if answer.given_good is None
        else {
            "version": releases[answer.given_good[0]],
            "verdict": answer.given_good[1].to_json(),
        },
        "summary": sentences(report.package, releases, answer),
        "timeline": timeline(releases, report.verdicts),
        "signatures": list(report.signatures),
        "match": report.match,
        "releases": {"count": len(releases), "oldest": releases[0], "newest": releases[-1]},
        "probes": [record.to_json() for record in report.probes],
        "further_probes": [record.to_json() for record in report.extras],
        "reproduce": list(report.reproduce),
        "environment": dict(report.environment),
    }


def _boundary_json(report: Report, name: str, boundary: Boundary | None) -> dict[str, Any] | None:
    if boundary is None:
        return None
    releases = report.releases
    beyond = report.beyond.get(name)
    good = None if boundary.good is None else releases[boundary.good]
    return {
        "bad": releases[boundary.bad],
        "good": good,
        "limit": releases[boundary.limit],
        "exact": boundary.exact,
        "candidates": [releases[i] for i in boundary.candidates],
        "undecided": [
            {"version": releases[i], "verdict": v.to_json()} for i, v in boundary.undecided
        ],
        "untried": [releases[i] for i in boundary.untried],
        "confirmed": boundary.confirmed,
        "missed": boundary.missed,
        "again": [releases[i] for i in boundary.again],
        **(beyond.to_json() if beyond else {}),
    }


def answer(report: Report) -> page.Answer:
    """Returns the page, which can be pasted into an issue."""
    told = sentences(report.package, report.releases, report.answer)
    shown = timeline(report.releases, report.verdicts)
    beyond = [line for one in report.beyond.values() for line in one.sentences()]
    found: list[page.Block] = [page.Code(shown)] if shown else []
    return page.Answer(
        "bisect",
        f"{report.scenario} by release of {report.package}",
        page.AnswerState.of(False, not answered(report), page.AnswerState.ANSWERED),
        told[0].rstrip("."),
        (
            page.Section((*found, *told[1:], *beyond)),
            page.Section(tuple(_details(report)), "Probes", brief=()),
        ),
        tuple(_rows_of_answer(report)),
        cases=tuple(map(_case, (*report.probes, *report.extras))),
        facts=to_json(report),
    )


def _rows_of_answer(report: Report) -> Iterator[page.Row]:
    if report.signatures:
        yield page.Row("WHAT", f"{report.scenario}: {report.signatures[0]}")
    blamed = [line for one in report.beyond.values() for line in one.sentences()]
    if blamed:
        yield page.Row("WHERE", blamed[0].rstrip("."))
    yield page.Row("SURE", _confidence(report).rstrip("."))
    boundaries = report.answer.boundaries
    bad = report.releases[boundaries[0].bad if boundaries else report.answer.end]
    shows = [line for line in report.reproduce if f"{report.package}={bad}" in line]
    yield from (page.Row("NEXT", line) for line in (shows or report.reproduce)[:1])


def answered(report: Report) -> bool:
    """Whether each boundary lies between a bad and a good release, or the failure extends to the
    last release or to the first that has the scenario's requirements; and commits were found if a
    clone was given."""
    commits = [one.commits for one in report.beyond.values() if one.commits is not None]
    boundaries = report.answer.boundaries
    ends = [b.good is not None or b.to_the_end or b.since_it_exists for b in boundaries]
    open_ = report.answer.status == Status.OPEN and all(ends)
    found = report.answer.status == Status.FOUND or open_
    return found and all(one.answered for one in commits)


def _confidence(report: Report) -> str:
    count, tried = len(report.releases), len(report.verdicts)
    missed = [b.missed for b in report.answer.boundaries if b.missed is not None]
    chance = f"; a failure missed in the last good release: {max(missed):.1%}" if missed else ""
    probed = f"{plural(len(report.probes), 'probe')} of {tried} of {plural(count, 'release')}"
    further = f", and {len(report.extras)} further" if report.extras else ""
    span = f"{report.releases[0]} to {report.releases[-1]}"
    return f"Confidence {report.answer.confidence}{chance}. {probed}, {span}{further}."


def _details(report: Report) -> Iterator[page.Block]:
    for signature in report.signatures:
        yield page.Row(f"looked for ({report.match})", signature)
    for title, probes in (("probes", report.probes), ("further probes", report.extras)):
        if probes:
            yield _table(report, title, probes)
    if report.reproduce:
        yield "To reproduce:"
        yield page.Code("\n".join(report.reproduce), "console")
    if report.environment:
        yield Table("environment", ("", ""), tuple(report.environment.items()))


def _table(report: Report, title: str, probes: Sequence[ProbeRecord]) -> Table:
    places = {version: index for index, version in enumerate(report.releases)}
    ordered = sorted(probes, key=lambda r: (places.get(r.version, -1), r.attempt))
    rows = tuple(
        (
            record.name,
            record.uploaded[:10],
            str(record.verdict.kind),
            record.verdict.text or record.signature,
            None if record.seconds is None else round(record.seconds, 1),
        )
        for record in ordered
    )
    return Table(title, (report.package, "uploaded", "verdict", "what showed", "seconds"), rows)


def _case(record: ProbeRecord) -> page.Case:
    decided = page.AnswerState.of(False, not record.verdict.decided, page.AnswerState.ANSWERED)
    return page.Case(
        record.name, "probe", decided, describe(record.verdict), seconds=record.seconds or 0.0,
        suite="probes",
    )  # fmt: skip
