"""Detectors of what logs report where nothing else shows it: mismatches, absent ranks, open calls,
and ends of ranks."""

from __future__ import annotations

from moediag.diagnosis.end_states.failures import is_communication, said
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Judgement, apart, detector, undecided
from moediag.diagnosis.words import foreign_jobs, log_sentences
from moediag.diagnosis.words.calls import sentence
from moediag.evidence import nccl_ras, told_ends
from moediag.evidence.log_formats import meaning
from moediag.evidence.model import RankError, Report
from moediag.evidence.rank_stacks import in_collective, that_counts
from moediag.result import Confidence, Verdict
from moediag.result.wording import capital, does, plural, ranks

_MANY = 3  # ranks that agree against one; causes that are told
# Exceptions by which a launcher reports the end of another process.
_LAUNCHERS = frozenset({
    "ChildFailedError", "ProcessExitedException", "ProcessRaisedException", "CalledProcessError",
    "SignalException", "ActorDiedError", "RayActorError", "EngineDeadError", "RayTaskError",
})  # fmt: skip
_ASK_AGAIN = (
    "Run `ncclras` again after a minute and diagnose both outputs: if the counts have not moved, "
    "the job is stuck."
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
        told = dict.fromkeys(
            "; ".join(f"{ranks([rank])} is in {call}" for rank, call in one.sides) or one.text
            for one in reports
        )
        text += f" ({said(failed)})" if failed else f" ({'; '.join([*told][:2])})" if told else ""
        text += ". No recorded schedule shows which."
        if facts.positions is not None:
            text += f" {log_sentences.of_positions(facts.positions, evidence)}"
        step = foreign_jobs.next_step(evidence) if evidence.foreign else ""
        return Judgement(Confidence.LOW, text, next_step=step)
    order = sorted(sides.items(), key=lambda side: (-len(side[1]), sorted(side[1])))
    pieces = [does(who, f"is in {call}") for call, who in order]
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
    """A library reports ranks that did not reach a barrier, a collective or the start of a
    group."""
    evidence = facts.evidence
    found = _absences(facts)
    if not found:
        return None
    text = " ".join(_absences_told(found))
    named = {rank for one in found if meaning(one).fault == "named" for rank in one.about}
    if not named:
        named = _lagging(evidence.reports)
    sure = bool(named) and not any(one.group and not one.of_all for one in evidence.reports)
    if named and not sure:
        text += " These are numbers within a group, and the log also shows other groups, so it is "
        text += "not known which ranks of the job they are."
    elif not named:
        suspected = _suspected(found)
        text += f" {suspected}" if suspected else " It is not known which rank the job waits for."
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
    unnamed = tuple(one for one in reports if meaning(one).fault in ("unnamed", "suspected"))
    return named or (() if unnamed and facts.positions else unnamed)


def _absences_told(found: tuple[Report, ...]) -> list[str]:
    """A sentence for each kind of message, with all that wrote it."""
    writers: dict[tuple[str, str], list[Report]] = {}
    for one in found:
        says, about = meaning(one), ranks(one.about) if one.about else "rank 0"
        text = says.says.format(
            writer="{writer}", text=one.text, why=one.detail, about=about, seconds=one.seconds,
            seq=one.seq, place=one.place,
        )  # fmt: skip
        writers.setdefault((text, says.of_one if len(one.about) == 1 else ""), []).append(one)
    return [
        f"{sentence(text.replace('{writer}', _who(those)))} {of_one}".rstrip()
        for (text, of_one), those in writers.items()
    ]


def _who(reports: list[Report]) -> str:
    known = {one.rank for one in reports if one.rank is not None}
    if known:
        return ranks(known)
    places = {one.place for one in reports if one.place is not None}
    if places:
        return f"{ranks(places)} of a group"
    processes = sorted({one.process for one in reports if one.process})
    return f"process {', '.join(processes)}" if processes else "a process of unknown rank"


def _suspected(found: tuple[Report, ...]) -> str:
    """Who is suspected because others waited for it. Its numbers are those of a group, so they are
    the job's only if the group numbers the writers as the job does."""
    blamed: dict[int, int] = {}
    for one in found:
        if meaning(one).fault == "suspected" and one.rank is not None and one.rank == one.place:
            for rank in one.about:
                blamed[rank] = blamed.get(rank, 0) + 1
    if not blamed:
        return ""
    pieces = (f"{plural(n, 'rank')} for rank {rank}" for rank, n in sorted(blamed.items()))
    return (
        f"Others waited for these: {', '.join(pieces)}. That does not show that they are at fault: "
        "they may have been waiting, too."
    )


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


@detector(Verdict.CRASH)
def reported_cause(facts: Facts) -> Judgement | None:
    """A log reports an exception, a kill or a broken device of an unknown rank that explains why
    other ranks waited or lost a connection."""
    causes = _causes(facts)
    if not causes or not (facts.failed or facts.waiting or facts.positions):
        return None
    evidence, found = facts.evidence, facts.positions
    text = f"{_causes_told(causes)} That is the likely cause"
    text += "." if all(one.rank is not None for one in causes) else "; its rank is not known."
    named = found.culprits if found is not None else ()
    if found is not None:
        text += f" {log_sentences.of_positions(found, evidence)}"
    elif facts.failed:
        lost = ranks(failure.rank for failure in facts.failed)
        text += f" {lost.capitalize()} lost the connection to a peer ({said(facts.failed)})."
    else:
        text += f" {ranks(facts.waiting).capitalize()} waited for other ranks."
    return Judgement(
        Confidence.MEDIUM if named else Confidence.LOW,
        text,
        culprits=named,
        victims=found.victims if found is not None and named else (),
        pattern="reported-cause",
        next_step=_find_the_process(causes[0]),
    )


def _causes(facts: Facts) -> list[Report]:
    """Messages about unknown ranks that explain a wait, exceptions first."""
    reports = facts.evidence.reports
    errors = [one for one in reports if one.kind == "error" and not _of_others(one)]
    ends = [
        one
        for one in reports
        if one.kind in ("killed", "machine", "node", "device")
        or (one.kind in ("ended", "child") and told_ends.is_cause(one.text))
    ]
    return [*errors, *ends]


def _of_others(one: Report) -> bool:
    """Whether an exception says only that another process ended or did not answer."""
    name = one.text.partition(": ")[0].partition(" ")[0]
    return name in _LAUNCHERS or is_communication(RankError(name, one.text))


def _causes_told(causes: list[Report]) -> str:
    errors = [one.text for one in causes if one.kind == "error"]
    ends = [one for one in causes if one.kind != "error"]
    texts = [f"A process raised {text}" for text in errors[:_MANY]]
    for one in ends[:_MANY]:
        whose = "" if one.rank is None else f" of rank {one.rank}"
        texts.append(f"The log{whose} says: {one.text}")
    return " ".join(sentence(text.rstrip(".")) for text in dict.fromkeys(texts))


def _find_the_process(cause: Report) -> str:
    if cause.kind == "error":
        return f"Fix the {cause.text.partition(': ')[0]}; look for the rank in its whole output."
    if cause.kind == "node":
        return "Look at that node: its kernel's log, its network, and the scheduler's log."
    if cause.kind == "device":
        return "End what an earlier job left on that device, then start again."
    if cause.kind == "machine":
        return "Look at that device: the kernel's log of its node, and which rank used it."
    return "Find out which process was killed, and why: the kernel's log and the scheduler's."


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
        text += f" {capital(does(elsewhere, 'was in another call of the communication library'))}"
        text += ", so the ranks wait for each other."
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
    text = f"{' '.join(sentence(one.text) for one in found)} Two readings of NCCL's RAS agree."
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
    causes = _causes(facts)
    errors = [one for one in found if one.kind in ("error", "lost")]
    last = causes[0] if causes else errors[-1] if errors else found[0]
    text = "It is not known which rank of the job failed. "
    raised = last.kind in ("error", "lost")
    text += sentence(f"{'a process raised' if raised else 'the log says:'} {last.text}".rstrip("."))
    if last.kind in ("error", "lost", "failed") and is_communication(
        RankError("RuntimeError", last.text)
    ):
        text += " That is the consequence of another rank's end or wait, not the cause."
    return Judgement(
        Confidence.LOW,
        text,
        pattern="reported-end",
        next_step=_find_the_process(last) if causes else foreign_jobs.next_step(facts.evidence),
    )
