"""The command line's options: one definition each, shared by all commands."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from moediag import arguments, extension
from moediag.cli.option_texts import like, options
from moediag.cli.option_texts import with_options as with_options
from moediag.errors import UsageError


def _packages(incomplete: str) -> list[str]:
    found: list[str] = extension.provided("packages")(incomplete)
    return found


_SHARED = options("""
--taken-at TIME: Time when the dumps of another job were written: 2025-01-31T12:00:00, seconds since
    1970, or timeout if NCCL's watchdog wrote them.
--stack PACKAGE=VERSION: Run on this release; repeatable.
--silence S: Treat a node as silent after this many seconds without a heartbeat.
--notify URL: Send a few lines about each new failure to this webhook: Slack, Discord, Teams or
    plain JSON; other services with apprise.
--quiescence S: Report a hang after this many seconds without progress or CPU use.
--out DIR: Write to this run directory.  [default: a new one in moediag-runs]
--html FILE: Write an HTML page without scripts.
--markdown FILE: Write the page as markdown.
--junit FILE: Write JUnit XML, for CI.
--trace FILE: Write a trace of all ranks for Perfetto.
--details: Show schedules and stacks even if the source shows the cause.
--json: Print one JSON object on stdout, nothing else.
--debug: Show the traceback of an error.
--no-color: Print without colours, as with NO_COLOR=1.
""")

Pid = Annotated[
    int | None,
    typer.Argument(
        metavar="[PID]",
        help="A process of the job: its launcher or a rank.  [default: your only job here]",
    ),
]
TakenAt = Annotated[str, _SHARED["--taken-at"]]
StackPairs = Annotated[list[str], like(_SHARED["--stack"], autocompletion=_packages)]
Silence = Annotated[float, like(_SHARED["--silence"], min=2.0)]
Notify = Annotated[str | None, like(_SHARED["--notify"], envvar="MOEDIAG_NOTIFY", show_envvar=True)]
Quiescence = Annotated[float, like(_SHARED["--quiescence"], min=0.5)]
Out = Annotated[Path | None, _SHARED["--out"]]
Html = Annotated[Path | None, _SHARED["--html"]]
Markdown = Annotated[Path | None, _SHARED["--markdown"]]
Junit = Annotated[Path | None, _SHARED["--junit"]]
Trace = Annotated[Path | None, _SHARED["--trace"]]
Details = Annotated[bool, _SHARED["--details"]]
Json = Annotated[bool, _SHARED["--json"]]
Debug = Annotated[bool, _SHARED["--debug"]]
NoColor = Annotated[bool, _SHARED["--no-color"]]


def views(as_json: bool = False, **targets: Path | None) -> dict[str, Path]:
    """Returns the requested formats. Raises UsageError if two would go to stdout."""
    chosen = {kind: target for kind, target in targets.items() if target is not None}
    if as_json and Path("-") in chosen.values():
        raise UsageError("stdout can hold only one format", "Give files for the other formats.")
    return chosen


def pairs(texts: list[str], option: str) -> dict[str, str]:
    """Parses ``["transformers=4.53.2"]`` into a mapping. Raises UsageError."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.replace("==", "=").partition("=")
        name, value = name.strip(), value.strip()
        if not (name and equals and value):
            raise UsageError(
                f"{option} {text!r} is not of the form PACKAGE=VERSION",
                f"For example: {option} transformers=4.53.2",
            )
        if found.get(name, value) != value:
            raise UsageError(f"{option} names {name} twice: {found[name]} and {value}")
        found[name] = value
    return found


def bound_numbers(command: Any) -> None:
    """Makes each number of ``command`` refuse nan, inf and what no system call takes. typer's
    ranges refuse neither of them."""
    for parameter in command.params:
        if parameter.type.name.startswith(("float", "int")):
            parameter.callback = _bounded
    for one in getattr(command, "commands", {}).values():
        bound_numbers(one)


def _bounded(_: Any, parameter: Any, value: Any) -> Any:
    fractional = parameter.type.name.startswith("float")
    most = arguments.MOST_SECONDS if fractional else arguments.MOST_WHOLE
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if one is not None and not one <= most:
            raise typer.BadParameter(f"{one} is not in the range x<={most}.")
    return value


def moment(text: str) -> float | None:
    """The value of --taken-at in seconds since 1970: 0 for ``timeout``, None without one."""
    if text in ("", "timeout"):
        return 0.0 if text else None
    help_text = "Type 2025-01-31T12:00:00, seconds since 1970, or timeout."
    try:
        found = _seconds(text)
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"--taken-at {text}: not a time", help_text) from None
    arguments.moment(f"--taken-at {text}", found)
    return found


def _seconds(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    zoned = text.removesuffix("Z") + "+00:00" * text.endswith("Z")
    return datetime.fromisoformat(zoned).timestamp()
