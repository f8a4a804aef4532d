"""The explanation of one word, as data."""

from __future__ import annotations

from typing import Literal

from moediag.records import dataclass

Kind = Literal[
    "verdict", "law", "detector", "word", "scenario", "finding", "command", "option", "exit code"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """What one word means."""

    kind: Kind
    word: str
    paragraphs: tuple[str, ...]
    """Sentences, in the order in which a reader needs them."""
    rows: tuple[tuple[str, str], ...] = ()
    """What belongs to it, each with its description: detectors, variants, commands."""
    heading: str = ""
    """Introduces ``rows``."""
    commands: tuple[str, ...] = ()
    """Command lines to type next."""
    sources: tuple[str, ...] = ()
    """Addresses of reports."""
