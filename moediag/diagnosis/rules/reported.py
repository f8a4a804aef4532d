"""Detectors of what logs report where nothing else shows it: mismatches, absent ranks, open calls,
and ends of ranks."""

from __future__ import annotations

from moediag.diagnosis.end_states.failures import is_communication, said
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Judgement, apart, detector, undecided
from moediag.diagnosis.words import foreign_jobs, log_sentences
from moediag.diagnosis.words.calls import sentence
from moediag.evidence import nccl_ras
from moediag.evidence.log_formats import meaning
from moediag.evidence.model import RankError, Report
from moediag.evidence.rank_stacks import in_collective, that_counts
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks

_MANY = 3  # ranks that agree against one
_ASK_AGAIN = (
    "Run `ncclras` again after a minute and diagnose both outputs: if the counts have not moved, "
    "the job stands."
)


@detector(Verdict.COLLECTIVE_MISMATCH)
def reported_mismatch(facts: Facts) -> Judgement | None:
    """The communication library reports a mismatch of collectives; no schedule shows which."""
    evidence = facts.evidence
    reports = [one for one in evidence.reports if meaning(one).fault == "sides"]
    failed = tuple(failure for failure in facts.failed if failure.mismatch)
    if not reports and not failed:
        return None
    sides: dict[str, set[int]] = {}
    for one in reports:
        for rank, call in one.sides:
            sides.setdefault(call, set()).add(rank)
    if len(sides) < 2:
        whose = f"{ranks(f.rank for f in failed).capitalize()}: the" if failed else "The"
        text = f"{whose} communication library says that collectives did not match"
        analysed = [one for one in reports if meaning(one).whole and not one.sides]
        if analysed:
            pieces = [
                part for one in analysed for part in (sentence(one.text), meaning(one).of_one)
            ]
            return Judgement(Confidence.LOW, " ".join(dict.fromkeys(filter(None, pieces))))
        told = dict.fromkeys(one.text for one in reports if not one.sides)
        text += f" ({said(failed)})" if failed else f" ({'; '.join([*told][:2])})" if told else ""
        return Judgement(Confidence.LOW, f"{text}. No recorded schedule shows which.")
    order = sorted(sides.items(), key=lambda side: (-len(side[1]), sorted(side[1])))
    pieces = [f"{ranks(who)} {'is' if len(who) == 1 else 'are'} in {call}" for call, who in order]
    text = sentence(f"different calls meet: {'; '.join(pieces)}")
    (_, most), (_, few) = order[0], order[-1]
    alone = len(order) == 2 and len(most) >= _MANY and len(few) == 1 and not most & few
    if alone:
        text += f" {ranks(few).capitalize()} alone differs."
    else:
        text += " The message does not show which of them is wrong."
    return Judgement(
        Confidence.MEDIUM if alone else Confidence.LOW,
        text,
        culprits=tuple(sorted(few)) if alone else (),
        victims=tuple(sorted(most)) if alone else (),
        next_step=foreign_jobs.next_step(evidence),
    )


@detector(Verdict.HANG)
def reported_absence(facts: Facts) -> Judgement | None:
    """A library reports ranks that did not come to a barrier, a collective or the start of a
    group."""
    evidence = facts.evidence
    found = _absences(facts)
    if not found:
        return None
    text = " ".join(dict.fromkeys(map(_absent, found)))
    named = {rank for one in found if meaning(one).fault == "named" for rank in one.about}
    if not named:
        named = _lagging(evidence.reports)
    sure = bool(named) and not any(one.group and not one.of_all for one in evidence.reports)
    if named and not sure:
        text += " These are numbers within a group, and the log also shows other groups, so it is "
        text += "not known which ranks of the job they are."
    elif not named:
        text += " It is not known which rank the job waits for."
    writers = {one.rank for one in found if one.rank is not None}
    culprits = tuple(sorted(named)) if sure else ()
    return Judgement(
        Confidence.MEDIUM if sure else Confidence.LOW,
        text,
        culprits=culprits,
        victims=tuple(sorted(writers - named)) if sure else (),
        pattern="reported-absence",
        next_step=foreign_jobs.next_step(evidence, culprits),
    )


def _absences(facts: Facts) -> tuple[Report, ...]:
    """The reports that name ranks; without any, those that say only that some rank is missing."""
    reports = facts.evidence.reports
    named = tuple(one for one in reports if meaning(one).fault in ("named", "lagging"))
    unnamed = tuple(one for one in reports if meaning(one).fault == "unnamed")
    return named or (() if unnamed and facts.positions else unnamed)


def _absent(one: Report) -> str:
    says, about = meaning(one), ranks(one.about)
    text = sentence(
        says.says.format(
            about=about,
            seconds=one.seconds,
            seq=one.seq,
            place=one.place,
            why=one.detail,
            text=one.text,
            writer="a rank" if one.rank is None else f"rank {one.rank}",
        )
    )
    return f"{text} {says.of_one}" if says.of_one and len(one.about) == 1 else text


def _lagging(reports: tuple[Report, ...]) -> set[int]:
    """Ranks before the furthest call of a desync report, which lists the earliest call: where some
    finished it and some did not, or where no rank is further, they may wait for each other."""
    opened = [one for one in reports if one.kind == "open"]
    absent = [one for one in reports if one.kind == "missing"]
    lag = opened or absent
    if not lag or (opened and absent) or len({one.seq for one in lag}) > 1:
        return set()
    if opened:
        latest = max((one.seq or 0 for one in reports if one.kind == "snapshot"), default=0)
        if latest <= (opened[0].seq or 0):
            return set()
    return {rank for one in lag for rank in one.about}


