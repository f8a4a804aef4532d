"""Distinguishes a failure of the searched package from a failure of its companions.

Between two releases of a boundary their companions changed too: training libraries, and whatever
else ran in the trials. The four corners of {old, new} x {package, companions} show what is
sufficient. If the package alone is not, and only one companion changed, its own releases are
searched.

A corner is an environment with every package pinned. If that cannot be built (the new release
requires a newer dependency), only the training libraries are pinned, and their dependencies follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from packaging.version import Version

from moediag.errors import StackError
from moediag.lab.campaign.bisect.companions.companion_answer import CompanionAnswer
from moediag.lab.campaign.bisect.follow import Follow, settle
from moediag.lab.campaign.bisect.installed_source import installed
from moediag.lab.campaign.bisect.probe_verdict import ProbeVerdict
from moediag.lab.campaign.bisect.question import Setting
from moediag.lab.campaign.bisect.search.corners import (
    COMPANION_ONLY,
    NEW,
    OLD,
    PACKAGE_ONLY,
    Blame,
    Change,
    Corner,
    Corners,
    applied,
    changes,
)
from moediag.lab.campaign.bisect.search.search import Options, Probe, Search
from moediag.lab.stacks import environment
from moediag.lab.stacks import releases as index
from moediag.lab.stacks.environment import Stack
from moediag.records import dataclass

LIBRARIES = (
    "accelerate", "transformers", "torch", "trl", "peft", "torchtitan", "deepspeed",
)  # fmt: skip
_MOST = 24  # probes per search


@dataclass(frozen=True, slots=True)
class Sides:
    """The two releases of a boundary, the older first."""

    package: str
    old: str
    new: str
    turns: str  # the verdict of the newer one: "bad" or "good"
    requests: tuple[Mapping[str, str], Mapping[str, str]]  # their environments
    verdicts: tuple[ProbeVerdict, ProbeVerdict]  # one for each
    # files of which their trials ran a function, empty if unknown
    ran: tuple[frozenset[str], frozenset[str]]
    fixed: Mapping[str, str]  # what every request includes (a held companion, another Python)


def who_is_to_blame(sides: Sides, follow: Follow) -> CompanionAnswer:
    """Returns the answer; its ``problem`` says why there is none."""
    nothing = CompanionAnswer(sides.package, sides.old, sides.new, sides.turns)
    old, new = (environment.ready(request) for request in sides.requests)
    if old is None or new is None:
        gone = sides.old if old is None else sides.new
        problem = f"the environment of {sides.package} {gone} is not there any more"
        return dataclasses.replace(nothing, problem=problem)
    return _Blame(sides, (old, new), follow).answer()


class _Blame:
    def __init__(self, sides: Sides, stacks: tuple[Stack, Stack], follow: Follow) -> None:
        self.sides = sides
        self.stacks = stacks
        self.resolution = stacks[0].resolution
        self.follow = follow
        differ = {c.name: c for c in changes(self.resolution, stacks[1].resolution)}
        self.own = differ.pop(sides.package, Change(sides.package, sides.old, sides.new))
        known = [differ.pop(n) for n in LIBRARIES if n in differ]
        self.others = (*known, *(c for c in differ.values() if self._ran(c.name)))
        self.idle = tuple(c for c in differ.values() if c not in self.others)

    def _ran(self, name: str) -> bool:
        """Whether either side ran a function of the package, or that is unknown."""
        for stack, executed in zip(self.stacks, self.sides.ran, strict=True):
            if not executed:
                return True
            with contextlib.suppress(StackError):  # not installed on this side
                if not executed.isdisjoint(installed(stack.python, name).files):
                    return True
        return False

    def answer(self) -> CompanionAnswer:
        s = self.sides
        found = CompanionAnswer(s.package, s.old, s.new, s.turns, self.others, self.idle)
        if not self.others:
            return found
        before = self.follow.made
        self.follow.prepare([self._setting(PACKAGE_ONLY), self._setting(COMPANION_ONLY)])
        corners = settle(Corners(), self._corner, 4)
        assert corners is not None
        found = dataclasses.replace(found, corners=corners)
        if corners.blame in (Blame.COMPANION, Blame.EITHER, Blame.TOGETHER):
            with_package = corners.blame == Blame.TOGETHER
            found = dataclasses.replace(found, held=s.new if with_package else s.old)
            found = self._own_boundary(found, with_package)
        return dataclasses.replace(found, probes=self.follow.made - before)

    # -- corners ---------------------------------------------------------------------------

    def _corner(self, corner: Corner) -> ProbeVerdict:
        if corner in (OLD, NEW):
            return self.sides.verdicts[corner == NEW]
        return self._probe(self._setting(corner))

    def _setting(self, corner: Corner) -> Setting:
        """Returns the setting with every package pinned, or else only the libraries."""
        s = self.sides
        made = (*([self.own] * corner.package_new), *(self.others * corner.companion_new))
        pinned = self._request(applied(self.resolution, made))
        loose = {n: v for n, v in pinned.items() if n in (*LIBRARIES, *s.fixed, s.package)}
        version, day = (
            s.new if new else s.old for new in (corner.package_new, corner.companion_new)
        )
        return Setting(f"{version} with the companions of {day}", (pinned, loose))

    def _request(self, pins: Sequence[str]) -> dict[str, str]:
        return {**dict(pin.split("==", 1) for pin in pins), **self.sides.fixed}

    def _probe(self, ready: Setting, attempt: int = 1) -> ProbeVerdict:
        return self.follow.probe(ready.name, lambda: contextlib.nullcontext(ready), attempt)

    # -- where the only companion turns ------------------------------------------------------

    def _own_boundary(self, found: CompanionAnswer, package_new: bool) -> CompanionAnswer:
        change = found.companion
        if change is None or change.old is None or change.new is None:
            return found
        versions = _between(change)
        last = len(versions) - 1
        ends = {0: Corner(package_new, False), last: Corner(package_new, True)}
        own = [self.own] if package_new else []

        def probe(question: Probe) -> ProbeVerdict:
            if question.index in ends and question.attempt == 1:
                return self._corner(ends[question.index])
            version = versions[question.index]
            pins = applied(self.resolution, [*own, dataclasses.replace(change, new=version)])
            held = f"{found.held} with {change.name} {version}, else the companions of"
            setting = Setting(f"{held} {self.sides.old}", (self._request(pins),))
            return self._probe(setting, question.attempt)

        bad, good = (last, 0) if self.sides.turns == "bad" else (0, last)
        search = Search(last + 1, Options(bad=bad, good=good, rate=self.follow.target.rate))
        answer = settle(search, probe, _MOST)
        return dataclasses.replace(found, releases=tuple(versions), boundary=answer)


def _between(change: Change) -> list[str]:
    """Returns the final releases of a companion from its old to its new version, both included."""
    assert change.old is not None and change.new is not None
    low, high = sorted(Version(v) for v in (change.old, change.new))
    found = {Version(change.old): change.old, Version(change.new): change.new}
    with contextlib.suppress(StackError):  # no index: use the two that are known
        for release in index.releases(change.name):
            version = Version(release.version)
            if low < version < high and not (release.prerelease or release.yanked):
                found.setdefault(version, release.version)
    ordered = [found[v] for v in sorted(found)]
    return ordered if Version(change.old) <= Version(change.new) else ordered[::-1]
