"""Errors that a user can do something about. Each class owns its exit code and a help text.

``cli.main`` has the only ``try``: it prints ``error: MESSAGE`` and the help, and exits with
``exit_code``; everything else is a bug in moediag (exit code 5).
"""

from __future__ import annotations


class ExitCode:
    """Documented in the README; tested one by one."""

    OK = 0
    FAILURE_FOUND = 1
    USAGE = 2
    INCONCLUSIVE = 3
    CANNOT_RUN_HERE = 4
    BUG = 5
    INTERRUPTED = 130


class MoediagError(Exception):
    """Base of all user-facing errors. ``message``: what was wrong and where, one line or few.
    ``help_text``: why, and what to type next."""

    exit_code: int = ExitCode.USAGE
    help_text: str = ""

    def __init__(self, message: str, help_text: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if help_text is not None:
            self.help_text = help_text


class UsageError(MoediagError):
    """A command-line value that cannot be used."""


class ScenarioError(MoediagError):
    """A scenario file that cannot be used. The message starts with ``FILE:LINE:COLUMN: field``."""

    help_text = "`moediag schema` prints every field; `moediag show NAME` a scenario in full."


class LayoutError(MoediagError):
    """A mesh that does not fit the world size. The message prints every factor."""

    help_text = "The product of all mesh axes must equal the number of ranks."


class StackError(MoediagError):
    """An environment that cannot be built."""

    exit_code = ExitCode.CANNOT_RUN_HERE
    help_text = (
        "`moediag doctor` says what this machine lacks, `moediag stacks list` what is there."
    )


class NoEnvironments(StackError):
    """No environment at all can be built now (no network, a full disk, no uv): what failed for
    one release says nothing about it, and the next would fail alike."""


class NoSuchRelease(StackError):
    """A package version that the index does not have."""

    exit_code = ExitCode.USAGE
    help_text = "Give a released version, e.g. --stack transformers=4.53.2."


class MachineError(MoediagError):
    """This machine cannot run it (no GPU, too few of them, a missing tool)."""

    exit_code = ExitCode.CANNOT_RUN_HERE
    help_text = "`moediag doctor` says what this machine can do."


class DiskFull(MachineError):
    """No space is left for results or evidence. What was finished before is kept."""


class LaunchError(MoediagError):
    """The ranks could not be started at all."""

    exit_code = ExitCode.CANNOT_RUN_HERE


class NodeLost(MoediagError):
    """Another node of a run on several did not come, or left before the end."""

    exit_code = ExitCode.INCONCLUSIVE
    help_text = "What was gathered until then is in the run directory."


class EvidenceError(MoediagError):
    """A file of evidence that cannot be read."""


class Interrupted(MoediagError):
    """Ctrl-C: ranks ended, evidence kept."""

    exit_code = ExitCode.INTERRUPTED
    help_text = ""
