"""What the program itself shows beside its calls: batches of its data loaders, exceptions that it
handles, and exceptions that ended a thread of a rank, which lives on without it."""

from __future__ import annotations

from collections.abc import Mapping

from moediag.diagnosis.end_states.failures import is_communication
from moediag.diagnosis.words.calls import first_few
from moediag.evidence.model import BatchCount, Evidence, RankError
from moediag.records import dataclass
from moediag.result.wording import ranks

_SOON = 10.0  # seconds from the exception to the newest call of the job
_AFTER = 2.0  # from that call to the exception; later, the hang may be its cause
_CALLS = 8  # of its rank after it, at most
_MOST = 3  # that are told
_MESSAGE = 120  # characters


@dataclass(frozen=True, slots=True)
class UnequalBatches:
    """One pass of a data loader that ended earlier on some ranks than on others."""

    line: str
    #: Rank -> batches.
    counts: Mapping[int, int]
    #: Ranks whose pass was not over.
    going_on: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """``The data loader at train.py:88 gave 31 batches on rank 1, at least 32 on rank 0.``"""
        told: dict[str, list[int]] = {}
        for rank, number in sorted(self.counts.items(), key=lambda one: (one[1], one[0])):
            least = "at least " if rank in self.going_on else ""
            text = f"{least}{number:,} batch{'' if number == 1 else 'es'}"
            told.setdefault(text, []).append(rank)
        sides = [f"{text} on {ranks(who)}" for text, who in first_few(told.items())]
        return f"The data loader at {self.line.partition(' ')[0]} gave {', '.join(sides)}."


def sentences(evidence: Evidence) -> str:
    """All of it; "" where nothing shows."""
    batches = unequal_batches(evidence)
    told = ("" if batches is None else batches.sentence, _handled(evidence), _ended(evidence))
    return " ".join(filter(None, told))


def unequal_batches(evidence: Evidence) -> UnequalBatches | None:
    """The first pass that is known to have ended earlier on some ranks. Passes are compared by line
    and number, as far as all ranks that used a loader at that line began them."""
    passes: dict[str, dict[int, list[BatchCount]]] = {}
    for rank, seen in evidence.ranks.items():
        for one in seen.batches:
            passes.setdefault(one.line, {}).setdefault(rank, []).append(one)
    for line, by_rank in passes.items():
        for number in range(min(len(own) for own in by_rank.values()) if line else 0):
            here = {rank: own[number] for rank, own in by_rank.items()}
            ended = [one.number for one in here.values() if one.ended]
            # A pass that was not over may end with the same number.
            if ended and max(one.number for one in here.values()) > min(ended):
                going_on = tuple(sorted(rank for rank, one in here.items() if not one.ended))
                return UnequalBatches(line, {r: one.number for r, one in here.items()}, going_on)
    return None


def _handled(evidence: Evidence) -> str:
    """Which ranks were in a handler of an exception when they were examined."""
    return " ".join(
        f"Rank {rank} is handling an exception ({_said(seen.handling)})."
        for rank, seen in sorted(evidence.ranks.items())
        if seen.handling is not None
    )


def ended_thread(evidence: Evidence) -> tuple[int, RankError] | None:
    """The only rank that lost a thread which ran the user's code, and did so just before the job
    stood still. A thread that does not communicate may end unnoticed, long before a hang."""
    every = evidence.ranks.items()
    newest = max((seen.collectives[-1].time for _, seen in every if seen.collectives), default=0.0)
    found = [(rank, seen.thread_errors[-1]) for rank, seen in every if seen.thread_errors]
    found = [one for one in found if not is_communication(one[1])]  # another rank's end or wait
    if len(found) != 1 or not found[0][1].where:
        return None
    rank, error = found[0]
    later = sum(call.time > error.time for call in evidence.ranks[rank].collectives)
    near = -_AFTER <= newest - error.time <= _SOON
    return found[0] if later <= _CALLS and near else None


def _ended(evidence: Evidence) -> str:
    """``The thread 'sender' of rank 0 ended with KeyError: 'x', raised at server.py:12 send.``"""
    every = [(rank, e) for rank, seen in sorted(evidence.ranks.items()) for e in seen.thread_errors]
    return " ".join(
        f"The thread '{error.thread}' of rank {rank} ended with {_said(error)}."
        for rank, error in every[:_MOST]
    )


def _said(error: RankError) -> str:
    """``KeyError: 'x', raised at server.py:12 send``."""
    message = " ".join(error.message.split())[:_MESSAGE]
    text = f"{error.type}: {message}" if message else error.type
    return f"{text}, raised at {error.where}" if error.where else text


def fix(rank: int, error: RankError) -> str:
    """What to do about it."""
    at = error.where.partition(" ")[0]
    return (
        f"Fix the {error.type} of rank {rank} at {at}: it ended the thread '{error.thread}' while "
        "the rank went on."
    )
