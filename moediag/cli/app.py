"""The `moediag` command: one function per command parses, calls and chooses the exit code.

No heavy imports here: `moediag --help` must not wait for libraries that it does not use, so each
command imports what it needs.
"""

from __future__ import annotations

import errno
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import moediag
from moediag import configuration, extension
from moediag.cli import is_interruption, tab_completion
from moediag.cli import options as o
from moediag.configuration import Configuration
from moediag.errors import (
    ExitCode,
    MachineError,
    MoediagError,
    UsageError,
    disk_trouble,
    says_disk_full,
)
from moediag.extension import Command
from moediag.launch import signals
from moediag.report import stderr, stdout

HELP = """Find out why a distributed training job hangs or computes wrong numbers, and name the rank
and the line; reproduce such failures, and find the release that has them.

Exit codes: 0 every expectation met, 1 an expectation not met (diagnose, watch, verify, resume: a
failure found), 2 wrong usage, 3 inconclusive, 4 this machine cannot run it, 5 a bug in moediag, 130
interrupted.
"""

# What `moediag` alone prints: it fits a terminal of 80x24, which the list of commands does not.
START = """\
Find out why a distributed training job hangs or computes wrong numbers.

  it hangs now            moediag attach
  it hangs again          moediag watch -- torchrun --nproc-per-node 8 train.py
  are its numbers right?  moediag verify -- torchrun --nproc-per-node 8 train.py
  I have dumps or logs    moediag diagnose dumps/ train.log
  is my layout safe?      moediag check ./Qwen3-30B-A3B --layout dp_shard=64
  known failures          moediag list

All commands: moediag --help
A word, an option or an exit code: moediag explain WORD"""

GIT_ABORTS = 128  # added to an error's exit code under --git-bisect
_MAKE_ROOM = (
    "Make room (`moediag stacks clean`, old folders in moediag-runs), or use --out on another disk."
)

_MAY_NOT_WRITE = (
    "Give folders that moediag may write: MOEDIAG_CACHE for environments, --out for results. "
    "`moediag doctor` checks them."
)
_NO_FILE = Configuration()
# The errors of the library that typer carries along under changing names.
_WRONG_USAGE = typer.BadParameter.__mro__[1]

MY_JOB, EVIDENCE, SETUP = "My job", "Evidence", "Setup"
_ORDER = (MY_JOB, EVIDENCE, "Releases", "Scenarios", SETUP)

COMMANDS = tuple(
    Command(section, name, f"moediag.cli.{place}:{name}", example)
    for section, name, place, example in (
        (MY_JOB, "attach", "attach", "attach 41237"),
        (MY_JOB, "top", "top", "top 41237"),
        (MY_JOB, "watch", "watch",
         "watch --on-hang abort -- torchrun --nproc-per-node 8 train.py"),
        (EVIDENCE, "diagnose", "diagnose",
         "diagnose moediag-runs/20250131-120000-expert-starvation"),
        (MY_JOB, "verify", "verify",
         "verify --reference 'python train.py' -- torchrun --nproc-per-node 8 train.py"),
        (MY_JOB, "resume", "resume", "resume --resumed 'python train.py --resume {dir}/ckpt.pt' "
         "-- python train.py --out {dir}"),
        (EVIDENCE, "report", "report",
         "report moediag-runs/* --html page.html --junit junit.xml"),
        (EVIDENCE, "explain", "explain_word", "explain collective-mismatch"),
        (SETUP, "doctor", "doctor", "doctor"),
        (SETUP, "env", "env", "env --stack transformers=4.53.2"),
        (SETUP, "completion", "tab_completion", "completion bash"),
    )
)  # fmt: skip


