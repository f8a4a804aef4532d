"""Detectors of ranks that stopped making progress, by their calls and by their nodes."""

from __future__ import annotations

from collections.abc import Sequence

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.blame.nodes import explained, open_call, silent
from moediag.diagnosis.end_states.whereabouts import whereabouts
from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import (
    Judgement,
    apart,
    detector,
    how_sure,
    told_divergence,
    undecided,
    unseen,
    victims,
)
from moediag.diagnosis.numbers import agreement
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.diagnosis.schedules.stuck_calls import Frontier
from moediag.diagnosis.words import foreign_jobs, log_sentences
from moediag.diagnosis.words.calls import describe
from moediag.diagnosis.words.node_sentences import see_node, silence
from moediag.evidence.model import Collective
from moediag.evidence.rank_stacks import stand, that_counts
from moediag.result import Confidence, Verdict
from moediag.result.wording import capital, does, plural, ranks

_MOST = 3  # divergences that are described


@detector(Verdict.INCONCLUSIVE)
def idle_ranks(facts: Facts) -> Judgement | None:
    """Ranks stopped outside any collective: this is not a communication hang."""
    if facts.evidence.stall is None or facts.waiting:
        return None
    return undecided(
        f"{ranks(facts.elsewhere).capitalize()} stopped, but did not wait in a collective: this is "
        "not a hang of communication."
    )


@detector(Verdict.HANG)
def diverged_schedules(facts: Facts) -> Judgement | None:
    """Ranks wait in a collective after their schedules diverged."""
    evidence, stall, found = facts.evidence, facts.evidence.stall, facts.divergence
    if stall is None or facts.under_way or found is None:
        return None
    stuck = facts.stuck if evidence.foreign and stall.certain else None
    involved = {rank for one, _ in facts.diverging for rank in one.calls}
    lagging: tuple[int, ...] = ()
    if stuck is not None and stuck.basis == "device" and not involved & {*stuck.suspects}:
        lagging = stuck.suspects
    culprits = tuple(sorted({*facts.diverged, *lagging}))
    pairs = facts.diverging
    text = " Independently: ".join(_diverged(facts, one, blame) for one, blame in pairs[:_MOST])
    if len(pairs) > _MOST:
        text += f" And {plural(len(pairs) - _MOST, 'more independent divergence')}."
    if lagging and stuck is not None:
        text += f" Independently: {foreign_jobs.of_frontier(stuck, evidence)}"
    step = ""
    if evidence.foreign and (found.kind == "missing" or not culprits):
        step = foreign_jobs.next_step(evidence, culprits)
    if not stall.certain and found.kind == "missing":
        text += foreign_jobs.may_be_late(culprits or found.absent)
        step = f"{foreign_jobs.DUMP_AGAIN} {step}".rstrip()
    return Judgement(
        how_sure(facts),
        text,
        culprits=culprits,
        victims=tuple(rank for rank in victims(facts) if rank not in culprits),
        divergence=True,
        next_step=step,
    )


def _diverged(facts: Facts, found: Divergence, blame: Blame) -> str:
    text = told_divergence(facts, found, blame, died=False)
    if found.kind == "missing" and not found.surplus:
        text = f"{text} {whereabouts(facts.evidence, blame.culprits)}".rstrip()
    return text


@detector(Verdict.HANG)
def stuck_operation(facts: Facts) -> Judgement | None:
    """Schedules agree, and an issued call does not complete on some devices."""
    found, evidence = None if facts.under_way else facts.frontier, facts.evidence
    if found is None:
        return None
    strong = found.basis in ("device", "none") and found.call is not None
    strong = strong or (found.basis == "unseen" and evidence.world_size == len(evidence.ranks) + 1)
    strong = strong and unseen(evidence) != Confidence.LOW
    return Judgement(
        Confidence.MEDIUM if strong else Confidence.LOW,
        foreign_jobs.of_frontier(found, evidence),
        culprits=found.suspects,
        victims=apart(facts.waiting, found.suspects),
        pattern="stuck",
        next_step=_check_device(facts, found),
    )


def _check_device(facts: Facts, found: Frontier) -> str:
    if found.basis == "device" and found.suspects:
        whose = ranks(found.suspects)
        return f"Check the device and the links of {whose}: `nvidia-smi -q`, Xid in the kernel log."
    return foreign_jobs.next_step(facts.evidence) if facts.evidence.foreign else ""


@detector(Verdict.HANG)
def silent_node(facts: Facts) -> Judgement | None:
    """Ranks wait in a collective, no recorded rank is at fault, and a node stopped sending data."""
    evidence, waiting, gone = facts.evidence, facts.waiting, facts.silent_ranks
    if not waiting or facts.elsewhere or not gone:
        return None
    calls = {rank: call for rank in waiting if (call := open_call(evidence, rank)) is not None}
    for_them = explained(evidence, calls, set(gone))
    text = silence(silent(evidence))
    first = next((rank for rank in sorted(calls) if rank in for_them), None)
    if first is None:
        text += f" {capital(ranks(waiting))} waited in a collective; no evidence that they waited "
        return Judgement(Confidence.LOW, f"{text}for other ranks there, so no rank is named.")
    where = f"{describe(calls[first])} on {evidence.ranks[first].on(calls[first])}"
    text += f" {capital(does(waiting, f'waits in {where}'))}, "
    if set(waiting) - for_them:
        text += f"but {ranks(set(waiting) - for_them)} for no rank there, so no rank is named."
        return Judgement(Confidence.LOW, text)
    text += (
        f"for {ranks(gone)} there: that node is down, disconnected or stopped; the evidence does "
        "not show which."
    )
    return Judgement(
        Confidence.MEDIUM,
        text,
        culprits=gone,
        victims=tuple(sorted(waiting)),
        pattern="silent-node",
        next_step=see_node(silent(evidence)),
    )


