"""The exception of a trial that this stack cannot do."""

from __future__ import annotations


class NotApplicable(Exception):
    """This stack cannot do what the trial asks; the text says why. The verdict becomes
    ``not-applicable``. All ranks raise it alike."""
