"""The page of settings and environment variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from docs.generate.page_tables import table
from moediag.configuration import FILE, PROJECT, SETTINGS
from moediag.reference.option_entries import Command, with_default

# Variables that a user sets, and what reads them.
VARIABLES = {
    "NO_COLOR": "Any value: print without colours, as `--no-color`.",
    "COLUMNS": "Width of pages and help texts, if it is not that of the terminal.",
    "MOEDIAG_CACHE": "Folder of built environments and references. Default: moediag in the user's "
    "cache folder.",
    "MOEDIAG_BASE_PYTHON": "The Python below built environments. Default: the one that runs "
    "moediag.",
    "MOEDIAG_INSTALLED": "`1`: run scenarios on the installed releases and build nothing; `first`: "
    "build only what is not installed.",
    "MOEDIAG_WHEELS": "Folder of wheels to build from, without a network.",
    "MOEDIAG_NOTIFY": "The URL of `--notify`, which is a secret.",
    "MOEDIAG_GUARD": "`1` in the environment of ranks: compare parameters before each FSDP2 "
    "reduction.",
    "MOEDIAG_GUARD_TIMEOUT": "Seconds after which the guard reports a missing rank.",
}
# Variables that the command of `--on-hang` gets.
OF_COMMAND = {
    "MOEDIAG_RUN": "The run directory.",
    "MOEDIAG_VERDICT": "The verdict.",
    "MOEDIAG_CULPRITS": "Ranks, separated by commas.",
    "MOEDIAG_CAUSE": "The cause in a sentence.",
    "MOEDIAG_JOB_PID": "Process of the launcher.",
}


def lines(commands: Iterable[Command]) -> Iterator[str]:
    """Yields the page without its title."""
    yield from (
        "A setting is an option that applies to every command that has it. The first of these "
        "decides:",
        "",
        "1. the option on the command line,",
        "2. the environment variable `MOEDIAG_COMMAND_SETTING`: `MOEDIAG_WATCH_ON_HANG=abort`, "
        "`MOEDIAG_WATCH_LAWS=0`,",
        f"3. `{FILE}`, or the table `[tool.moediag]` of `{PROJECT}`, in the working directory or "
        "the nearest folder above it that has one,",
        "4. the default.",
        "",
        "```toml",
        "[tool.moediag]",
        "patience = 60",
        "laws = true",
        "",
        "[tool.moediag.watch]     # for one command",
        'on-hang = "abort"',
        "```",
        "",
        f"`{FILE}` has the same settings without `tool.moediag`. A mistake ends the command with "
        "exit code 2 and names file, line and field. The pytest plugin runs `moediag watch`, so "
        "they apply to its tests. The functions of the module `moediag` do not read them.",
        "",
        "## Settings",
        "",
    )
    yield from table(("setting", "commands", "meaning"), _settings(list(commands)))
    yield from ("", "## Environment variables", "", *_variables(VARIABLES))
    yield from ("", "## Variables of the command of --on-hang", "", *_variables(OF_COMMAND))


def _variables(found: Mapping[str, str]) -> Iterator[str]:
    return table(("variable", "meaning"), ((f"`{name}`", text) for name, text in found.items()))


def _settings(commands: Sequence[Command]) -> Iterator[tuple[str, str, str]]:
    for name in SETTINGS:
        uses: dict[str, list[str]] = {}
        for command in commands:
            for parameter in command.parameters:
                if f"--{name}" in parameter.names:
                    short = command.path.removeprefix("moediag ")
                    uses.setdefault(with_default(parameter), []).append(short)
        for meaning, paths in uses.items():
            yield f"`{name}`", ", ".join(paths), meaning
