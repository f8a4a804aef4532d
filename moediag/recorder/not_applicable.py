"""The exception of a trial that this stack cannot run."""

from __future__ import annotations


class NotApplicable(Exception):
    """This stack cannot run the trial; the text says why. The verdict becomes ``not-applicable``.
    All ranks raise it alike."""


class NotInStack(NotApplicable):
    """The stack lacks a package that is needed."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is not in this stack")
        self.package = package
