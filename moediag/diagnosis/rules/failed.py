"""Judgements of ranks that raised, died, or were stopped by the guard."""

from __future__ import annotations

from moediag.diagnosis.blame import mixed_optimizer, nodes
from moediag.diagnosis.blame.failures import GUARD, Failure
from moediag.diagnosis.rules.facts import Facts, Judgement, how_sure, others
from moediag.diagnosis.words import cause
from moediag.evidence.model import UNTOLD, Evidence
from moediag.result import Confidence, Verdict
from moediag.result.wording import ranks


def failed(facts: Facts) -> Judgement:
    divergence, own = facts.divergence, facts.own
    if own and own[0].name == GUARD:
        return _guarded(facts, own)
    late = divergence is not None and own and 0 < own[0].time < divergence.time
    # A silent divergence does not end a rank: an exception of the program's own is another
    # failure, and an abort by the library its later consequence (sizes came to differ too).
    unfit = divergence is not None and divergence.kind != "missing" and not late
    if unfit and (facts.loud or not own):
        return mismatch(facts)
    if own:
        return _crash(facts, own)
    gone = nodes.silent(facts.evidence)
    if gone and (divergence is None or divergence.kind == "missing"):
        return nodes.lost(facts, _said(facts.failed))
    if divergence is not None:
        return mismatch(facts)
    if any(f.mismatch for f in facts.failed):
        return Judgement(
            Verdict.COLLECTIVE_MISMATCH,
            Confidence.LOW,
            f"{ranks(f.rank for f in facts.failed if f.mismatch).capitalize()}: the communication "
            f"library says that collectives did not match ({_said(facts.failed)}). "
            "No recorded schedule shows which.",
        )
    some = facts.failed[0]
    return Judgement(
        Verdict.CRASH,
        Confidence.LOW,
        f"{ranks(f.rank for f in facts.failed).capitalize()} lost the connection to a peer "
        f"({_said(facts.failed)}); nothing seen tells why, or which rank is at fault.",
        failure=some,
    )


def mismatch(facts: Facts) -> Judgement:
    assert facts.divergence is not None
    text = cause.of_divergence(facts.divergence, facts.blame, facts.evidence.backend, died=True)
    if facts.divergence.silent:
        text += cause.out_of_step(facts.evidence, sorted(facts.evidence.ranks))
    text += cause.called_at(facts.divergence, facts.blame, facts.evidence, text)
    return Judgement(
        Verdict.COLLECTIVE_MISMATCH,
        how_sure(facts),
        text,
        culprits=facts.blame.culprits,
        victims=others(facts),
        divergence=True,
    )


def _guarded(facts: Facts, own: tuple[Failure, ...]) -> Judgement:
    """The guard raised on ranks that had not yet done what the divergence would have led to."""
    raised = [f for f in own if f.name == GUARD]
    who = ranks(f.rank for f in raised)
    if facts.divergence is None:
        text = f"The guard stopped {who}: {raised[0].summary}"
        return Judgement(Verdict.CRASH, Confidence.MEDIUM, text, failure=raised[0])
    backend = facts.evidence.backend
    text = cause.of_divergence(facts.divergence, facts.blame, backend, died=False, guarded=True)
    earlier = any(c is not None and c.op == "all_gather" for c in facts.divergence.calls.values())
    when = "at the next reduction" if earlier else "before that reduction"
    return Judgement(
        Verdict.CRASH,
        how_sure(facts),
        f"{text} The guard stopped {who} {when} ({GUARD}).",
        culprits=facts.blame.culprits,
        victims=others(facts),
        divergence=True,
        failure=raised[0],
    )


def _crash(facts: Facts, own: tuple[Failure, ...]) -> Judgement:
    """All ranks that failed in the same way are culprits: none of them is another's victim."""
    first = own[0]
    same = tuple(sorted(f.rank for f in own if (f.name, f.where) == (first.name, first.where)))
    text = f"{ranks(same).capitalize()} "
    if first.message or first.where:
        text += f"raised {first.name}" + (f" at {first.where}" if first.where else "")
        text += f": {first.summary}" if first.summary else ""
    elif first.name.startswith("exit code"):
        text += f"ended with {first.name} and left no exception"
    elif first.name == UNTOLD:
        text += "ended without a trace (killed, or by os._exit: what started it does not tell)"
    else:
        text += f"died by {first.name}"
        text += _killed(facts.evidence) if first.name == "SIGKILL" else ""
    text = text if text.endswith("!") else text.rstrip(".") + "."
    mixture = mixed_optimizer.of_crash(facts.evidence, own)
    text += f" {mixture}" if mixture else ""
    d = facts.divergence
    missing = d is not None and d.kind == "missing" and bool(set(d.absent) & set(same))
    if missing and d is not None:
        calls = {rank: call for rank, call in d.calls.items() if call is not None}
        where = cause.describe(next(iter(calls.values())))
        text += f" {ranks(calls).capitalize()} then waited in {where} on {d.group.label}."
    others = tuple(sorted(set(facts.evidence.ranks) - set(same)))
    return Judgement(
        Verdict.CRASH,
        Confidence.HIGH if first.message or first.where or missing else Confidence.MEDIUM,
        text,
        culprits=same,
        victims=others,
        divergence=missing,
        failure=first,
    )


def _killed(evidence: Evidence) -> str:
    kills = evidence.oom_kills
    if kills:
        times = "once" if kills == 1 else f"{kills} times"
        return f" (out of memory: the kernel's OOM killer struck {times} meanwhile)"
    if kills == 0:
        return " (killed from outside: the kernel's OOM killer did not strike)"
    return " (killed from outside, or out of memory)"


def _said(failed: tuple[Failure, ...]) -> str:
    told = next((f for f in failed if f.summary), failed[0])
    return f"{told.name}: {told.summary}" if told.summary else told.name