class _Sections(TyperGroup):
    """Lists the commands by section, and no summary is cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for known in (*COMMANDS, *extension.commands()):
            command = self.get_command(ctx, known.name)
            if command is not None:
                row = known.name, command.get_short_help_str(limit=200)
                sections.setdefault(known.section, []).append(row)
        for title in sorted(sections, key=_ORDER.index):
            with formatter.section(title):
                formatter.write_dl(sections[title])


def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out, wherever it stands
) -> None:
    if version:
        stdout.line(moediag.__version__)
    elif context.invoked_subcommand is None:
        stdout.line(START)
        raise typer.Exit(ExitCode.USAGE)


def whole() -> typer.Typer:
    """Returns the command line with all commands."""
    return _app((*COMMANDS, *extension.commands()))


def _app(commands: Iterable[Command]) -> typer.Typer:
    made = typer.Typer(
        help=HELP,
        epilog="Example: moediag watch -- torchrun --nproc-per-node 8 train.py",
        cls=_Sections,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: no import of rich, the same text everywhere
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    made.callback(invoke_without_command=True)(root)
    for command in commands:
        found = extension.imported(command.target)
        if isinstance(found, typer.Typer):
            made.add_typer(found, name=command.name)
            continue
        made.command(
            name=command.name,
            epilog=f"Example: moediag {command.example}",
            context_settings={"allow_interspersed_args": not command.runs_a_command},
        )(found)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    given, debug = _without_debug(given)
    code = _run(given, debug, arguments is None)
    # git bisect run reads any code from 1 to 124 as "bad": an error must stop it instead.
    errors = (ExitCode.USAGE, ExitCode.INCONCLUSIVE, ExitCode.CANNOT_RUN_HERE, ExitCode.BUG)
    return code + GIT_ABORTS if "--git-bisect" in given and code in errors else code


def _run(given: list[str], debug: bool, for_good: bool) -> int:
    """The only place that catches errors."""
    file = _NO_FILE
    try:
        with signals.as_interrupts(for_good=for_good):
            names = [command.name for command in (*COMMANDS, *extension.commands())]
            file = configuration.read(Path.cwd(), names)
            called = typer.main.get_command(_called(given))
            o.bound_numbers(called)
            code = called(
                args=given, prog_name="moediag", obj=tuple(given), standalone_mode=False,
                default_map=file.defaults(called),
            )  # fmt: skip
            if code == ExitCode.INTERRUPTED:  # what typer makes of Ctrl-C
                raise KeyboardInterrupt
            return code if isinstance(code, int) else ExitCode.OK
    except SystemExit as end:
        return _code(end)
    except (KeyboardInterrupt, typer.Abort):
        stderr.line("error: interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:
        if is_interruption(error):
            stderr.line("error: interrupted")
            return ExitCode.INTERRUPTED
        known = _known(error, file, given)
        if known is None:
            _apologise(error, debug)
            return ExitCode.BUG
        _explain(known, debug)
        return known.exit_code


def _called(given: Sequence[str]) -> typer.Typer:
    """Returns the command line with the called command alone; typer needs longer to set up all
    commands than to be imported. All of them for the help, to say which ones there are, and to
    explain their options, and to complete words in a shell. Raises MachineError for a command of
    the laboratory whose packages are not installed."""
    words = [argument for argument in given if not argument.startswith("-")][:1]
    if words == ["explain"] or tab_completion.asked():
        return whole()
    found = [command for command in COMMANDS if command.name in words]
    if not found and words:
        found = [command for command in extension.commands() if command.name in words]
        if found and not {"-h", "--help"} & set(given):
            extension.require(f"`moediag {words[0]}`")
    return _app(found) if found or "--version" in given else whole()


# How the parser says it, and how one says it.
_BETTER_WORDS = (
    (r"is not a valid float( range)?$", "is not a number"),
    (r"is not a valid int(eger)?( range)?$", "is not a whole number"),
    (r"requires an argument$", "needs a value"),
)


def _known(error: Any, file: Configuration, given: Sequence[str]) -> MoediagError | None:
    """Returns the error that a user can fix; None for a bug. ``file``: of the options' defaults."""
    if isinstance(error, MoediagError):
        option = error.message.partition(" ")[0]
        error.message = file.located(error.message, option, given[0] if given else "", given)
        return error
    if issubclass(type(error), _WRONG_USAGE):
        words = error.format_message().rstrip(".")
        for pattern, better in _BETTER_WORDS:
            words = re.sub(pattern, better, words)
        command = error.ctx.command_path if error.ctx is not None else "moediag"
        if command == "moediag" and given[:1] and given[0] in {one.name for one in COMMANDS}:
            command += f" {given[0]}"
        message = words[:1].lower() + words[1:]
        if error.ctx is not None and getattr(error, "param", None) is not None:
            option = max(error.param.opts, key=len)
            message = file.located(message, option, error.ctx.info_name, given)
        return UsageError(message, f"Type: {command} --help")
    if isinstance(error, MemoryError):
        return MachineError("not enough memory", "Type: ulimit -v   (it shows the shell's limit)")
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        if trouble := disk_trouble(error):
            reason = "" if says_disk_full(error) else f": {error.strerror}"
            return MachineError(f"{trouble}{reason}{where}", _MAKE_ROOM)
        if where and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return MachineError(f"{error.strerror}{where}", _MAY_NOT_WRITE)
    return None


def _without_debug(given: list[str]) -> tuple[list[str], bool]:
    """Removes --debug, which may be anywhere except in a command that follows ``--``."""
    end = given.index("--") if "--" in given else len(given)
    ours = [argument for argument in given[:end] if argument != "--debug"]
    return [*ours, *given[end:]], len(ours) < end


def _explain(error: MoediagError, debug: bool) -> None:
    if debug:
        _traceback()
    stderr.line(f"error: {error.message}")
    if error.help_text:
        stderr.line(error.help_text)


def _apologise(error: Exception, debug: bool) -> None:
    if debug:
        _traceback()
    stderr.line(f"error: a bug in moediag: {type(error).__name__}: {error}")
    more = "" if debug else " and what the same command prints with --debug"
    stderr.line(f"Please report it, with the output of `moediag env`{more}.")


def _traceback() -> None:
    import traceback

    traceback.print_exc(file=sys.stderr)


def _code(end: SystemExit) -> int:
    if end.code is None:
        return ExitCode.OK
    return end.code if isinstance(end.code, int) else ExitCode.USAGE
