"""What options mean, as text: ``--jobs, -j N: Run N items at once.``

An entry begins with its flags; a value has a metavar, a switch has none. A text may go on in the
next lines. The options of one command are described in its docstring, those that commands share in
a table of :mod:`moediag.cli.options`.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

F = TypeVar("F", bound=Callable[..., Any])
_ENTRY = re.compile(r"^(--[a-z][\w-]*)(?:, (-\w))?(?: (.+?))?: (.+)$")
_HEADING = "\n\nOptions:\n"


def options(text: str) -> dict[str, Any]:
    """Returns typer's declaration of each entry of ``text``, by flag. Raises ValueError for a line
    that is neither an entry nor the rest of one."""
    found: dict[str, Any] = {}
    for line in text.strip().splitlines():
        entry = _ENTRY.match(line)
        if entry is not None:
            flag, short, metavar, told = entry.groups()
            flags = [flag, short] if short else [flag]
            found[flag] = like(typer.Option(metavar=metavar, help=told), param_decls=flags)
        elif line.startswith(" ") and found:
            found[flag].help += f" {line.strip()}"
        else:
            raise ValueError(f"no option: {line!r}")
    return found


def like(option: Any, **fields: Any) -> Any:
    """Returns ``option`` with other ``fields``: a range, a completion."""
    made = copy.copy(option)
    vars(made).update(fields)
    return made


def with_options(command: F) -> F:
    """Gives each option of ``command`` its text, from below ``Options:`` in the docstring. Ranges
    and completions come from the parameter's annotation. Raises KeyError for an option that no
    parameter has."""
    head, _, text = inspect.cleandoc(command.__doc__ or "").partition(_HEADING)
    hints = get_type_hints(command, include_extras=True)
    for flag, option in options(text).items():
        name = flag[2:].replace("-", "_")
        name = name if name in hints else f"{name}_"  # a word of Python
        plain = hints[name]
        if get_origin(plain) is Annotated:
            plain, known = get_args(plain)
            more = {"metavar": option.metavar, "help": option.help}
            option = like(known, param_decls=option.param_decls, **more)
        command.__annotations__[name] = Annotated[plain, option]
    command.__doc__ = head
    return command
