"""The reference pages in markdown, one for each kind of word. `make golden` writes them into
docs/reference/."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from docs.generate import configuration_page, lab_outputs, python_page
from docs.generate.json_schema import document
from docs.generate.page_tables import table
from docs.generate.result_fields import Record, records
from moediag import extension
from moediag.diagnosis import CONFIDENCE, MEANINGS, NEXT_STEPS, RULES, SIGNATURE, Detector
from moediag.reference import finding_entries, option_entries
from moediag.reference.option_entries import Command, Parameter
from moediag.reference.word_entry import Entry

_ROOT = "../.."  # from docs/reference/ to the repository
_OPTIONS = ("argument or option", "meaning")
_SHARED = 4  # commands with the same option: then it is described once
_MADE = "This page is generated: `make golden` writes it. Do not edit it."


def pages(group: Any) -> dict[str, str]:
    """File name -> text. ``group``: the command line's group of commands."""
    commands = list(option_entries.commands(group))
    return {
        "commands.md": _commands(commands),
        "configuration.md": _page(
            "# Configuration", "", _MADE, "", *configuration_page.lines(commands)
        ),
        "exit-codes.md": _exit_codes(finding_entries.exit_codes()),
        "laws.md": _laws(finding_entries.law_rows()),
        "python.md": _page("# Python", "", _MADE, "", *python_page.lines()).rstrip("\n") + "\n",
        "result.md": _result(records()),
        "scenarios.md": _scenarios(
            map(extension.provided("scenario entry"), extension.provided("scenario names")())
        ),
        "verdicts.md": verdicts_page(RULES),
        **_schemas(lab_outputs.OUTPUTS),
    }


def _schemas(found: Mapping[str, tuple[str, Any]]) -> dict[str, str]:
    """The schemas, and the page that lists them."""
    made = {
        f"schemas/{name}.json": document(f"moediag {name}", *one) for name, one in found.items()
    }
    rows = ((f"[{name}](schemas/{name}.json)", text) for name, (text, _) in found.items())
    page = _page(
        "# JSON", "", _MADE, "",
        "A JSON Schema (draft 2020-12) of every JSON that moediag prints or keeps. It requires the "
        "fields that this release writes. Later releases may add fields; with the same "
        "`schema_version` none changes its meaning or disappears. "
        "[result.json](result.md) explains the most important one.",
        "", *table(("schema", "what has this form"), rows),
    )  # fmt: skip
    return {"json.md": page, **{k: json.dumps(v, indent=1) + "\n" for k, v in made.items()}}


def verdicts_page(detectors: Sequence[Detector]) -> str:
    """The page about verdicts, with these detectors."""
    rows = (
        (str(n), f"`{d.verdict}`", "a [law](laws.md)" if "/laws/" in d.file else d.finds, _file(d))
        for n, d in enumerate(detectors, start=1)
    )
    means = ((f"`{v}`", text, NEXT_STEPS[v]) for v, text in MEANINGS.items())
    return _page(
        "# Verdicts", "", _MADE, "", "`moediag explain WORD` prints a verdict with its detectors.",
        "", "## What a verdict means", "", *table(("verdict", "meaning", "next step"), means),
        "", "## The order", "",
        "moediag asks the detectors in this order. The first that finds something decides the "
        "verdict.",
        "", *table(("", "verdict", "what the detector finds", "detector"), rows),
        "", "## Confidence", "",
        *table(("confidence", "meaning"), ((str(c), text) for c, text in CONFIDENCE.items())),
        "", "## Signature", "", SIGNATURE,
    )  # fmt: skip


