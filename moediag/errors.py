"""Errors that a user can fix. Each class has its exit code and a help text.

``cli.main`` has the only ``try``: it prints ``error: MESSAGE`` and the help text and exits with
``exit_code``. Any other exception is a bug in moediag (exit code 5).
"""

from __future__ import annotations

import errno


class ExitCode:
    """The exit codes, documented in the README."""

    OK = 0
    FAILURE_FOUND = 1
    USAGE = 2
    INCONCLUSIVE = 3
    CANNOT_RUN_HERE = 4
    BUG = 5
    INTERRUPTED = 130


class MoediagError(Exception):
    """Base of all user-facing errors. ``message`` says what is wrong and where, in one line or a
    few."""

    exit_code: int = ExitCode.USAGE
    help_text: str = ""  # why, and what to type next

    def __init__(self, message: str, help_text: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if help_text is not None:
            self.help_text = help_text


class UsageError(MoediagError):
    """A command-line value that cannot be used."""


class ScenarioError(MoediagError):
    """A scenario file that cannot be used. The message starts with ``FILE:LINE:COLUMN: field``."""

    help_text = "`moediag schema` prints every field, `moediag show NAME` a complete scenario."


class LayoutError(MoediagError):
    """A mesh that does not match the number of ranks. The message contains every factor."""

    help_text = "The product of all mesh axes must equal the number of ranks."


class StackError(MoediagError):
    """An environment that cannot be built."""

    exit_code = ExitCode.CANNOT_RUN_HERE
    help_text = (
        "`moediag doctor` lists what this machine lacks, `moediag stacks list` what is built."
    )


class NoEnvironments(StackError):
    """No environment can be built at all now (no network, a full disk, no uv), so the failure says
    nothing about a single release."""


class NoSuchRelease(StackError):
    """A package version that the index does not have."""

    exit_code = ExitCode.USAGE
    help_text = "Name a released version, e.g. --stack transformers=4.53.2."


class MachineError(MoediagError):
    """This machine cannot run it (no GPU, too few of them, a missing tool)."""

    exit_code = ExitCode.CANNOT_RUN_HERE
    help_text = "Type: moediag doctor   (it checks this machine)"


class DiskFull(MachineError):
    """Results or evidence cannot be written: no space is left, or the file system fails. What was
    finished before is kept."""


def says_disk_full(error: BaseException) -> bool:
    """Whether the error means that no space, or no quota, is left."""
    code = error.errno if isinstance(error, OSError) else None
    return isinstance(error, DiskFull) or code in (errno.ENOSPC, errno.EDQUOT)


def disk_trouble(error: BaseException) -> str:
    """Returns in words why files cannot be written or read; "" if that is not the error."""
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.EIO, errno.ESTALE, errno.EREMOTEIO):
        return "the file system fails"
    return "the disk is full" if says_disk_full(error) else ""


class LaunchError(MoediagError):
    """The ranks could not be started at all."""

    exit_code = ExitCode.CANNOT_RUN_HERE


class NodeLost(MoediagError):
    """Another node of a run on several nodes did not come, or left before the end."""

    exit_code = ExitCode.INCONCLUSIVE
    help_text = "The evidence collected so far is in the run directory."


class EvidenceError(MoediagError):
    """A file of evidence that cannot be read."""


class Interrupted(MoediagError):
    """Ctrl-C: the ranks were stopped and the evidence was kept."""

    exit_code = ExitCode.INTERRUPTED
    help_text = ""
