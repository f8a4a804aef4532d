"""Sentences about ranks that do not end, although their peers have or their program returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moediag.diagnosis.end_states.whereabouts import busy_workers, program_line, whereabouts
from moediag.evidence.model import Evidence, RankEvidence, Stack
from moediag.evidence.rank_stacks import LAST_CALL, of_user
from moediag.result.wording import agreeing, capital, ranks

_THREADS = ("_shutdown", "_python_exit")
_CHILDREN = "_exit_function"
_MAIN = ("<module>", "_run_module_as_main")
_OURS = "moediag-recorder"  # a daemon
_MOST = 3  # threads that are named
NEXT = (
    "Let the program end what it started before it returns: tell a thread to stop and join it, or "
    "make it a daemon; end and join child processes."
)


def unended(evidence: Evidence) -> tuple[int, ...]:
    """The ranks that do not end, if no rank waits and another has ended or each is about to."""
    stall = evidence.stall
    if stall is None or stall.waiting or not stall.elsewhere:
        return ()
    found = stall.elsewhere
    shows = _stack if _ended(evidence) else _main
    return found if all(shows(evidence.ranks.get(rank)) for rank in found) else ()


def sentences(evidence: Evidence, found: Sequence[int]) -> str:
    """What each of the ranks ``found`` waits for, and which have ended."""
    runs = running(evidence, found)
    texts = [_one(evidence.ranks[rank]) for rank in found if rank not in runs]
    if runs:
        texts.append(f"{capital(ranks(runs))} still {agreeing('runs', runs)}.")
        texts.append(whereabouts(evidence, runs))
    if ended := _ended(evidence):
        told = all(evidence.ranks[rank].exit for rank in ended)
        code = " with exit code 0" if told else ""
        texts.append(f"{ranks(ended).capitalize()} ended{code}.")
    return " ".join(filter(None, texts))


def running(evidence: Evidence, found: Sequence[int]) -> tuple[int, ...]:
    """Those of the ranks ``found`` of which nothing shows that their programs have returned."""
    return tuple(rank for rank in found if _main(evidence.ranks.get(rank)) is None)


def _ended(evidence: Evidence) -> list[int]:
    """A process that the job's own program started has no exit code that anybody saw."""
    alive = evidence.stall.elsewhere if evidence.stall is not None else ()
    return [
        rank
        for rank, seen in evidence.ranks.items()
        if (seen.exit.code == 0 if seen.exit else seen.finished and rank not in alive)
    ]


def _one(seen: RankEvidence) -> str:
    main = _main(seen)
    names = {frame.function for frame in main.frames} if main is not None else set()
    line = program_line(seen)
    text = f"The program of rank {seen.rank} has returned, but its process does not end: it "
    if threads := list(_threads(seen, main)) if names & {*_THREADS} else []:
        word = "the thread" if len(threads) == 1 else "one of the threads"
        return f"{text}waits for {word} {', '.join(threads[:_MOST])}."
    if names & {*_THREADS}:
        return f"{text}waits for a thread to end."
    if _CHILDREN in names:
        return f"{text}waits for its child processes to end. {busy_workers(seen)}".rstrip()
    at = f" at {line}" if line else ""
    if LAST_CALL in names:
        return f"Rank {seen.rank} waits in destroy_process_group{at}."
    return f"{text}is still in an exit handler (atexit){at}."


def _main(seen: RankEvidence | None) -> Stack | None:
    """The main thread's stack, if it shows that its program has returned."""
    main = _stack(seen)
    python = main.python if main is not None else ()
    names = {frame.function for frame in python}
    returned = bool(python) and python[-1].function not in _MAIN
    return main if returned or names & {*_THREADS, _CHILDREN, LAST_CALL} else None


def _stack(seen: RankEvidence | None) -> Stack | None:
    stacks = seen.stacks if seen is not None else ()
    return next((s for s in stacks if s.thread == "MainThread" and s.frames), None)


def _threads(seen: RankEvidence, main: Stack | None) -> Iterator[str]:
    """``'logger' (train.py:12 drain)``: other threads that run the user's code."""
    for stack in seen.stacks:
        own = of_user(stack.frames, seen.libraries)
        other = main is not None and stack.source == main.source and stack is not main
        if own and other and stack.thread != _OURS:
            yield f"'{stack.thread}' ({own[0].place})"
