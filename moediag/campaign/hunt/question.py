"""The question of a hunt: a release, families and relations."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moediag.campaign.engine import Header
from moediag.errors import UsageError
from moediag.protocol import ListedFamily, ReleaseListing
from moediag.stacks.environment import Stack

KINDS = ("moe", "dense", "multimodal")
ALL = "all"
NEWEST = "newest"
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

    @property
    def request(self) -> dict[str, str]:
        """Returns what the environment must have. Raises UsageError."""
        if PACKAGE in self.stack:
            raise UsageError(f"--stack {PACKAGE}=…: give it with --release")
        return {PACKAGE: "" if self.release == NEWEST else self.release, **self.stack}


def header(wanted: Wanted, stack: Stack, command: Sequence[str]) -> Header:
    """Returns the header of what defines a cell. Families and relations are in the cells, so that a
    later command can add more of them in the same folder."""
    versions = {name: version for name, version in stack.versions.items() if version is not None}
    question = {
        "stack": dict(sorted(versions.items())),
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
            names |= {f.name for f in listing.families if word in (ALL, f.kind)}
        elif word in known:
            names.add(known[word].same_as or word)
        else:
            raise UsageError(
                f"--family {word}: the release has no such model type",
                f"Kinds: {', '.join(KINDS)}, {ALL}. A name is a model_type, such as qwen3_moe.",
            )
    return tuple(known[name] for name in sorted(names) if not known[name].same_as)


def chosen_relations(wanted: Wanted, listing: ReleaseListing) -> tuple[str, ...]:
    """Returns the relations to check, in their order. Raises UsageError for an unknown name."""
    for name in wanted.relations:
        if name not in listing.relations:
            raise UsageError(
                f"--relation {name}: there is no such relation",
                f"There are {', '.join(listing.relations)}.",
            )
    return tuple(n for n in listing.relations if n in (wanted.relations or listing.relations))
