"""Explains words: every verdict, law, scenario, option and exit code has an entry, which `moediag
explain` prints and the reference pages list."""

from moediag.reference.lookup import Lookup
from moediag.reference.word_entry import Entry, Kind

__all__ = ["Entry", "Kind", "Lookup"]
