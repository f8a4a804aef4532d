"""Since which release a finding shows, and whether it ended: a bisect whose probe is one way of one
relation. The search is that of ``moediag bisect``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from packaging.version import Version

from moediag.errors import MoediagError
from moediag.lab.campaign.bisect.answer_page import sentences
from moediag.lab.campaign.bisect.candidates import searched
from moediag.lab.campaign.bisect.probe_verdict import BAD, GOOD, ProbeVerdict, other, skip
from moediag.lab.campaign.bisect.question import PATIENCE
from moediag.lab.campaign.bisect.search.answer import LACKING
from moediag.lab.campaign.bisect.search.search import Options, Probe, Search
from moediag.lab.campaign.bisect.timeline import ProbeRecord, probe_name
from moediag.lab.campaign.engine import Clock, Display, Journal, Line, Records, Strategy, drive
from moediag.lab.campaign.hunt.pursued import Pursued
from moediag.lab.campaign.hunt.question import PACKAGE, Wanted
from moediag.lab.campaign.hunt.workers import Workers
from moediag.lab.stacks import environment
from moediag.lab.stacks import releases as index
from moediag.lab.stacks.releases import Release
from moediag.protocol import RelationOutcome
from moediag.result import wording


def since(
    wanted: Wanted, trace: Pursued, version: str, journal: Journal, display: Display,
    clock: Clock | None,
) -> str:  # fmt: skip
    """Returns in sentences where ``trace``, which shows on ``version``, began and ended; "" if the
    time was up. Raises StackError if the index cannot be asked."""
    bisect = _Bisect(wanted, trace, releases(version), version, journal, display, clock)
    drive(bisect, journal, display)
    answer = bisect.search.answer
    names = [release.version for release in bisect.releases]
    return "" if answer is None else " ".join(sentences(PACKAGE, names, answer))


def releases(version: str) -> list[Release]:
    """Returns the final releases of two years up to ``version``, and every later one, pre-releases
    too. Raises StackError."""
    listed = index.releases(PACKAGE)
    place = Version(version)
    chosen = searched(PACKAGE, listed, version, None, pre=True)
    return [r for r in chosen if not r.prerelease or Version(r.version) >= place]


def verdict(trace: Pursued, outcome: RelationOutcome) -> ProbeVerdict:
    """Returns what the probe of a release says. Pure."""
    if not outcome.built or outcome.applicable is not None:
        return skip(f"{LACKING} {outcome.applicable or outcome.problem}")
    if outcome.problem:
        return other(outcome.problem)
    (way,) = outcome.ways
    if way.holds:
        return GOOD
    if way.holds is None:
        return skip(way.text)
    return BAD if trace.shown_by(way) else other(f"{way.kind}: {way.what}")


class _Bisect(Strategy[Probe, ProbeRecord]):
    """The probes of one finding, until the search has its answer."""

    def __init__(
        self, wanted: Wanted, trace: Pursued, found: Sequence[Release], version: str,
        journal: Journal, display: Display, clock: Clock | None,
    ) -> None:  # fmt: skip
        self.question = wanted
        self.trace = trace
        self.releases = found
        self.folder = journal.folder
        self.display = display
        self.clock = clock
        places = {release.version: place for place, release in enumerate(found)}
        bad = places[Version(version).public]
        options = Options(bad=bad, window=bad + 1 < len(found), patience=PATIENCE)
        self.search = Search(len(found), options)
        self.search.told(Probe(bad), BAD)
        self.records = Records.of(journal, "probe", ProbeRecord, ProbeRecord.to_json)
        for place in range(len(found)):
            for attempt in (1, 2):
                probe = Probe(place, attempt)
                if self.name(probe) in self.records:
                    self.search.told(probe, self.records[self.name(probe)].verdict)

    def wanted(self, most: int) -> Sequence[Probe]:
        up = self.clock is not None and self.clock.up
        found = [] if up or self.search.answer is not None else self.search.next(most)
        self.display.expect(len(found))
        return found

    def name(self, item: Probe) -> str:
        return f"{self.trace.name} on {probe_name(self.releases[item.index].version, item.attempt)}"

    def make(self, item: Probe) -> ProbeRecord:
        release = self.releases[item.index]
        begun = time.monotonic()
        key = self.trace.family, self.trace.relation
        try:
            stack = environment.ensure(self.question.request(release.version))
            folder = self.folder / "bisect" / release.version
            with contextlib.closing(Workers(self.question, stack, folder)) as workers:
                found = verdict(self.trace, workers.probe(key, self.trace.way, self.trace.size))
        except MoediagError as error:
            found = skip(error.message)
        spent = time.monotonic() - begun
        return ProbeRecord(release.version, found, item.attempt, seconds=spent)

    def taken(self, item: Probe, value: ProbeRecord) -> None:
        self.search.told(item, value.verdict)

    def line(self, value: ProbeRecord) -> Line:
        text = f"{self.trace.family}  {self.trace.way}  {value.version}  {value.verdict.kind}"
        return Line(text, None, value.seconds)

    def done(self) -> str:
        return wording.plural(len(self.search.known), "probe")
