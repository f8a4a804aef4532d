"""The question of a hunt: a release, families and relations."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from packaging.version import Version

from moediag.errors import NoSuchRelease, UsageError
from moediag.lab.campaign.engine import Header
from moediag.lab.stacks import releases as index
from moediag.lab.stacks.environment import Stack
from moediag.protocol import ListedFamily, ReleaseListing
from moediag.records import dataclass

KINDS = ("moe", "dense", "multimodal")
ALL = "all"
NEWEST = "newest"
PREVIOUS = "previous"
PACKAGE = "transformers"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command line. ``families``: names, kinds or ``all``; ``relations``: names, empty for
    all."""

    release: str = NEWEST
    families: tuple[str, ...] = (KINDS[0],)
    relations: tuple[str, ...] = ()
    stack: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 120.0
    """Seconds for one relation on one family."""
    at_once: int = 1
    """Cells that run at the same time."""
    minutes: float | None = None
    """No cell begins after this; None: no limit."""
    against: str = ""
    """The release to compare with, or ``previous``; "": none."""
    pursue: bool = False
    """Whether each new finding is pursued."""

    def request(self, release: str) -> dict[str, str]:
        """Returns what the environment of this release must have. Raises UsageError."""
        if PACKAGE in self.stack:
            raise UsageError(f"--stack {PACKAGE}=…: give it with --release")
        return {PACKAGE: "" if release == NEWEST else release, **self.stack}


def previous(version: str, python: str) -> str:
    """Returns the last final release before ``version``. Queries the index; raises StackError."""
    for release in reversed(index.releases(PACKAGE)):
        usable = not release.yanked and not release.prerelease and index.supports(release, python)
        if usable and Version(release.version) < Version(version):
            return Version(release.version).public
    raise NoSuchRelease(f"no release of {PACKAGE} is older than {version}")


def header(wanted: Wanted, stacks: Sequence[Stack], command: Sequence[str]) -> Header:
    """Returns the header of what defines a cell. Families and relations are in the cells, so that a
    later command can add more of them in the same folder. Raises UsageError if a release is to be
    compared with itself."""
    versions = [
        {name: version for name, version in sorted(stack.versions.items()) if version is not None}
        for stack in stacks
    ]
    if versions[0] in versions[1:]:
        raise UsageError(f"--against {wanted.against}: it is the release that is checked")
    question = {
        "stack": versions[0],
        **({"against": versions[1]} if versions[1:] else {}),
        "platform": f"{sys.platform}-{platform.machine()}",
        "timeout": wanted.timeout,
    }
    return Header("hunt", question, command=tuple(command))


def chosen_families(wanted: Wanted, listing: ReleaseListing) -> tuple[ListedFamily, ...]:
    """Returns the families to check, in the order of their names. Raises UsageError for a name that
    the release lacks."""
    known = {family.name: family for family in listing.families}
    names: set[str] = set()
    for word in wanted.families:
        if word == ALL or word in KINDS:
            names |= {f.name for f in listing.families if word in (ALL, f.kind) and not f.same_as}
        elif word in known:
            names.add(word if known[word].own_config else known[word].same_as or word)
        else:
            raise UsageError(
                f"--family {word}: the release has no such model type",
                f"Kinds: {', '.join(KINDS)}, {ALL}. A name is a model_type, such as qwen3_moe.",
            )
    return tuple(known[name] for name in sorted(names))


def resolutions(wanted: Wanted, listing: ReleaseListing) -> Iterator[str]:
    """Yields what a family's name stands for if another family has its model class, and which
    families of a kind are left out for that reason."""
    for family in listing.families:
        if family.name in wanted.families and family.same_as:
            if family.own_config:
                yield (
                    f"{family.name} has the model class of {family.same_as} and is built with its "
                    "own configuration"
                )
            else:
                yield (
                    f"{family.name} is checked as {family.same_as}, the part of its configuration "
                    "that its model class takes"
                )
    left = [
        f"{family.name} ({family.same_as})"
        for family in listing.families
        if family.own_config and {ALL, family.kind} & set(wanted.families)
        and family.name not in wanted.families
    ]  # fmt: skip
    if left:
        yield (
            f"not checked, because another family has the model class: {', '.join(left)}; give "
            "their names to check them"
        )


def families_of_each(
    wanted: Wanted, listings: Sequence[ReleaseListing]
) -> list[tuple[ListedFamily, ...]]:
    """Returns the families to check on each release: what is chosen on any of them, where it
    exists. Raises UsageError for a name that none of them has."""
    chosen = []
    for listing in listings:
        names = {family.name for family in listing.families}
        others = {family.name for other in listings for family in other.families}
        asked = tuple(w for w in wanted.families if w in names or w not in others)
        chosen.append(chosen_families(dataclasses.replace(wanted, families=asked), listing))
    every = {family.name for families in chosen for family in families}
    known = [{family.name: family for family in listing.families} for listing in listings]
    return [tuple(of[name] for name in sorted(every & of.keys())) for of in known]


def chosen_relations(wanted: Wanted, listing: ReleaseListing) -> tuple[str, ...]:
    """Returns the relations to check, in their order. Raises UsageError for an unknown name."""
    for name in wanted.relations:
        if name not in listing.relations:
            raise UsageError(
                f"--relation {name}: there is no such relation",
                f"There are {', '.join(listing.relations)}.",
            )
    return tuple(n for n in listing.relations if n in (wanted.relations or listing.relations))