def _commands(found: Iterable[Command]) -> str:
    lines = [
        "# Commands", "", _MADE, "",
        "`--help` after a command prints the same text. `moediag --version` prints the version. "
        "`--debug`, anywhere in a command line, shows the traceback of an error. The exit codes "
        "are on [a page of their own](exit-codes.md).",
    ]  # fmt: skip
    commands = list(found)
    options = [p for command in commands for p in command.parameters if not p.is_argument]
    seen = Counter(map(_row, options))
    shared = {row for row, count in seen.items() if count >= _SHARED}
    lines += ["", "## Options of several commands", "", *table(_OPTIONS, sorted(shared))]
    for command in commands:
        lines += ["", f"## {command.path}", "", *_paragraphs(command.help)]
        lines += ["", "```console", f"$ {command.example}", "```"]
        rows = [row for row in map(_row, command.parameters) if row not in shared]
        also = [f"`{p.names[0]}`" for p in command.parameters if _row(p) in shared]
        lines += ["", *table(_OPTIONS, rows)] * bool(rows)
        lines += ["", f"Also {', '.join(also)}."] * bool(also)
    return _page(*lines)


def _row(parameter: Parameter) -> tuple[str, str]:
    return f"`{option_entries.usage(parameter)}`", _meaning(parameter)


def _meaning(parameter: Parameter) -> str:
    text = option_entries.with_default(parameter)
    return f"{text} Required." if parameter.required and not parameter.is_argument else text


def _exit_codes(entries: Iterable[Entry]) -> str:
    rows = ((entry.word, entry.paragraphs[0]) for entry in entries)
    return _page("# Exit codes", "", _MADE, "", *table(("code", "meaning"), rows))


def _laws(rows: Iterable[tuple[str, str, str, str]]) -> str:
    return _page(
        "# Laws", "", _MADE, "",
        "With `--laws`, `moediag watch` checks what must hold in any healthy job. A broken law "
        "ends in exit code 1, what is suspicious only with `--strict`. Where a healthy program may "
        "do what a broken law is about, the page has it as suspicious or as a note. "
        "[Laws: silent errors in your own job](../howto/laws.md) has the conditions.",
        "", *table(("law", "level", "verdict", "what is found"), rows),
    )  # fmt: skip


def _scenarios(entries: Iterable[Entry]) -> str:
    rows = (
        (
            f"[{entry.word}]({_ROOT}/scenarios/{entry.word}.yaml)",
            entry.paragraphs[0],
            entry.rows[0][1].partition(":")[0],
            ", ".join(f"[{_cited(address)}]({address})" for address in entry.sources),
        )
        for entry in entries
    )
    return _page(
        "# Scenarios", "", _MADE, "",
        "`moediag show NAME` prints a scenario in full: its model and releases, and the verdict of "
        "each variant. `moediag run NAME` runs it and compares.",
        "", *table(("scenario", "failure", "verdict of its first variant", "reports"), rows),
    )  # fmt: skip


def _cited(address: str) -> str:
    """``torchtitan 811`` for an issue or a pull request, else the host of the address."""
    parts = address.split("/")
    return f"{parts[4]} {parts[6]}" if len(parts) > 6 and parts[6].isdigit() else parts[2]


def _result(found: Iterable[Record]) -> str:
    lines = [
        "# result.json", "", _MADE, "",
        "`--json` prints this object, and every run directory has it as `result.json`; "
        "[its JSON Schema](schemas/result.json) is one of [several](json.md). "
        "`schema_version` is 1: fields may be added, and none changes its meaning or disappears. "
        "In `trials` the fields of the diagnosis are beside those of the trial. The types are "
        "Python's: a tuple is a list, and None is null.",
    ]  # fmt: skip
    for record in found:
        rows = ((f"`{f.name}`", f"`{f.type}`", f.meaning) for f in record.fields)
        lines += ["", f"## {record.name}", "", record.meaning, ""]
        lines += table(("field", "type", "meaning"), rows)
    return _page(*lines)


def _paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a help text, each on one line, with blank lines between."""
    for number, paragraph in enumerate(text.strip().split("\n\n")):
        if number:
            yield ""
        yield " ".join(paragraph.split())


def _page(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def _file(detector: Detector) -> str:
    """``[crash](../../moediag/…/failed/crash.py)``."""
    return f"[{detector.name}]({_ROOT}/{detector.file})"
