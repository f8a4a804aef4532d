"""`moediag list`, `moediag show` and `moediag schema`: parse, call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.errors import UsageError
from moediag.lab.cli import options as o
from moediag.report import stdout

if TYPE_CHECKING:
    from moediag.lab.scenario.schema import Scenario

_WIDTH = 80


def list_(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORD…",
            help="Only those that contain all words.",
            show_default=False,
        ),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """List the scenarios of the catalogue by what they show, and the fixes that they try.

    A word may be of the name, the title, a verdict, a package or a release, or a report that it
    cites: an address, owner/repo#123 or a number.
    """
    from moediag.lab.content import FIXES
    from moediag.lab.scenario import catalogue, content

    def chosen(*texts: str) -> bool:
        return all(
            texts[0] in catalogue.citing(word) if catalogue.citation(word) is not None
            else word.lower() in " ".join(texts).lower()
            for word in words or ()
        )  # fmt: skip

    found = [
        one for one in catalogue.summaries() if chosen(one.name, one.title, one.needs, *one.shows)
    ]
    shipped = map(content.fix, content.names(FIXES))
    fixes = [fix for fix in shipped if chosen(fix.name, fix.summary)]
    if as_json:
        scenarios = [dataclasses.asdict(one) for one in found]
        stdout.data({"scenarios": scenarios, "fixes": [dataclasses.asdict(f) for f in fixes]})
        return
    if not found and not fixes:
        raise UsageError(
            f"no scenario and no fix matches {' '.join(words or ())}", "`moediag list` lists all."
        )
    listed = {
        group: {one.name: f"{one.title} ({one.needs})" for one in found if one.group == group}
        for group in catalogue.GROUPS
    }
    listed["fixes"] = {fix.name: f"{fix.summary} ({fix.source})" for fix in fixes}
    for number, (heading, rows) in enumerate((h, rows) for h, rows in listed.items() if rows):
        stdout.line("\n" * (number > 0) + f"{heading}:")
        o.print_definitions(rows)


def show(name: o.Name, set_: o.SetPairs = [], as_json: o.Json = False) -> None:  # noqa: B006
    """Show a scenario: a summary, then the whole file with every default filled in.

    The output is a scenario file; the summary is its comments.
    """
    from moediag.lab.scenario import catalogue, content
    from moediag.lab.scenario import load as loading

    scenario = loading.load(catalogue.find(name), set_)
    if as_json:
        stdout.data(scenario.model_dump(mode="json"))
        return
    for line in _summary(scenario, name):
        stdout.line(f"# {line}".rstrip())
    stdout.line(f"\n{scenario.to_yaml()}".rstrip("\n"))
    for used in sorted({v.fix for v in scenario.variants.values() if v.fix}):
        fix = content.fix(used)
        stdout.line(f"# fix {fix.name}: {fix.summary} ({fix.source})")


def _summary(scenario: Scenario, name: str) -> Iterator[str]:
    from moediag.lab.scenario_entries import entry
    from moediag.report.text_layout import definitions, wrap

    found = entry(scenario, name)
    title, _, setting = found.paragraphs
    yield from wrap(title, _WIDTH - 2)
    yield from wrap(setting, _WIDTH - 2)
    yield from ("", *definitions(dict(found.rows), _WIDTH - 2))
    yield from ("", *found.commands[:1])


def schema() -> None:
    """Print the JSON Schema of scenario files, for editors."""
    from moediag.lab.scenario.schema import json_schema

    stdout.data(json_schema())
