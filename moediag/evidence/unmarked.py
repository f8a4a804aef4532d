"""What a log says without telling of which rank: exceptions, and lines that nothing understands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moediag.evidence import console_output, exits, tracebacks
from moediag.evidence.model import RankError, Report

_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_HANDLED = "handled"
_ELASTIC = "User process failed with error data:"
_FEW = 4  # lines or errors of one log that are told
_TOLD = 300  # characters of a line or an exception
# What a line may talk of that nothing understands.
_TALKS = re.compile(
    r"\btimed[ -]?out\b|\btime[ -]?out\b(?!\s*[=:\w(\"'])|\btimeout (?:for|task|after)\b|"
    r"\bwatchdog timeout\b|\bhung\b|\bare hanging\b|\bhang (?:in|on|detected)\b|"
    r"\babort(?:ed|ing)\b|\bdeadlock|\bis stuck\b|\bstall(?:ed|s)\b|"
    r"\bunresponsive\b|\bnot respond|\bunhealthy\b|\bheartbeats?\b|\bterminating\b|"
    r"\brank[ :=_]{1,2}\d", re.IGNORECASE,
)  # fmt: skip


def errors(text: str) -> list[RankError]:
    """The different exceptions in the output of several processes, without those that another one
    was raised from. Training went on behind those that have _HANDLED in ``after``."""
    parts = text.split(tracebacks.BEGINS)
    found = {(error.type, error.message): error for error in _of_elastic(text)}
    for at, part in enumerate(parts[1:] or parts):
        if at + 2 < len(parts) and part.rstrip().endswith(_CHAINED):
            continue
        error = exits.error_in_excerpt(tracebacks.BEGINS + part if parts[1:] else part)
        if error is not None:
            error = replace(error, after=_HANDLED) if exits.went_on(part) else error
            found.setdefault((error.type, error.message), error)
    return list(found.values())[:_FEW]


def _of_elastic(text: str) -> Iterator[RankError]:
    """The errors that the handler of torch's elastic agent logs as JSON."""
    for part in text.split(_ELASTIC)[1:]:
        try:
            raw, _ = json.JSONDecoder().raw_decode(part.lstrip())
        except ValueError:
            continue
        if (error := exits.elastic_error(raw)) is not None:
            yield error


def quoted(path: Path, text: str) -> list[Report]:
    """Lines that talk of a timeout, an abort or a rank, after the last progress of the program."""
    found: list[Report] = []
    whole = path.stat().st_size <= console_output.HEAD_BYTES + console_output.TAIL_BYTES
    for number, line in enumerate(text.splitlines(), start=1):
        if exits.goes_on(line):
            found.clear()
        elif _TALKS.search(line[:2000]):
            said = " ".join(line.split())[:_TOLD]
            where = f"line {number} of {path.name}" if whole else path.name
            found.append(Report("quoted", text=f'{where} says: "{said}"'))
    return found[:1] + found[1:][-_FEW:]


def report(error: RankError) -> Report:
    """An exception of which the log does not tell the rank."""
    where = f" at {error.where}" if error.where else ""
    said = f"{error.type}{where}: {' '.join(error.message.split())}".rstrip(": ")
    said = said[:_TOLD].rstrip(".")
    if error.after == _HANDLED:
        return Report("handled", text=f"{said}; training continues after it in the log")
    return Report("lost" if console_output.of_a_library(error) else "error", text=said)
