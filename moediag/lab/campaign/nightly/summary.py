"""The page of a night, its JSON, and annotations of its new failures. Pure.

The order: new, fixed, still failing (and since when), flaky, could not be judged, did not fit, and
the table of everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from moediag.lab.campaign.nightly.blame import Blame
from moediag.lab.campaign.nightly.changes import Change, Compared
from moediag.lab.campaign.nightly.night import Entry, Found, Hunted, Job, Night, State
from moediag.records import dataclass
from moediag.result import Table, Verdict, wording
from moediag.result.answer_blocks import Answer, AnswerState, Case, Row, Section

MOST_ANNOTATIONS = 10  # of one kind per step; GitHub shows no more
_HEADS = {
    Change.NEW: "New failures",
    Change.FIXED: "Fixed",
    Change.STILL: "Still failing",
    Change.FLAKY: "Flaky",
    Change.UNKNOWN: "Could not be judged",
}
_STYLES = {
    Change.NEW: "bad", Change.FIXED: "good", Change.FLAKY: "doubt", Change.UNKNOWN: "doubt",
}  # fmt: skip
_CASES = {
    State.GOOD: AnswerState.AS_EXPECTED,
    State.BAD: AnswerState.FAILURE,
    State.UNKNOWN: AnswerState.INCONCLUSIVE,
}
_MARKS = {State.GOOD: "✅", State.BAD: "❌", State.UNKNOWN: "❔"}


@dataclass(frozen=True, slots=True)
class Summary:
    """What the page shows. ``blames``: key of a new failure -> result of its bisect;
    ``unreadable``: ignored files of the history; ``news``: findings of the hunt that no earlier
    night had."""

    night: Night
    compared: tuple[Compared, ...]
    blames: Mapping[tuple[str, str, str], Blame] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    news: tuple[Found, ...] = ()

    def of(self, change: Change) -> list[Compared]:
        return [c for c in self.compared if c.change == change]

    @property
    def left_out(self) -> list[Job]:
        return [job for job in self.night.jobs if not job.finished]

    @property
    def state(self) -> AnswerState:
        """Returns a failure if there is a new one; a failure that continues is as expected."""
        if self.of(Change.NEW) or self.news:
            return AnswerState.FAILURE
        if not any(job.finished for job in self.night.jobs):
            tried = any(job.seconds for job in self.night.jobs)
            return AnswerState.INCONCLUSIVE if tried else AnswerState.CANNOT_RUN
        judged = any(entry.state != State.UNKNOWN for entry in self.night.entries)
        return AnswerState.AS_EXPECTED if judged else AnswerState.INCONCLUSIVE


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
    if summary.news:
        text += f"; the hunt: {wording.plural(len(summary.news), 'new finding')}"
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


# ------------------------------------------------------------------------ the page


def answer(summary: Summary) -> Answer:
    night = summary.night
    when = f"{night.started[:16].replace('T', ' ')} UTC"
    spent = wording.seconds(night.seconds)
    return Answer(
        "nightly",
        f"moediag nightly: {night.lane}, {when}, moediag {night.moediag_version}, {spent}",
        summary.state,
        sentence(summary),
        tuple(_sections(summary)),
        tuple(_rows_of_answer(summary)),
        cases=tuple(map(_case, summary.compared)),
        facts=to_json(summary),
    )


def _rows_of_answer(summary: Summary) -> Iterator[Row]:
    """Yields the first new failure, or why nothing was judged."""
    new, news = summary.of(Change.NEW), summary.news
    if new:
        one, more = new[0], len(new) - 1
        others = f" (and {wording.plural(more, 'more new failure')})" if more else ""
        yield Row("WHAT", f"{title(one.entry)}: {one.entry.verdict}{others}")
        blame = summary.blames.get(one.entry.key)
        where = blame.said if blame else f"{versions(one.entry)}; {_good_before(one)}"
        yield Row("WHERE", where.rstrip("."))
        if one.entry.why:
            yield Row("WHY", one.entry.why)
        yield Row("NEXT", one.entry.command)
    elif news:
        found, more = news[0], len(news) - 1
        others = f" (and {wording.plural(more, 'more finding')})" if more else ""
        yield Row("WHAT", f"the hunt: {_of_hunt(found, summary.night.hunt)}{others}")
        if found.text:
            yield Row("WHY", found.text)
        if summary.night.hunt:
            yield Row("NEXT", _pursue(summary.night.hunt, found))
    elif summary.left_out and summary.state != AnswerState.AS_EXPECTED:
        yield Row("WHY", summary.left_out[0].problem, "doubt")


def to_json(summary: Summary) -> dict[str, Any]:
    compared = [
        {
            "change": str(one.change),
            **dataclasses.asdict(one.entry),
            "since": one.since.night if one.since else None,
            "last_good": one.last_good.night if one.last_good else None,
            "blame": dataclasses.asdict(blame)
            if (blame := summary.blames.get(one.entry.key))
            else None,
        }
        for one in summary.compared
    ]
    return {"night": summary.night.to_json(), "compared": compared}


def _sections(summary: Summary) -> Iterator[Section]:
    for change, head in _HEADS.items():
        found = summary.of(change)
        rows = tuple(row for one in found for row in _compared(one, summary))
        yield Section(rows, f"{head} ({len(found)})")
    hunt = summary.night.hunt
    if hunt is not None:
        more = (("appeared", hunt.appeared), ("went away", hunt.gone))
        texts = (
            text for word, every in more for found in every for text in _told(word, found, hunt)
        )
        page = (f"every finding in full: {hunt.folder}/hunt.md",) if hunt.folder else ()
        rows = (Row("HUNT", hunt_sentence(hunt)), *(Row("", text) for text in (*texts, *page)))
        yield Section(rows, "Hunt")
    left = summary.left_out
    rows = tuple(Row("LEFT OUT", f"{j.scenario} · {j.track}: {j.problem}", "doubt") for j in left)
    yield Section((*rows, *(["What did not fit comes first next time."] * bool(left))), "Left out")
    unread = (f"history, left out: {text}" for text in summary.unreadable)
    yield Section(tuple(Row("NOTE", text) for text in (*summary.night.notes, *unread)), "Notes")
    yield Section(tuple(_table(summary.night)), "Everything", brief=())


def _compared(one: Compared, summary: Summary) -> Iterator[Row]:
    entry, style = one.entry, _STYLES.get(one.change, "plain")
    yield Row(str(one.change).upper(), f"{title(entry)}: {what(one)}", style)
    if one.change == Change.NEW and entry.why:
        yield Row("", entry.why)
    if blame := summary.blames.get(entry.key):
        yield Row("", blame.said)
    if one.change in (Change.NEW, Change.STILL, Change.FLAKY):
        yield Row("", entry.command)


def _told(word: str, found: Found, hunt: Hunted) -> Iterator[str]:
    yield f"{word}: {_of_hunt(found, hunt)}"
    if found.text:
        yield found.text


def _pursue(hunt: Hunted, found: Found) -> str:
    relation = found.signature.partition(":")[0]
    asked = f"--family {found.families[0]} --relation {relation}"
    return f"moediag hunt --release {hunt.release} {asked} --stack accelerate=newest --pursue"


def _of_hunt(found: Found, hunt: Hunted | None) -> str:
    """Returns a finding in one line. One in a family that the earlier release lacks is no
    regression."""
    known = ", in the register" if found.registered else ""
    ways = ", ".join(found.ways)
    fresh = hunt is not None and {*found.families} <= {*hunt.added}
    lacks = f", which {hunt.against} lacks" if fresh and hunt is not None else ""
    return f"{found.signature} ({ways}) in {', '.join(found.families)}{lacks}{known}"


def _table(night: Night) -> Iterator[Table]:
    tracks = list(dict.fromkeys(e.track for e in night.entries))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for e in night.entries:
        cells.setdefault((e.scenario, e.variant), {})[e.track] = f"{_MARKS[e.state]} {e.verdict}"
    rows = ((*key, *(by.get(t, "") for t in tracks)) for key, by in sorted(cells.items()))
    if tracks:
        yield Table("", ("scenario", "variant", *tracks), tuple(rows))


def _case(one: Compared) -> Case:
    """A new failure is a failure. One that does not fail the night, because it continues or is
    flaky, is skipped, as is what does not apply: CI shows it, but does not turn red again."""
    entry = one.entry
    skipped = entry.verdict == Verdict.NOT_APPLICABLE or one.change in (Change.STILL, Change.FLAKY)
    return Case(
        entry.variant,
        f"{entry.scenario}.{entry.track}",
        None if skipped else _CASES[entry.state],
        f"{one.change}: {what(one)}",
        f"{entry.why}\n\n{entry.command}\n{entry.evidence}",
        entry.seconds,
        entry.track,
    )


# ------------------------------------------------------------------------ annotations


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
