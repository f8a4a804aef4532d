"""The exception of a trial that this stack cannot run."""

from __future__ import annotations


class NotApplicable(Exception):
    """This stack cannot run the trial; the text says why. The verdict becomes ``not-applicable``.
    All ranks raise it alike."""
