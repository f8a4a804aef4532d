"""Pursues each new finding: its smallest size, since which release, one file, a draft issue."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moediag.errors import MoediagError, UsageError
from moediag.lab.campaign.engine import Clock, Display, Journal, Line, Records, Strategy, drive
from moediag.lab.campaign.executors import Lost, Maker
from moediag.lab.campaign.hunt.findings import Finding, Hunt, State
from moediag.lab.campaign.hunt.pursued import Pursued
from moediag.lab.campaign.hunt.question import PACKAGE, Wanted
from moediag.lab.campaign.hunt.release_changes import changes, version
from moediag.lab.campaign.hunt.since import since
from moediag.lab.campaign.hunt.workers import Workers
from moediag.lab.pipeline.single_process import OFFLINE
from moediag.lab.stacks.environment import Stack
from moediag.lab.upstream.draft import Program, document, reproduction
from moediag.lab.upstream.export.relation_file import Shown, export
from moediag.lab.upstream.templates import Part
from moediag.protocol import RelationOutcome, Size

FOLDER = "pursued"
FILE_TIMEOUT = 300.0  # seconds for the exported file
# In the order in which they are reduced: what a reader has to understand first.
FIELDS = ("experts", "top_k", "heads", "kv_heads", "hidden", "head_dim", "width")


def new(found: Hunt) -> list[Finding]:
    """Returns the findings to pursue: those that are new, with an earlier release those that
    appeared."""
    shown = found.findings if found.before is None else changes(found).appeared
    return [finding for finding in shown if finding.state == State.NEW]


def pursue(
    wanted: Wanted, found: Hunt, stack: Stack, maker: Maker[Workers], journal: Journal,
    display: Display,
    clock: Clock | None,
) -> Hunt:  # fmt: skip
    """Returns the hunt with what was found out about each new finding, while the time lasts."""
    strategy = _Pursuit(wanted, found, stack, maker, journal, display, clock)
    drive(strategy, journal, display)
    return dataclasses.replace(found, traces=strategy.traces)


class _Pursuit(Strategy[str, Pursued]):
    """An item is the signature of a finding."""

    counted = False

    def __init__(
        self, wanted: Wanted, found: Hunt, stack: Stack, maker: Maker[Workers], journal: Journal,
        display: Display, clock: Clock | None,
    ) -> None:  # fmt: skip
        self.question = wanted
        self.found = found
        self.stack = stack
        self.maker = maker
        self.journal = journal
        self.display = display
        self.clock = clock
        self.findings = {finding.signature: finding for finding in new(found)}
        self.records = Records.of(journal, "pursued", Pursued)
        self.traces = {name: self.records[name] for name in self.findings if name in self.records}

    def wanted(self, most: int) -> Sequence[str]:
        if self.clock is not None and self.clock.up:
            return []
        return [name for name in self.findings if name not in self.traces][:most]

    def name(self, item: str) -> str:
        return item

    def make(self, item: str) -> Pursued:
        finding, trace = self.findings[item], self._trace(item)
        self.display.say(f"pursuing {item} in {trace.family}")
        key = trace.family, trace.relation
        last = RelationOutcome(*key)

        def shows(size: Size) -> bool:
            nonlocal last
            name = " ".join((*key, trace.way, *map(str, dataclasses.astuple(size))))
            outcome: RelationOutcome = self.maker.call(name, "probe", key, trace.way, size)
            found = any(trace.shown_by(way) for way in outcome.ways)
            last = outcome if found else last
            return found

        if shows(trace.size):
            trace = dataclasses.replace(trace, size=smallest(shows, trace.size))
        try:
            began = since(
                self.question, trace, version(self.found), self.journal, self.display, self.clock
            )
        except MoediagError as error:
            began = error.message
        trace = dataclasses.replace(trace, since=began)
        return self._written(trace, finding, last)

    def _trace(self, item: str) -> Pursued:
        finding = self.findings[item]
        shown = finding.shown[0]
        return Pursued(shown.family, finding.relation, shown.way.way, finding.kind, finding.what)

    def _written(self, trace: Pursued, finding: Finding, last: RelationOutcome) -> Pursued:
        """Writes the file and the draft, and runs the file."""
        folder = self.journal.folder / FOLDER
        folder.mkdir(exist_ok=True)
        stem = trace.name.replace(" ", "-")
        says = self.found.relations.get(trace.relation, "")
        text = next((way.text for way in last.ways), finding.shown[0].way.text)
        program, problem = "", ""
        try:
            program = export(Shown(
                trace.family, trace.relation, trace.way, f"It should hold that {says}.",
                f"It does not in {trace.family} ({trace.way}): {text}", version(self.found),
                last.model, last.config,
            ))  # fmt: skip
        except UsageError as error:
            problem = error.message
        if program:
            path = folder / f"{stem}.py"
            path.write_text(program, encoding="utf-8")
            problem = _ran(self.stack, path)
        trace = dataclasses.replace(
            trace, problem=problem, program=f"{FOLDER}/{stem}.py" if program else "",
            draft=f"{FOLDER}/{stem}.md",
        )  # fmt: skip
        file = Program(
            f"{stem}.py", "" if problem else program, self._command(trace), problem,
            f"python {stem}.py",
        )  # fmt: skip
        (folder / f"{stem}.md").write_text(
            _draft(self.found, finding, trace, text, says, file), encoding="utf-8"
        )
        return trace

    def _command(self, trace: Pursued) -> str:
        words = ["moediag", "hunt", "--release", version(self.found), "--family", trace.family]
        words += ["--relation", trace.relation]
        for package, release in self.question.stack.items():
            words += ["--stack", f"{package}={release or 'newest'}"]
        return shlex.join(words)

    def not_run(self, item: str, why: Lost) -> Pursued:
        return dataclasses.replace(self._trace(item), problem=str(why))

    def taken(self, item: str, value: Pursued) -> None:
        self.traces[item] = value

    def keeps(self, value: Pursued) -> bool:
        """Whether it is final: a bisect that the time ended is continued."""
        return bool(value.since)

    def line(self, value: Pursued) -> Line:
        return Line(value.name)

    def done(self) -> str:
        return f"{len(self.traces)} pursued findings"


def _ran(stack: Stack, path: Path) -> str:
    """Returns why the file does not count: it must end with exit code 1 on the release."""
    environ = {**stack.environ(), **OFFLINE}
    command = [str(stack.python), str(path)]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=FILE_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return "the exported file did not end in time"
    if done.returncode == 1 and "Traceback" not in done.stderr:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines()
    return f"the exported file does not show it: {said[-1] if said else 'it printed nothing'}"


def _draft(
    found: Hunt, finding: Finding, trace: Pursued, text: str, says: str, program: Program
) -> str:
    families = ", ".join(finding.families)
    what = [
        f"It should hold that {says}. In {trace.family} it does not ({trace.way}): {text}",
        f"The same shows in: {families}." if len(finding.families) > 1 else "",
        "It shows again with other weights and at other sizes, float64 does not remove it, and a "
        "second computation agrees, as far as each applies.",
        f"When it began: {trace.since}" if trace.since else "",
    ]
    said = {
        Part.SYSTEM: "\n".join(f"- {name}: {v}" for name, v in found.versions.items() if v),
        Part.WHAT: "\n\n".join(filter(None, what)),
        Part.REPRODUCTION: reproduction(program, inline=False),
        Part.EXPECTED: f"It should hold that {says}.",
    }
    title = f"{trace.family}: {trace.relation} ({trace.way}) does not hold"
    project = "accelerate" if trace.way.startswith("accelerate") else PACKAGE
    return document(project, title, said)


def smallest(shows: Callable[[Size], bool], size: Size) -> Size:
    """Returns the smallest size that ``shows``, field by field, beginning with ``size``, which
    does. Another order of the fields may find another size."""
    for field in FIELDS:
        size = next((one for one in _smaller(size, field) if shows(one)), size)
    return size


def _smaller(size: Size, field: str) -> Iterator[Size]:
    """Yields sizes with less of ``field``, the smallest first."""
    value = 1
    while value < getattr(size, field):
        found = dataclasses.replace(size, **{field: value})
        if found.top_k <= found.experts and found.heads % found.kv_heads == 0:
            yield found
        value *= 2
