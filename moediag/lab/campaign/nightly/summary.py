"""A night on one page: markdown for a step summary, lines for a terminal, annotations. Pure.

The order: new, fixed, still failing (and since when), flaky, could not be judged, did not fit, and
the table of everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from moediag.lab.campaign.nightly.blame import Blame
from moediag.lab.campaign.nightly.changes import Change, Compared
from moediag.lab.campaign.nightly.night import Entry, Found, Hunted, Job, Night, State
from moediag.records import dataclass
from moediag.report.text_layout import Line, indented, labelled
from moediag.result import wording

LIMIT = 1_000_000  # bytes; GitHub drops a step summary beyond 1 MiB whole
MOST_ANNOTATIONS = 10  # of one kind per step; GitHub shows no more
_HEADS = {
    Change.NEW: "New failures",
    Change.FIXED: "Fixed",
    Change.STILL: "Still failing",
    Change.FLAKY: "Flaky",
    Change.UNKNOWN: "Could not be judged",
}
_STYLES = {Change.NEW: "bad", Change.FIXED: "good", Change.FLAKY: "doubt"}
_MARKS = {State.GOOD: "✅", State.BAD: "❌", State.UNKNOWN: "❔"}


@dataclass(frozen=True, slots=True)
class Summary:
    """What the page shows. ``blames``: key of a new failure -> result of its bisect;
    ``unreadable``: ignored files of the history."""

    night: Night
    compared: tuple[Compared, ...]
    blames: Mapping[tuple[str, str, str], Blame] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()

    def of(self, change: Change) -> list[Compared]:
        return [c for c in self.compared if c.change == change]

    @property
    def left_out(self) -> list[Job]:
        return [job for job in self.night.jobs if not job.finished]


def sentence(summary: Summary) -> str:
    """Returns ``1 new failure, 2 fixed, 3 still failing, 0 flaky; 120 variants judged in 34 jobs,
    …``"""
    new, fixed, still, flaky = (
        len(summary.of(c)) for c in (Change.NEW, Change.FIXED, Change.STILL, Change.FLAKY)
    )
    judged = sum(e.state != State.UNKNOWN for e in summary.night.entries)
    done = sum(job.finished for job in summary.night.jobs)
    text = (
        f"{wording.plural(new, 'new failure')}, {fixed} fixed, {still} still failing, "
        f"{flaky} flaky; "
        f"{wording.plural(judged, 'variant')} judged in {wording.plural(done, 'job')}"
    )
    left = len(summary.left_out)
    return text + (f", {wording.plural(left, 'job')} left out" if left else "")


def what(compared: Compared) -> str:
    """Returns one line on one variant, without its name."""
    entry = compared.entry
    now = f"{entry.verdict} on {versions(entry)}"
    if compared.change == Change.NEW:
        return f"{now}{_expected(entry)}; {_good_before(compared)}"
    if compared.change == Change.FIXED and compared.since and compared.before:
        was = compared.before.entry
        gone = f"{was.verdict} since {compared.since.night[:10]}, last on {versions(was)}"
        return f"{now}; it was {gone}"
    if compared.change == Change.STILL and compared.since:
        began = versions(compared.since.entry)
        return f"{now}{_expected(entry)}, since {compared.since.night[:10]} ({began})"
    if compared.change == Change.FLAKY:
        shown = [f"{seen.night[:10]} {seen.entry.verdict}" for seen in compared.outcomes]
        return f"on one stack, {versions(entry)}: {', '.join(shown)}"
    if compared.change == Change.UNKNOWN:
        last = compared.before
        before = f"; {last.entry.verdict} on {last.night[:10]}" if last else ""
        return f"{entry.verdict}: {entry.why or 'no reason was given'}{before}"
    return now


def versions(entry: Entry) -> str:
    """Returns ``transformers 5.0.0, accelerate 1.12.0, torch 2.13.0``."""
    order = [n for n in ("transformers", "torchtitan", "accelerate", "torch") if n in entry.stack]
    moved = entry.track.partition("=")[0]
    if moved in entry.stack and moved not in order:
        order.insert(0, moved)
    return ", ".join(f"{n} {entry.stack[n].split('+')[0]}" for n in order) or "an unknown stack"


def title(entry: Entry) -> str:
    return f"{entry.scenario} · {entry.variant} · {entry.track}"


def _expected(entry: Entry) -> str:
    return f", expected {entry.expected}" if entry.track == "pinned" else ""


def _good_before(compared: Compared) -> str:
    last, before = compared.last_good, compared.before
    if before is not None and before.entry.state == State.BAD:
        same = before.entry.verdict == compared.entry.verdict
        how = f" ({before.entry.signature} then, {compared.entry.signature} now)" if same else ""
        return f"another failure than {before.entry.verdict} on {before.night[:10]}{how}"
    if last is None:
        return "no earlier night says that it was good"
    return f"good on {last.night[:10]} with {versions(last.entry)}"


def hunt_sentence(hunt: Hunted) -> str:
    """Returns what the hunt of the night compared, in one line."""
    if hunt.problem:
        return f"transformers {hunt.release}: no hunt, {hunt.problem}"
    text = (
        f"transformers {hunt.release} against {hunt.against}: {len(hunt.appeared)} appeared, "
        f"{len(hunt.gone)} went away, {wording.plural(hunt.same, 'way')} of a relation failed on "
        f"both, {wording.plural(hunt.undecided, 'cell')} not compared"
    )
    left = wording.plural(hunt.left, "cell")
    return f"{text}; {left} left for the next night" if hunt.left else text


def _hunt_lines(hunt: Hunted) -> Iterator[str]:
    for word, every in (("appeared", hunt.appeared), ("went away", hunt.gone)):
        yield from (f"{word}: {_of_hunt(found)}" for found in every)


def _of_hunt(found: Found) -> str:
    known = ", in the register" if found.registered else ""
    ways = ", ".join(found.ways)
    return f"{found.signature} ({ways}) in {', '.join(found.families)}{known}"


# ------------------------------------------------------------------------ markdown


def markdown(summary: Summary, limit: int = LIMIT) -> str:
    """Returns at most ``limit`` bytes, with a note if the end is omitted."""
    night = summary.night
    head = f"## moediag nightly: {sentence(summary)}\n\n"
    head += f"{night.lane}, {night.started[:16].replace('T', ' ')} UTC, moediag "
    head += f"{night.moediag_version}, {wording.seconds(night.seconds)}\n\n"
    note = "*Cut at the size limit; the night's JSON and JUnit files have everything.*\n"
    room = limit - len(note.encode())
    out = [head]
    used = len(head.encode())
    for block in _blocks(summary):
        used += len(block.encode())
        if used > room:
            return "".join(out) + note
        out.append(block)
    return "".join(out)


def _blocks(summary: Summary) -> Iterator[str]:
    """Yields small blocks, so that little is lost at the limit."""
    for change, head in _HEADS.items():
        found = summary.of(change)
        if not found:
            continue
        yield f"### {head} ({len(found)})\n\n"
        for one in found:
            yield f"- **{wording.inline(title(one.entry))}**: {wording.inline(what(one))}\n"
            if change in (Change.NEW, Change.STILL, Change.FLAKY):
                yield f"  `{one.entry.command}`\n"
            if change == Change.NEW:
                yield from _new(one, summary)
        yield "\n"
    yield from _rest(summary)


def _new(one: Compared, summary: Summary) -> Iterator[str]:
    if one.entry.why:
        yield f"  {wording.inline(one.entry.why)}\n"
    blame = summary.blames.get(one.entry.key)
    if blame is not None:
        yield f"  {blame.said}\n"


def _rest(summary: Summary) -> Iterator[str]:
    hunt = summary.night.hunt
    if hunt is not None:
        yield f"### Hunt\n\n{wording.inline(hunt_sentence(hunt))}\n\n"
        yield from (f"- {wording.inline(text)}\n" for text in _hunt_lines(hunt))
        yield "\n"
    if summary.left_out:
        yield "### Left out\n\n"
        for job in summary.left_out:
            name = wording.inline(f"{job.scenario} · {job.track}")
            yield f"- {name}: {wording.inline(job.problem)}\n"
        yield "\nWhat did not fit comes first next time.\n\n"
    notes = [*summary.night.notes, *(f"history, left out: {text}" for text in summary.unreadable)]
    if notes:
        yield "### Notes\n\n" + "".join(f"- {wording.inline(text)}\n" for text in notes) + "\n"
    yield from _table(summary.night)


def _table(night: Night) -> Iterator[str]:
    tracks = list(dict.fromkeys(e.track for e in night.entries))
    if not tracks:
        return
    yield "### Everything\n\n"
    yield f"| scenario | variant | {' | '.join(map(wording.inline, tracks))} |\n"
    yield "|---" * (2 + len(tracks)) + "|\n"
    cells: dict[tuple[str, str], dict[str, Entry]] = {}
    for entry in night.entries:
        cells.setdefault((entry.scenario, entry.variant), {})[entry.track] = entry
    for (scenario, variant), by_track in sorted(cells.items()):
        texts = [
            f"{_MARKS[State(e.state)]} {wording.inline(e.verdict)}" if e else ""
            for e in map(by_track.get, tracks)
        ]
        yield f"| {' | '.join((wording.inline(scenario), wording.inline(variant), *texts))} |\n"
    yield "\n"


# ------------------------------------------------------------------------ other views


def lines(summary: Summary, folder: str, width: int) -> Iterator[Line]:
    """Yields the same for a terminal, without the table."""
    for change in _HEADS:
        style = _STYLES.get(change, "plain")
        for one in summary.of(change):
            yield from labelled(
                str(change).upper(), f"{title(one.entry)}: {what(one)}", width, style
            )
            blame = summary.blames.get(one.entry.key)
            if blame is not None:
                yield from indented(blame.said, width, 10)
    hunt = summary.night.hunt
    if hunt is not None:
        yield from labelled("HUNT", hunt_sentence(hunt), width)
        for text in _hunt_lines(hunt):
            yield from indented(text, width, 10)
    for job in summary.left_out:
        text = f"{job.scenario} · {job.track}: {job.problem}"
        yield from labelled("LEFT OUT", text, width, "doubt")
    for note in (*summary.night.notes, *summary.unreadable):
        yield from labelled("NOTE", note, width)
    yield from labelled("RESULT", sentence(summary), width)
    yield from labelled("EVIDENCE", folder, width)


def workflow_commands(summary: Summary) -> list[str]:
    """Returns GitHub's workflow commands, one per new failure, at most ten."""
    new = summary.of(Change.NEW)
    most = MOST_ANNOTATIONS if len(new) <= MOST_ANNOTATIONS else MOST_ANNOTATIONS - 1
    found = [_annotation(title(one.entry), _message(one, summary)) for one in new[:most]]
    if len(new) > most:
        rest = wording.plural(len(new) - most, "more new failure")
        found.append(_annotation("moediag nightly", f"{rest}: see the step summary"))
    return found


def _message(one: Compared, summary: Summary) -> str:
    blame = summary.blames.get(one.entry.key)
    return "\n".join(filter(None, (what(one), one.entry.why, blame.said if blame else "")))


def _annotation(head: str, message: str) -> str:
    return f"::error title={_escaped(head, ',:')}::{_escaped(message)}"


def _escaped(text: str, also: Sequence[str] = "") -> str:
    """Escapes ``text`` as the runner decodes it."""
    for letter in ("%", "\r", "\n", *also):
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
