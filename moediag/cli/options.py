"""The command line's options: one definition each, shared by all commands."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from moediag import arguments, extension
from moediag.errors import UsageError


def _packages(incomplete: str) -> list[str]:
    found: list[str] = extension.provided("packages")(incomplete)
    return found


Pid = Annotated[
    int | None,
    typer.Argument(
        metavar="[PID]",
        help="A process of the job: its launcher or a rank.  [default: your only job here]",
    ),
]
TakenAt = Annotated[
    str,
    typer.Option(
        "--taken-at",
        metavar="TIME",
        help="Time when the dumps of another job were written: 2025-01-31T12:00:00, seconds since "
        "1970, or timeout if NCCL's watchdog wrote them.",
    ),
]
StackPairs = Annotated[
    list[str],
    typer.Option(
        "--stack",
        metavar="PACKAGE=VERSION",
        help="Run on this release; repeatable.",
        autocompletion=_packages,
    ),
]
Silence = Annotated[
    float,
    typer.Option(
        "--silence",
        min=2.0,
        metavar="S",
        help="Treat a node as silent after this many seconds without a heartbeat.",
    ),
]
Notify = Annotated[
    str | None,
    typer.Option(
        "--notify",
        metavar="URL",
        envvar="MOEDIAG_NOTIFY",
        show_envvar=True,
        help="Send a few lines about each new failure to this webhook: Slack, Discord, Teams or "
        "plain JSON; other services with apprise.",
    ),
]
Quiescence = Annotated[
    float,
    typer.Option(
        "--quiescence",
        min=0.5,
        metavar="S",
        help="Report a hang after this many seconds without progress or CPU use.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Write to this run directory.  [default: a new one in moediag-runs]",
    ),
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page without scripts.")
]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Write the page as markdown.")
]
Junit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML, for CI.")
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write a trace of all ranks for Perfetto."),
]
Details = Annotated[
    bool,
    typer.Option("--details", help="Show schedules and stacks even if the source shows the cause."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
NoColor = Annotated[
    bool, typer.Option("--no-color", help="Print without colours, as with NO_COLOR=1.")
]


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
