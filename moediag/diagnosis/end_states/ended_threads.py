"""Exceptions that ended a thread of a rank, which lives on without it."""

from __future__ import annotations

from moediag.evidence.model import Evidence, RankError

_SOON = 10.0  # seconds from the exception to the newest call of the job
_AFTER = 2.0  # from that call to the exception; later, the hang may be its cause
_CALLS = 8  # of its rank after it, at most
_MOST = 3  # that are told
_MESSAGE = 120  # characters


def ended_thread(evidence: Evidence) -> tuple[int, RankError] | None:
    """The only rank that lost a thread which ran the user's code, and did so just before the job
    stood still. A thread that does not communicate may end unnoticed, long before a hang."""
    every = evidence.ranks.items()
    newest = max((seen.collectives[-1].time for _, seen in every if seen.collectives), default=0.0)
    found = [(rank, seen.thread_errors[-1]) for rank, seen in every if seen.thread_errors]
    if len(found) != 1 or not found[0][1].where:
        return None
    rank, error = found[0]
    later = sum(call.time > error.time for call in evidence.ranks[rank].collectives)
    near = -_AFTER <= newest - error.time <= _SOON
    return found[0] if later <= _CALLS and near else None


def sentences(evidence: Evidence) -> str:
    """``The thread 'sender' of rank 0 ended by KeyError: 'x', raised at server.py:12 send.``"""
    every = [(rank, e) for rank, seen in sorted(evidence.ranks.items()) for e in seen.thread_errors]
    return " ".join(
        f"The thread '{error.thread}' of rank {rank} ended by {said(error)}."
        for rank, error in every[:_MOST]
    )


def said(error: RankError) -> str:
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
