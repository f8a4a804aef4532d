"""Finds the release that caused a new failure, between the last good night and this one."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from moediag.errors import Interrupted, MoediagError
from moediag.lab.campaign.engine import Clock, Display
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.executors import HERE, Choice, Maker
from moediag.lab.campaign.nightly.changes import Compared
from moediag.lab.campaign.nightly.night import Entry
from moediag.lab.campaign.nightly.tracks import PACKAGES
from moediag.records import dataclass
from moediag.result import Role, devices

if TYPE_CHECKING:
    from moediag.lab.campaign.bisect.prober import Prober
    from moediag.lab.campaign.nightly.jobs import Asked
    from moediag.launch.settings import LaunchOptions

LEAST = 30.0  # do not start a bisect with fewer seconds left


@dataclass(frozen=True, slots=True)
class Span:
    """The releases to search; ``why_not``: why there are none, else ""."""

    package: str = ""
    good: str = ""
    bad: str = ""
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Blame:
    """``said``: the result, or why nothing was searched; ``report``: markdown, "" without."""

    said: str
    report: str = ""
    command: str = ""


def span(compared: Compared) -> Span:
    """Returns the span to search: the moved package if it differs between the last good night and
    tonight, else the only one that differs. Pure."""
    entry, last = compared.entry, compared.last_good
    if last is None:
        return Span(why_not="no night before was good: where it began is not known")
    if entry.role != Role.UNFIXED:
        return Span(why_not=f"a {entry.role} began to fail; a bisect searches unfixed variants")
    if entry.verdict == "clean":
        return Span(why_not="the failure no longer shows: there is nothing to look for")
    differs = _different(last.entry, entry)
    moved = entry.track.partition("=")[0]
    package = moved if moved in differs else (differs[0] if len(differs) == 1 else "")
    if not package:
        why = f"several packages differ ({', '.join(differs)})" if differs else "no version differs"
        return Span(why_not=f"{why} between {_day(last.night)}, the last good night, and tonight")
    return Span(package, _public(last.entry.stack, package), _public(entry.stack, package))


def _different(one: Entry, other: Entry) -> list[str]:
    """Returns the packages that both have, in different releases."""
    names = dict.fromkeys((*PACKAGES, *one.stack))
    return [
        name for name in names
        if name != "python" and name in one.stack and name in other.stack
        and _public(one.stack, name) != _public(other.stack, name)
    ]  # fmt: skip


def _public(stack: Mapping[str, str], package: str) -> str:
    return stack[package].split("+")[0]


def _day(night: str) -> str:
    return night[:10]


def blame(
    compared: Compared, name: str, asked: Asked, folder: Path, seconds: float, display: Display,
    launch: LaunchOptions, executor: Choice = HERE,
) -> Blame:  # fmt: skip
    """Bisects for at most ``seconds``, in ``folder``. ``name``: of the scenario, as typed."""
    found = span(compared)
    if found.why_not:
        return Blame(f"Not bisected: {found.why_not}.")
    command = _command(found, compared.entry, name, asked)
    if seconds < LEAST:
        return Blame(f"Not bisected: no time was left. To do it: `{command}`", command=command)
    try:
        return _bisect(
            found, compared, name, asked, folder, seconds, display, launch, executor, command
        )
    except Interrupted:
        raise
    except MoediagError as error:
        return Blame(f"Not bisected: {error.message}", command=command)


def _bisect(
    found: Span, compared: Compared, name: str, asked: Asked, folder: Path, seconds: float,
    display: Display, launch: LaunchOptions, executor: Choice, command: str,
) -> Blame:  # fmt: skip
    from moediag.lab.campaign.bisect import answer_page, question, session
    from moediag.lab.campaign.bisect.probe import Releases
    from moediag.lab.scenario import catalogue
    from moediag.lab.scenario import load as loading
    from moediag.report import answer_views

    what = question.ask(
        loading.load(catalogue.find(name)),
        question.Asked(
            name=name, package=found.package, bad=found.bad, good=found.good,
            pre=Version(found.bad).is_prerelease, variant=compared.entry.variant,
            world_size=_ranks(compared.entry, asked), device=asked.device,
            launcher=asked.launcher, timeout=asked.timeout,
        ),
    )  # fmt: skip
    probers: list[Maker[Prober]] = []

    def started(prober: Maker[Prober]) -> None:
        probers.append(prober)
        if clock.up:  # before the bisect started
            stop()

    def stop() -> None:
        for one in probers:
            one.stop()

    words = tuple(shlex.split(command))
    with Clock(seconds, stop) as clock:
        try:
            begun = (folder / JOURNAL_FILE).exists()  # by the night being resumed
            report, _ = session.run(
                what, folder, begun, words, functools.partial(Releases, launch=launch), display,
                executor.at_once(1), executor=executor, begun=started,
            )  # fmt: skip
        except Interrupted as error:
            if not clock.up:
                raise
            said = f"The bisect did not end within {seconds / 60:.0f} min. {error.help_text}"
            return Blame(said, command=command)
    told = answer_page.sentences(report.package, report.releases, report.answer)
    return Blame(
        " ".join(told), answer_views.markdown(answer_page.answer(report), level=3), command
    )


def _ranks(entry: Entry, asked: Asked) -> int | None:
    """Returns the actual number of ranks: a scenario may need more than were requested."""
    words = shlex.split(entry.command)
    for option in ("--cpu", "--gpus"):
        if option in words:
            return int(words[words.index(option) + 1])
    return asked.world_size


def _command(found: Span, entry: Entry, name: str, asked: Asked) -> str:
    words = ["moediag", "bisect", name, "--package", found.package, "--good", found.good]
    words += ["--bad", found.bad, "--variant", entry.variant]
    words += devices.options(asked.device, _ranks(entry, asked) or 2)
    words += ["--pre"] if Version(found.bad).is_prerelease else []
    words += ["--launcher", asked.launcher] if asked.launcher != "auto" else []
    words += ["--timeout", str(asked.timeout)] if asked.timeout is not None else []
    return shlex.join(words)
