"""Entries of the scenarios and of the hunt's findings that cite a report."""

from __future__ import annotations

from moediag.lab.pipeline import register
from moediag.lab.scenario import catalogue
from moediag.lab.scenario_entries import scenario
from moediag.reference.word_entry import Entry


def citing(word: str) -> list[Entry]:
    """The entries of what cites a report: scenarios, and findings of the hunt."""
    wanted = catalogue.citation(word)
    if wanted is None:
        return []
    found = [one for one in register.read() if wanted.search(f"{one.where} {one.summary}")]
    return [*map(scenario, catalogue.citing(word)), *map(_finding, found)]


def _finding(found: register.Entry) -> Entry:
    rows = (("relations", found.relations), ("families", found.families), ("ways", found.ways))
    return Entry(
        "finding", found.summary, (f"The hunt's register lists it as {found.status}.",),
        tuple((name, ", ".join(values)) for name, values in rows if values), "It shows in",
        (f"moediag hunt --relation {found.relations[0]}",), (found.where,),
    )  # fmt: skip