@detector(Verdict.HANG)
def logged_positions(facts: Facts) -> Judgement | None:
    """Watchdogs of NCCL report open calls, and nothing else is recorded: who is behind."""
    evidence, found = facts.evidence, facts.positions
    if found is None or (facts.failed and not found.culprits):
        return None  # the message of a rank that lost its connection says more
    text = log_sentences.of_positions(found, evidence)
    text = " ".join(part for part in (text, log_sentences.signals(evidence)) if part)
    elsewhere = _waits_elsewhere(facts) & set(found.culprits)
    named = tuple(rank for rank in found.culprits if rank not in elsewhere)
    if elsewhere:
        one = len(elsewhere) == 1
        text += (
            f" {ranks(elsewhere).capitalize()} {'was' if one else 'were'} in another call of the "
        )
        text += "communication library, so the ranks wait for each other."
    if not named:
        text += " The log does not show which rank is the cause."
    return Judgement(
        Confidence.MEDIUM if named else Confidence.LOW,
        text,
        culprits=named,
        victims=tuple(sorted({*found.victims, *elsewhere})) if named else (),
        pattern=f"watchdog {'behind' if named else 'timeout'}",
        next_step=foreign_jobs.next_step(evidence, named),
    )


def _waits_elsewhere(facts: Facts) -> set[int]:
    """Ranks that themselves waited in communication, by their error or their stack. One that is
    behind in a group of NCCL may wait in one of gloo, which has no watchdog."""
    waits = {failure.rank for failure in facts.failed if failure.consequence}
    for rank, seen in facts.evidence.ranks.items():
        stack = that_counts(seen.stacks)
        if stack is not None and in_collective(stack):
            waits.add(rank)
    return waits


@detector(Verdict.HANG)
def stuck_watchdog(facts: Facts) -> Judgement | None:
    """NCCL's watchdog thread itself stopped in some ranks; nothing shows in which call they
    wait."""
    found = [one for one in facts.evidence.reports if one.kind == "stuck"]
    if not found:
        return None
    known = {one.rank for one in found if one.rank is not None}
    whose = ranks(known) if known else "a rank that the log does not name"
    return Judgement(
        Confidence.LOW,
        f"The watchdog thread of NCCL stopped in {whose}: a call of CUDA or NCCL does not return "
        "there, or another thread holds a lock that it needs. This does not show which rank the "
        "job waits for, so no rank is named.",
        pattern="stuck-watchdog",
        next_step=foreign_jobs.next_step(facts.evidence),
    )


@detector(Verdict.HANG)
def unchanged_counts(facts: Facts) -> Judgement | None:
    """Two readings of NCCL's RAS show the same ranks behind others. Who is ahead is never named."""
    found = nccl_ras.unchanged(facts.evidence.reports)
    if not found:
        return None
    # A rank may be behind in one communicator because it waits in another.
    behind = found[0].about if len({one.about for one in found}) == 1 else ()
    text = (
        f"{' '.join(sentence(one.text) for one in found)} Two readings of NCCL's RAS show it alike."
    )
    if not behind:
        text += " It is not known which rank the job waits for."
    return Judgement(
        Confidence.MEDIUM if behind else Confidence.LOW,
        text,
        culprits=behind,
        victims=apart(tuple(range(max(one.size for one in found))), behind),
        pattern="ras-behind",
        next_step=foreign_jobs.next_step(facts.evidence, behind),
    )


@detector(Verdict.INCONCLUSIVE)
def tools_undecided(facts: Facts) -> Judgement | None:
    """A tool that looked at the whole job found nothing certain. A reading of NCCL's RAS shows one
    moment: ranks of a job that runs differ as well."""
    reports = facts.evidence.reports
    found = [one for one in reports if meaning(one).whole and meaning(one).fault == "nobody"]
    if not found:
        return None
    text = " ".join(map(sentence, dict.fromkeys(one.text for one in found)))
    kinds = {one.kind for one in found}
    if "ras-apart" in kinds:
        text += " That is one moment: ranks of a job that runs differ as well."
    again = kinds & {"ras-apart", "ras-silent", "ras-equal"}
    return undecided(text, _ASK_AGAIN if again else foreign_jobs.next_step(facts.evidence))


@detector(Verdict.CRASH)
def reported_end(facts: Facts) -> Judgement | None:
    """A log reports an exception, a kill or a broken device, but not of which rank."""
    found = [one for one in facts.evidence.reports if meaning(one).fault in ("writer", "unknown")]
    if not found:
        return None
    errors = [one for one in found if one.kind == "error"]
    last = errors[-1] if errors else found[0]
    text = "It is not known which rank of the job failed. "
    text += sentence(f"{'a process raised' if errors else 'the log says:'} {last.text}".rstrip("."))
    if last.kind in ("error", "failed") and is_communication(RankError("RuntimeError", last.text)):
        text += " That is the consequence of another rank's end or wait, not the cause."
    return Judgement(
        Confidence.LOW,
        text,
        pattern="reported-end",
        next_step=foreign_jobs.next_step(facts.evidence),
    )
