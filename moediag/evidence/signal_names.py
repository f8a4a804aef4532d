"""Names of the signals that end a rank, by number and by the words that launchers print.

Logs come from Linux, whichever machine reads them.
"""

from __future__ import annotations

from moediag.evidence.model import ExitStatus

_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS",
    8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE",
    14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
# Of libc, Slurm and faulthandler.
_WORDS = {
    "Out Of Memory": "SIGKILL", "Killed": "SIGKILL", "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS", "Illegal instruction": "SIGILL",
    "Floating point exception": "SIGFPE", "Floating-point exception": "SIGFPE",
    "Aborted": "SIGABRT", "Terminated": "SIGTERM",
}  # fmt: skip


def name_of(number: int) -> str:
    """Returns ``SIGSEGV`` for 11, ``signal 99`` for a number without a name."""
    return _NAMES.get(number, f"signal {number}")


def named_in(text: str, before: str = "") -> str | None:
    """Returns the signal whose words follow ``before`` in ``text``, None if there are none."""
    return next((name for words, name in _WORDS.items() if before + words in text), None)


def status_of(code: int) -> ExitStatus:
    """Returns how a process ended whose parent got ``code``: below 0, it is a signal's number."""
    return ExitStatus(code=code) if code >= 0 else ExitStatus(signal=name_of(-code))
