"""Ranks wait in a collective, and the evidence does not show for which rank: none is named."""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import foreign_jobs, log_sentences
from moediag.result import Confidence, Verdict
from moediag.result.wording import plural, ranks

VERDICT = Verdict.HANG


def find(facts: Facts) -> tuple[int, ...] | None:
    return None if facts.under_way else facts.waiting or None


def judge(facts: Facts, found: tuple[int, ...]) -> Judgement:
    seen = any(facts.evidence.ranks[r].collectives for r in found if r in facts.evidence.ranks)
    lost = facts.unrecorded
    text = f"{ranks(found).capitalize()} waited in a collective. "
    if seen and not lost:
        text += _unmatched(facts) or (
            "The recorded schedules agree, and the call does not complete. It is not known which "
            "rank, if any, is at fault: the network, the backend, or a call that was not recorded."
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


def _unmatched(facts: Facts) -> str:
    """The first pair of ranks whose point-to-point calls have no counterpart, or ""."""
    for channel in facts.aligned.channels:
        sent, received = len(channel.sends), len(channel.receives)
        if channel.whole and sent != received:
            return (
                f"Rank {channel.sender} issued {plural(sent, 'send')} to rank {channel.receiver}, "
                f"which issued {plural(received, 'receive')} from it, and the recorded collectives "
                "agree: they count differently (micro-batches of a pipeline, say), or one of them "
                "is late for another reason. It is not known which rank is at fault."
            )
    return ""
