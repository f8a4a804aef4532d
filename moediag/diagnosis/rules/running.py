"""Detectors of jobs that run and were started without moediag: what looks at their processes
saw."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from moediag.diagnosis.blame.standings import Standing, dividing, handles_a_call
from moediag.diagnosis.end_states.whereabouts import program_line
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Judgement, apart, detector, undecided
from moediag.diagnosis.words.calls import sentence
from moediag.diagnosis.words.places import words
from moediag.evidence import looks
from moediag.evidence.looks import Looks
from moediag.evidence.model import Condition, Evidence
from moediag.evidence.rank_stacks import in_collective, stand, that_counts
from moediag.result import Confidence, Verdict
from moediag.result.wording import capital, each_does, ranks

# Calls that one other side meets, or that do not tell: a wait may be for either kind.
_ONE_SIDED = re.compile(r"send|recv|p2p|rpc|store|rendezvous|(?:^|[._])wait", re.IGNORECASE)
_BY_A_RANK = re.compile(r"which rank \d+ holds$")
_DEVICES = (
    "Check whether the job's output continues. If not, start it again under `moediag watch`, which "
    "asks the devices."
)
_AGAIN = (
    "A rank that computes may also be in an endless loop: attach again if it stays at that line "
    "for longer than it should take."
)


@detector(Verdict.CLEAN)
def progressing(facts: Facts) -> Judgement | None:
    """Ranks of a running job moved or worked between the looks: slow is not hung."""
    evidence, seen = facts.evidence, facts.evidence.looks
    if seen is None or not seen.progresses or seen.doing(looks.STOPPED) or seen.ended:
        return None
    if _overdue(seen):
        return None
    text = f"No hang: observed for {seen.seconds:.0f} s, {'; '.join(_doing(evidence, seen))}."
    if _computes(seen):
        return Judgement(Confidence.LOW, f"{text} {_AGAIN}")
    return Judgement(Confidence.MEDIUM, text)


def _computes(seen: Looks) -> bool:
    """Whether ranks wait for others that only compute, at one place."""
    works = seen.doing(looks.WORKS)
    computes = bool(works) and all(seen.ranks[rank].words == "computes" for rank in works)
    return computes and bool(_at_rest(seen)) and not seen.doing(looks.MOVES)


def _at_rest(seen: Looks) -> tuple[int, ...]:
    """Ranks that wait; one that sleeps beside a rank that works may do so in native code."""
    return seen.doing(looks.WAITS, looks.ON_DEVICE, looks.IDLE)


def _overdue(seen: Looks) -> bool:
    """Whether ranks wait for one that computes or loops for longer than most computations take."""
    waited = [seen.ranks[rank].still for rank in _at_rest(seen)]
    alone = _computes(seen) or (seen.doing(looks.MOVES) and not seen.doing(looks.WORKS))
    return bool(alone and waited) and min(waited) >= looks.BUSY * seen.patience


@detector(Verdict.HANG)
def held_up(facts: Facts) -> Judgement | None:
    """A rank outside communication cannot continue, for a reason that its process shows: it is
    stopped, or waits for a file lock, a debugger, the kernel or a stopped loader process."""
    seen, stall = facts.evidence.looks, facts.evidence.stall
    if seen is None or stall is None or not seen.held or _suspended(seen):
        return None
    text = " ".join(
        sentence(f"Rank {rank}{_where(facts.evidence, rank)} {seen.ranks[rank].held}")
        for rank in seen.held
    )
    named = tuple(rank for rank in seen.held if not _BY_A_RANK.search(seen.ranks[rank].held))
    if facts.waiting:
        text += f" {sentence(_waiters(facts.evidence, facts.waiting))}"
    return Judgement(
        Confidence.MEDIUM,
        text,
        culprits=named,
        victims=apart(facts.waiting, named),
        pattern="held",
        next_step=_let_go(seen) if named else "Release the lock before a call that others join.",
    )


def _suspended(seen: Looks) -> bool:
    """Whether all ranks are stopped by a signal."""
    return len(seen.doing(looks.STOPPED)) == len(seen.ranks)


def _let_go(seen: Looks) -> str:
    stopped = seen.doing(looks.STOPPED)
    if not stopped:
        return ""
    pids = " ".join(str(seen.ranks[rank].pid) for rank in stopped)
    return f"Find out who stopped {ranks(stopped)}. To continue: kill -CONT {pids}"


@detector(Verdict.HANG)
def kept_apart(facts: Facts) -> Judgement | None:
    """A rank of a running job waits in a collective that a condition of the program keeps the other
    ranks from."""
    evidence = facts.evidence
    if evidence.looks is None or any(seen.collectives for seen in evidence.ranks.values()):
        return None
    told = dict(_singled_out(facts))
    if len(told) != 1:
        return None
    [(culprits, (one, condition))] = told.items()
    others = [rank for other in facts.standings if other is not one for rank in other.ranks]
    text = f"{capital(_waiters(evidence, one.ranks))}, {words(condition)}"
    if condition.side == "handler":
        text += f": only {ranks(one.ranks)} caught that exception."
    else:
        kept = sorted(condition.keeps_out & {*others})
        text += f", which keeps {ranks(kept)} from it."
    text += " " + " ".join(sentence(part) for part in _places(evidence, others))
    step = f"Make the call at {one.at} on all ranks of its group, or on none."
    return Judgement(
        Confidence.MEDIUM,
        text,
        culprits=culprits,
        victims=apart(facts.waiting, culprits),
        pattern="condition",
        next_step=step,
    )


def _singled_out(
    facts: Facts,
) -> Iterator[tuple[tuple[int, ...], tuple[Standing, Condition]]]:
    """Ranks that a condition singles out, with that condition and those who wait under it."""
    found = facts.standings
    if dividing(found) is not None:
        return
    every = sum(len(one.ranks) for one in found)
    for one in found:
        if not {*one.ranks} <= {*facts.waiting} or not _of_all(facts.evidence, one.ranks[0]):
            continue
        for condition in one.apart:
            single = condition.singles
            if condition.side == "handler":
                # All ranks may come there in time: those outside communication are late, or stuck.
                if not facts.elsewhere and not handles_a_call(one, facts.evidence):
                    yield one.ranks, (one, condition)
            elif not condition.keeps_out & {r for s in found if s is not one for r in s.ranks}:
                continue  # the ranks that it keeps out are not here: they may be anywhere
            elif single is not None and (single in one.ranks or 2 * len(one.ranks) > every):
                yield (single,), (one, condition)


def _of_all(evidence: Evidence, rank: int) -> bool:
    """Whether the rank waits in a call that all ranks of its group must make."""
    stack = that_counts(evidence.ranks[rank].stacks)
    if stack is None or not in_collective(stack):
        return False
    operation = stand(stack, evidence.ranks[rank].libraries).partition(",")[0]
    return _ONE_SIDED.search(operation) is None


@detector(Verdict.INCONCLUSIVE)
def ranks_elsewhere(facts: Facts) -> Judgement | None:
    """All ranks of a running job on this machine wait, and others on other machines may work."""
    seen = facts.evidence.looks
    if seen is None or not facts.waiting or not seen.elsewhere or facts.elsewhere:
        return None
    if any(one.collectives for one in facts.evidence.ranks.values()):
        return None
    text = f"{capital(_waiters(facts.evidence, facts.waiting))} for at least {_still(seen)} s. No "
    text += f"process of {ranks(seen.elsewhere)} was found here: on another machine, or ended."
    step = (
        "If the job has other machines, run `moediag attach --collect node-N.tgz` on each, then "
        f"`moediag diagnose node-*.tgz`. If not, {ranks(seen.elsewhere)} ended: see the output."
    )
    return undecided(text, step)


@detector(Verdict.INCONCLUSIVE)
def undecided_looks(facts: Facts) -> Judgement | None:
    """Looks at a running job do not show whether it hangs."""
    seen = facts.evidence.looks
    if seen is None or (facts.evidence.stall is not None and facts.waiting):
        return None
    if len(seen.doing(looks.GONE)) == len(seen.ranks):
        return undecided("The job ended while it was being examined.")
    if _suspended(seen):
        return undecided("The job is suspended: all its ranks are stopped by a signal (SIGSTOP).",
                         _let_go(seen))  # fmt: skip
    text = f"Observed for {seen.seconds:.0f} s: {'; '.join(_doing(facts.evidence, seen))}."
    if seen.ended:
        who = ranks(seen.ended)
        return undecided(
            f"{text} {capital(who)} ended before the others; whether it had finished or failed is "
            "not known.", f"See the output of {who}, or look again."
        )  # fmt: skip
    if _overdue(seen):
        text += (
            f" The others have waited for {_still(seen)} s: a long computation or an endless loop."
        )
        return undecided(text, "Check whether that line can take this long.")
    if seen.doing(looks.UNREAD):
        unread = ranks(seen.doing(looks.UNREAD))
        return undecided(f"{text} The Python frames of {unread} could not be read.")
    if facts.evidence.stall is not None:
        return undecided(f"{text} They stand still outside communication; it is not known why.")
    if seen.rests:  # all for their devices
        text += " From outside, a device that computes looks like one that waits for other ranks."
        return undecided(text, _DEVICES)
    again = f"Look again, for longer: moediag attach --patience {2 * seen.patience:.0f}"
    if seen.slow:
        text += f" {capital(ranks(seen.slow))} may be slow."
    return undecided(f"{text} It is not known whether the job would continue.", again)


# ------------------------------------------------------------------------ words


def _still(seen: Looks) -> str:
    return f"{min(seen.ranks[rank].still for rank in _at_rest(seen)):.0f}"


def _doing(evidence: Evidence, seen: Looks) -> list[str]:
    """What the ranks did, those that did the same together."""
    told = {}
    for rank, look in seen.ranks.items():
        at = _at(evidence, rank)
        if look.does == looks.WAITS:
            what = f"waits{_inside(evidence, rank)}"
        elif look.does == looks.ON_DEVICE:
            what = f"waits for the device{at}"
        elif look.does == looks.WORKS:
            what = f"{look.words}{at}"
        elif look.does == looks.IDLE:
            what = f"{look.held or 'sleeps'}{at}"
        elif look.does == looks.STOPPED:
            what = f"{look.held or 'is stopped'}{at}"
        elif look.does == looks.UNREAD:
            what = "sleeps" if look.still else "uses a CPU"
        elif look.does == looks.GONE:
            what = "ended"
        else:
            what = f"moved on, last seen{at}" if _overdue(seen) and at else "moved on"
        told[rank] = what
    return each_does(told)


def _at(evidence: Evidence, rank: int) -> str:
    line = program_line(evidence.ranks[rank]) if rank in evidence.ranks else ""
    return f" at {line}" if line else ""


def _where(evidence: Evidence, rank: int) -> str:
    at = _at(evidence, rank)
    return f",{at}," if at else ""


def _inside(evidence: Evidence, rank: int) -> str:
    seen = evidence.ranks.get(rank)
    stack = that_counts(seen.stacks) if seen is not None else None
    return f" in {stand(stack, seen.libraries)}" if stack is not None and seen is not None else ""


def _waiters(evidence: Evidence, who: Iterable[int]) -> str:
    """``ranks 0 and 2 wait in all_reduce, called by step (train.py:12)``; several places apart."""
    return "; ".join(_places(evidence, who))


def _places(evidence: Evidence, who: Iterable[int]) -> list[str]:
    told = {}
    for rank in who:
        seen = evidence.looks.ranks.get(rank) if evidence.looks is not None else None
        told[rank] = f"is{_at(evidence, rank)}"
        if seen is not None and seen.does == looks.WAITS:
            told[rank] = f"waits{_inside(evidence, rank)}"
        elif seen is not None and seen.does == looks.ON_DEVICE:
            told[rank] = f"waits for the device{_at(evidence, rank)}"
    return each_does(told)