@detector(Verdict.HANG)
def busy_ranks(facts: Facts) -> Judgement | None:
    """Some ranks wait in a collective while others are outside any: the others are named.

    For evidence of other tools this counts only if no calls were recorded, and if all other ranks
    were seen and wait at the same place: ranks in different calls may be wrong themselves, unless
    all are ahead of the ranks that are named.
    """
    found = facts.elsewhere
    if not found or (facts.evidence.foreign and not _awaited(facts)):
        return None
    text = f"{ranks(found).capitalize()} stopped outside any collective while "
    text += f"{ranks(facts.waiting)} waited. {whereabouts(facts.evidence, found)}"
    if behind := _behind(facts):
        text = f"{text.rstrip()} {capital(does(found, 'is behind'))}: {behind}."
    return Judgement(
        Confidence.MEDIUM,
        text.rstrip(),
        culprits=tuple(sorted(found)),
        victims=tuple(sorted(facts.waiting)),
    )


def _awaited(facts: Facts) -> bool:
    """Whether stacks alone show that all ranks but a few wait in one call."""
    evidence, waiting = facts.evidence, facts.waiting
    seen = len(facts.elsewhere) + len(waiting)
    called = any(one.collectives for one in evidence.ranks.values())
    most = len(waiting) - (evidence.looks is None)  # looks show that the others do not work
    if called or len(facts.elsewhere) > most or seen < evidence.world_size:
        return False
    stacks = [that_counts(s.stacks) if (s := evidence.ranks.get(r)) else None for r in waiting]
    places = {stand(one) for one in stacks if one is not None}
    return None not in stacks and (len(places) == 1 or bool(_behind(facts)))


def _behind(facts: Facts) -> str:
    seen = facts.evidence.looks
    return seen.behind(facts.elsewhere, facts.waiting) if seen is not None else ""


@detector(Verdict.HANG)
def unexplained_wait(facts: Facts) -> Judgement | None:
    """Ranks wait in a collective, and the evidence does not show for which rank: none is named."""
    found = () if facts.under_way else facts.waiting
    if not found:
        return None
    seen = any(facts.evidence.ranks[r].collectives for r in found if r in facts.evidence.ranks)
    lost = facts.unrecorded
    text = f"{ranks(found).capitalize()} waited in a collective. "
    if seen and not lost:
        text += _unmatched(facts) or (
            "The recorded schedules agree, and the call does not complete. The cause may be the "
            "network, the backend or a call that was not recorded; it is not known which rank, if "
            "any, is at fault."
        )
    else:
        whose = f" of {ranks(lost)}" if seen else ""
        text += f"No schedule{whose} was recorded, so it is not known which rank is at fault."
    if facts.evidence.foreign:
        made = log_sentences.sites(facts.evidence)
        text = f"{text} {made}".rstrip()
    confidence = Confidence.MEDIUM if seen and not lost else Confidence.LOW
    step = foreign_jobs.next_step(facts.evidence) if facts.evidence.foreign else ""
    return Judgement(confidence, text, victims=tuple(sorted(found)), next_step=step)


def _of_anyone(facts: Facts) -> str:
    """How many messages a rank got from each, if it waits for one of any rank; "" otherwise."""
    ranks_of = facts.evidence.ranks
    for rank in facts.waiting:
        calls = ranks_of[rank].collectives if rank in ranks_of else ()
        if not calls or calls[-1].completed or (calls[-1].op, calls[-1].peer) != ("recv", None):
            continue
        made = {r: seen.collectives for r, seen in sorted(ranks_of.items()) if r != rank}
        sent = {r: sum((c.op, c.peer) == ("send", rank) for c in own) for r, own in made.items()}
        told = [
            f"{plural(number, 'message')} by {ranks(who)}"
            for number, who in agreement.sides(sent).items()
        ]
        if len(told) > 1:
            return (
                f"Rank {rank} waits for a message of any rank{_last(calls)}. It was sent "
                f"{'; '.join(told)}. It is not known which rank is at fault."
            )
    return ""


def _unmatched(facts: Facts) -> str:
    """What a rank that waits for any other was sent, else the first pair of ranks whose
    point-to-point calls have no counterpart; or ""."""
    if told := _of_anyone(facts):
        return told
    for channel in facts.aligned.channels:
        sent, received = len(channel.sends), len(channel.receives)
        if channel.whole and sent != received:
            return (
                f"Rank {channel.sender} issued {plural(sent, 'send')} to rank {channel.receiver}"
                f"{_last(channel.sends)}, which issued {plural(received, 'receive')} from it"
                f"{_last(channel.receives)}, and the recorded collectives agree: they count "
                "differently (micro-batches of a pipeline, say), or one of them is late for "
                "another reason. It is not known which rank is at fault."
            )
    return ""


def _last(calls: Sequence[Collective]) -> str:
    """`` (at ring.py:55)``: the line of the last of these calls, or ""."""
    return f" (at {calls[-1].site.partition(' ')[0]})" if calls and calls[-1].site else ""
