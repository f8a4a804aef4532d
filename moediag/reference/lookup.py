"""Finds the entries of a word."""

from __future__ import annotations

import difflib
from typing import Any

from moediag import extension
from moediag.errors import UsageError
from moediag.reference import finding_entries, option_entries, page_words
from moediag.reference.word_entry import Entry


class Lookup:
    """All words that have an entry. ``commands``: the command line's group of commands, whose
    options are words too."""

    def __init__(self, commands: Any) -> None:
        self._entries = [
            *finding_entries.verdicts(),
            *finding_entries.laws(),
            *finding_entries.exit_codes(),
            *page_words.words(),
            *option_entries.names(commands),
            *option_entries.options(commands),
        ]  # without the scenarios: each of them is a file

    def find(self, word: str) -> list[Entry]:
        """Every entry of ``word``, also in the plural or the singular. Raises UsageError with the
        nearest words."""
        wanted = _plain(word)
        for name in (wanted, wanted.removesuffix("s"), f"{wanted}s"):
            found = [entry for entry in self._entries if _plain(entry.word) == name]
            if found:
                break
        if wanted in _scenarios():
            found.append(extension.provided("scenario entry")(wanted))
        if not extension.missing():
            found += extension.provided("citing")(word)
        if found:
            return found
        near = difflib.get_close_matches(wanted, self._bare(), n=3, cutoff=0.7)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UsageError(
            f"no verdict, law, scenario, option, exit code or word of a page is called "
            f"{word!r}{hint}",
            "`moediag explain` lists all words.",
        )

    def words(self) -> dict[str, list[str]]:
        """Kind -> its words."""
        found: dict[str, list[str]] = {}
        for entry in self._entries:
            found.setdefault(entry.kind, []).append(entry.word)
        return {**found, "scenario": names} if (names := _scenarios()) else found

    def _bare(self) -> list[str]:
        return [_plain(word) for words in self.words().values() for word in words]


def _plain(word: str) -> str:
    """``first-divergence`` for ``FIRST DIVERGENCE`` and for ``--first-divergence``."""
    return word.lstrip("-").lower().replace(" ", "-")


def _scenarios() -> list[str]:
    """The names of the catalogue's scenarios; none if the laboratory is not installed."""
    return [] if extension.missing() else extension.provided("scenario names")()
