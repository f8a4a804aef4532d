"""Entries of the options, read from the command line's own declaration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from moediag.records import dataclass
from moediag.reference.word_entry import Entry


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument or an option of one command."""

    names: tuple[str, ...]
    """``--variant``, ``-v``; of an argument what the usage line has."""
    metavar: str
    """What its value looks like; empty for a switch."""
    meaning: str
    default: str
    """Empty where there is none."""
    is_argument: bool
    required: bool


@dataclass(frozen=True, slots=True)
class Command:
    """One command of the command line."""

    path: str
    """``moediag stacks build``."""
    help: str
    example: str
    parameters: tuple[Parameter, ...]


def commands(group: Any, path: str = "moediag") -> Iterator[Command]:
    """Yields every command below the command line's group, in the order of the help."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
            continue
        yield Command(
            f"{path} {name}",
            command.help or "",
            str(command.epilog or "").removeprefix("Example: "),
            tuple(_parameter(p) for p in command.params if p.name != "help"),
        )


def options(group: Any) -> list[Entry]:
    """One entry for each option, with every meaning that it has."""
    uses: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for command in commands(group):
        for parameter in command.parameters:
            for name in () if parameter.is_argument else parameter.names:
                uses[name][with_default(parameter)].append(command.path)
    return [_entry(option, meanings) for option, meanings in sorted(uses.items())]


def names(group: Any) -> list[Entry]:
    """One entry for each command."""
    return [
        Entry("command", one.path.removeprefix("moediag "), tuple(one.help.split("\n\n")),
              commands=(one.example, f"{one.path} --help"))
        for one in commands(group)
    ]  # fmt: skip


def with_default(parameter: Parameter) -> str:
    """The meaning, with the default unless the text has it already."""
    if not parameter.default or "[default:" in parameter.meaning:
        return parameter.meaning
    return f"{parameter.meaning}  [default: {parameter.default}]"


def usage(parameter: Parameter) -> str:
    """``--variant, -v NAME``."""
    names = ", ".join(parameter.names)
    return f"{names} {parameter.metavar}" if parameter.metavar else names


def _entry(option: str, meanings: dict[str, list[str]]) -> Entry:
    if len(meanings) == 1:
        ((text, paths),) = meanings.items()
        return Entry("option", option, (text, f"An option of {', '.join(paths)}."))
    rows = tuple((", ".join(paths), text) for text, paths in meanings.items())
    return Entry("option", option, (), rows, "Its meaning depends on the command")


def _parameter(found: Any) -> Parameter:
    is_argument = found.param_type_name == "argument"
    metavar = str(found.metavar or "")
    names = (metavar,) if is_argument else (*found.opts, *found.secondary_opts)
    return Parameter(
        names=tuple(sorted(names, key=lambda name: not name.startswith("--"))),
        metavar="" if is_argument else metavar,
        meaning=found.help or "",
        default=_default(found.default),
        is_argument=is_argument,
        required=bool(found.required),
    )


def _default(value: Any) -> str:
    """A default as one types it; empty for a switch, a list and an empty text."""
    value = getattr(value, "value", value)  # of an enumeration
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)
