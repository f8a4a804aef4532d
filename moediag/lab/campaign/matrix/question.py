"""The question of a matrix: scenarios with families, and releases."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from moediag.errors import UsageError
from moediag.lab.campaign.bisect import question as bisecting
from moediag.lab.campaign.bisect.candidates import searched, spelled
from moediag.lab.campaign.bisect.question import Asked, Question
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.signature_match import Match, Target
from moediag.lab.campaign.engine import Header
from moediag.lab.campaign.matrix.cells import Key
from moediag.lab.families import FAMILIES
from moediag.lab.scenario import catalogue
from moediag.lab.scenario import load as loading
from moediag.lab.scenario.schema import Scenario
from moediag.lab.stacks import releases as index
from moediag.lab.stacks.base import cache_root, current_base
from moediag.lab.stacks.releases import Release
from moediag.records import dataclass

OLDEST = {"transformers": "4.51.0"}  # the first row; other packages: two years before the newest
ALL = "all"  # in place of a family: all families
_FAMILY = "model.family="


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command line. ``releases``: "" or empty for the newest patch of each minor between
    ``oldest`` and ``newest`` ("": :data:`OLDEST`, the newest available)."""

    names: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    package: str = "transformers"
    releases: tuple[str, ...] = ()
    oldest: str = ""
    newest: str = ""
    asked: Asked = field(default_factory=Asked)


@dataclass(frozen=True, slots=True)
class Subject:
    """A scenario with one model family. ``question``: that of a bisect over all releases, with the
    unfixed variant and its controls; ``digest``: of what would run."""

    key: str
    question: Question
    digest: str

    @property
    def family(self) -> str:
        return self.merged.model.family

    @property
    def merged(self) -> Scenario:
        return self.question.scenario.merged(self.question.variant)

    @property
    def looked_for(self) -> tuple[str, ...]:
        """Returns the declared failures in words: verdicts, with the pattern if one is declared."""
        pattern = f":{self.question.pattern}" if self.question.pattern else ""
        return tuple(f"{verdict}{pattern}" for verdict in sorted(self.target.failures))

    @property
    def target(self) -> Target:
        """Returns any verdict that the scenario declares. A declared intermittent failure gets as
        many trials as a failure rate of one half needs."""
        own = self.question.scenario.variants[self.question.variant]
        rate = Rate(1, 2) if own.repeats > 1 else Rate()
        return Target(self.question.variant, self.question.declared, (), Match.ANY, rate)


@dataclass(frozen=True, slots=True)
class MatrixQuestion:
    """``versions``: requested ones, oldest first; ``listed``: all releases between them."""

    package: str
    subjects: tuple[Subject, ...]
    versions: tuple[str, ...]
    listed: tuple[str, ...]
    asked: Asked

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(subject.key for subject in self.subjects)

    @property
    def cells(self) -> tuple[Key, ...]:
        """Returns all of them, release by release, so that each is imported once."""
        return tuple((key, version) for version in self.versions for key in self.keys)

    def header(self, command: Sequence[str]) -> Header:
        """Returns the header of what defines a cell. Scenarios and families are in the cells, so
        that a later command can add more of them in the same folder."""
        asked = self.asked
        base = current_base(cache_root())
        return Header(
            "matrix",
            {
                "package": self.package,
                "Python": asked.python or base.python,
                "platform": f"{sys.platform}-{platform.machine()}",
                "torch": base.torch,
                "hold": dict(sorted(asked.hold.items())),
                "ranks": asked.world_size,
                "device": asked.device,
                "launcher": asked.launcher,
                "timeout": asked.timeout,
            },
            {subject.key: subject.digest for subject in self.subjects},
            command=tuple(command),
        )


