"""Entries of verdicts, of laws and of exit codes."""

from __future__ import annotations

from moediag.diagnosis import LAWS, MEANINGS, NEXT_STEPS, RULES, Law
from moediag.errors import ExitCode
from moediag.reference.word_entry import Entry
from moediag.result import FAILURES, Verdict

EXIT_CODES = {
    ExitCode.OK: "Every expectation was met (diagnose, verify, resume: no failure found; "
    "bisect: answered; matrix: every cell known; hunt: nothing new; check: nothing found; "
    "nightly: no new failure; watch: the job's own exit code).",
    ExitCode.FAILURE_FOUND: "An expectation was not met (diagnose, watch, verify, resume: "
    "a failure found; hunt: a confirmed finding that its register lacks; check: something fails; "
    "nightly: a new failure).",
    ExitCode.USAGE: "Wrong usage or bad input.",
    ExitCode.INCONCLUSIVE: "Inconclusive: a control failed, or a trial could not be judged "
    "(bisect: no answer; matrix: a cell is unknown; "
    "hunt, check: something was not decided or not confirmed).",
    ExitCode.CANNOT_RUN_HERE: "This machine cannot run it.",
    ExitCode.BUG: "A bug in moediag.",
    ExitCode.INTERRUPTED: "Interrupted: the ranks were stopped and the evidence was kept.",
}
_EXIT_NEXT = {
    ExitCode.USAGE: ("moediag --help",),
    ExitCode.CANNOT_RUN_HERE: ("moediag doctor",),
    ExitCode.BUG: ("moediag env",),
}


def verdicts() -> list[Entry]:
    """One entry for each verdict."""
    return [_verdict(verdict) for verdict in Verdict]


def laws() -> list[Entry]:
    """One entry for each law, with the level of what it finds."""
    return [_law(one) for one in LAWS]


def law_rows() -> list[tuple[str, str, str, str]]:
    """Name, level, verdict of a broken law, and what is found, of each law."""
    level = {True: "suspicious", False: "note"}
    return [
        (f"`{one.name}`", "broken", f"`{one.verdict}`", one.finds)
        if one.verdict is not None
        else (f"`{one.name}`", level[bool(one.suspects)], "", one.finds)
        for one in LAWS
    ]


def exit_codes() -> list[Entry]:
    """One entry for each exit code."""
    return [
        Entry("exit code", str(code), (meaning,), commands=_EXIT_NEXT.get(code, ()))
        for code, meaning in EXIT_CODES.items()
    ]


def detector_word(detector: str) -> str:
    """The word that `moediag explain` knows the detector by."""
    return detector.replace("_", "-")


def _verdict(verdict: Verdict) -> Entry:
    found_by = tuple((d.name, d.finds) for d in RULES if d.verdict == verdict)
    return Entry(
        "verdict",
        str(verdict),
        (MEANINGS[verdict], f"Next: {NEXT_STEPS[verdict]}"),
        found_by,
        "Detectors that report it, in the order in which they are asked",
        ("moediag diagnose RUN --html page.html",) if verdict in FAILURES else (),
    )


def _law(law: Law) -> Entry:
    if law.verdict is not None:
        level = f"A job that breaks it has the verdict {law.verdict}, and the exit code is 1."
        how = "broken"
    elif law.suspects:
        level, how = "The exit code is that of the job; with `--strict` it is 1.", "suspicious"
    else:
        level, how = "It is a note on the page. The exit code is that of the job.", "noted"
    more = (f"moediag explain {law.verdict}",) if law.verdict is not None else ()
    return Entry(
        "law",
        law.name,
        (f"It is {how} if this is found: {law.finds}", level),
        commands=("moediag watch --laws -- COMMAND", *more),
    )