def ask(wanted: Wanted) -> MatrixQuestion:
    """Returns the question of a command line. Queries the index. Raises UsageError, ScenarioError,
    NoSuchRelease and what :mod:`moediag.lab.stacks.releases` raises."""
    package = str(canonicalize_name(wanted.package))
    listed = _listed(package, wanted)
    versions = _versions(package, wanted, listed)
    low, high = Version(versions[0]), Version(versions[-1])
    between = tuple(r for r in listed if low <= Version(r.version) <= high)
    overrides, families = _families(wanted)
    subjects = []
    for name in dict.fromkeys(wanted.names):
        for family in families or [""]:
            extra = [f"{_FAMILY}{family}"] if family else []
            scenario = loading.load(catalogue.find(name), [*overrides, *extra])
            subjects.append(_subject(scenario, wanted, package, between))
    return MatrixQuestion(
        package,
        tuple(subjects),
        versions,
        tuple(r.version for r in between),
        wanted.asked,
    )


def _families(wanted: Wanted) -> tuple[list[str], list[str]]:
    """Returns (overrides without the family's, families)."""
    given = [t[len(_FAMILY) :] for t in wanted.overrides if t.startswith(_FAMILY)]
    others = [t for t in wanted.overrides if not t.startswith(_FAMILY)]
    families = [*given, *wanted.families]
    if ALL in families:
        return others, list(FAMILIES)
    return others, list(dict.fromkeys(families))


def _subject(
    scenario: Scenario, wanted: Wanted, package: str, releases: Sequence[Release]
) -> Subject:
    newest = releases[-1].version
    asked = dataclasses.replace(wanted.asked, package=package, bad=newest, oldest=newest)
    question = bisecting.ask(scenario, asked)
    question = dataclasses.replace(question, releases=tuple(releases))
    text = question.scenario.identity() + repr((question.variant, sorted(question.pins.items())))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    family = question.scenario.merged(question.variant).model.family
    return Subject(f"{scenario.name} {family}", question, digest)


# ------------------------------------------------------------------------ releases


def _listed(package: str, wanted: Wanted) -> list[Release]:
    """Returns all final releases that may be in the table, oldest first, for the Python in use; a
    withdrawn one only if it was requested by name."""
    python = wanted.asked.python or current_base(cache_root()).python
    found = [r for r in index.releases(package) if index.supports(r, python)]
    named = {spelled(package, version, found) for version in wanted.releases}
    final = [
        r for r in found if Version(r.version).public in named or not (r.yanked or r.prerelease)
    ]
    if not final:
        raise UsageError(f"no release of {package} runs on Python {python}", "Try --python X.Y.")
    newest = Version(final[-1].version).public
    floor = _floor(package, wanted, final)
    return searched(package, final, newest, None, floor, pre=True, yanked=True)


def _floor(package: str, wanted: Wanted, final: Sequence[Release]) -> str:
    """Returns the first release of the table; "" for as far back as a bisect searches."""
    text = wanted.oldest or OLDEST.get(package, "")
    low = min(map(_version, wanted.releases)) if wanted.releases else _version(text or "0")
    if not wanted.releases and not text:
        return ""
    return next((r.version for r in final if Version(r.version) >= low), final[-1].version)


def _versions(package: str, wanted: Wanted, listed: Sequence[Release]) -> tuple[str, ...]:
    if wanted.releases:
        if wanted.oldest or wanted.newest:
            raise UsageError("--releases names them all: leave --from and --to away")
        named = {spelled(package, version, listed) for version in wanted.releases}
        return tuple(r.version for r in listed if r.version in named)
    low = _version(wanted.oldest) if wanted.oldest else None
    high = _version(wanted.newest) if wanted.newest else None
    inside = [
        r.version
        for r in listed
        if (low is None or Version(r.version) >= low)
        and (high is None or Version(r.version) <= high or _minor(r.version) == high.release)
    ]
    if not inside:
        raise UsageError(
            f"no release of {package} between {wanted.oldest or 'the oldest'} and "
            f"{wanted.newest or 'the newest'}",
            f"There are {listed[0].version} to {listed[-1].version}.",
        )
    return newest_patches(inside)


def newest_patches(versions: Sequence[str]) -> tuple[str, ...]:
    """Returns the last of each minor. ``versions``: oldest first."""
    by_minor: Mapping[tuple[int, ...], str] = {_minor(v): v for v in versions}
    return tuple(by_minor.values())


def _minor(version: str) -> tuple[int, ...]:
    found = Version(version)
    return found.major, found.minor


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(
            f"{text!r} is not a version", "For example: --from 4.51 --to 5.23"
        ) from None
