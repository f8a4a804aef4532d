"""Is it the package that was searched, or what came with it?

Between two releases of a boundary their companions changed too: training libraries, and what else
ran in the trials. The four corners of {old, new} x {package, companions} say which is enough; where
it is not the package alone, the companions are reduced to those that are needed, and where that is
a single one, its own releases are searched.

A corner is an environment with every package pinned. Where that cannot be had (the new release
requires a newer dependency), the training libraries alone are pinned, and the dependencies follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from moediag.campaign.bisect.companions.companion_answer import CompanionAnswer
from moediag.campaign.bisect.follow import Follow, settle
from moediag.campaign.bisect.probe_verdict import BAD, GOOD, Kind, ProbeVerdict
from moediag.campaign.bisect.prober import Setting
from moediag.campaign.bisect.search.corners import (
    NEW,
    OLD,
    Blame,
    Change,
    Corner,
    Corners,
    GuiltyAnswer,
    Reduction,
    applied,
    changes,
)
from moediag.campaign.bisect.search.search import Options, Probe, Search
from moediag.campaign.bisect.suspects.installed_source import installed
from moediag.errors import StackError
from moediag.evidence.executed import Executed
from moediag.stacks import environment
from moediag.stacks import releases as index
from moediag.stacks.environment import Stack

LIBRARIES = (
    "accelerate", "transformers", "torch", "trl", "peft", "torchtitan", "deepspeed",
)  # fmt: skip
_MOST = 24  # probes of one reduction or search


@dataclass(frozen=True, slots=True)
class Sides:
    """The two releases of a boundary, the older first. ``turns``: what the newer one is, "bad" or
    "good"; ``requests``: their environments; ``verdicts``: of the two; ``ran``: what their trials
    ran, empty where that is not known; ``fixed``: what every request names besides (a held
    companion, another Python)."""

    package: str
    old: str
    new: str
    turns: str
    requests: tuple[Mapping[str, str], Mapping[str, str]]
    verdicts: tuple[ProbeVerdict, ProbeVerdict]
    ran: tuple[Executed, Executed]
    fixed: Mapping[str, str]


def who_is_to_blame(sides: Sides, follow: Follow) -> CompanionAnswer:
    """What stands in the way is the answer's ``problem``."""
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
        """Some function of it ran on either side, or it is not known."""
        for stack, executed in zip(self.stacks, self.sides.ran, strict=True):
            if not executed:
                return True
            with contextlib.suppress(StackError):  # it is not installed on this side
                files = installed(stack.python, name).files
                if any(line for f in files for line in executed.functions.get(f, ())):
                    return True
        return False

    def answer(self) -> CompanionAnswer:
        s = self.sides
        found = CompanionAnswer(s.package, s.old, s.new, s.turns, self.others, self.idle)
        if not self.others:
            return found
        before = self.follow.made
        everyone = range(len(self.others))
        self.follow.prepare([self._setting(True, ()), self._setting(False, everyone)])
        corners = settle(Corners(), self._corner, 4)
        assert corners is not None
        found = dataclasses.replace(found, corners=corners)
        if corners.blame in (Blame.COMPANION, Blame.EITHER, Blame.TOGETHER):
            with_package = corners.blame == Blame.TOGETHER
            found = dataclasses.replace(
                found,
                guilty=self._guilty(with_package),
                held=s.new if with_package else s.old,
            )
            found = self._own_boundary(found, with_package)
        return dataclasses.replace(found, probes=self.follow.made - before)

    # -- corners ---------------------------------------------------------------------------

    def _corner(self, corner: Corner) -> ProbeVerdict:
        if corner in (OLD, NEW):
            return self.sides.verdicts[corner == NEW]
        return self._with(
            corner.package_new, range(len(self.others)) if corner.companion_new else ()
        )

    def _with(self, package_new: bool, chosen: Sequence[int]) -> ProbeVerdict:
        """The old environment with the package and the chosen others as in the new one."""
        others = [self.others[i] for i in sorted(chosen)]
        if len(others) == len(self.others) and package_new:
            return self.sides.verdicts[1]
        if not others and not package_new:
            return self.sides.verdicts[0]
        return self._probe(self._setting(package_new, chosen))

    def _setting(self, package_new: bool, chosen: Sequence[int]) -> Setting:
        others = [self.others[i] for i in sorted(chosen)]
        made = [self.own, *others] if package_new else others
        pinned = self._request(applied(self.resolution, made))
        loose = {n: v for n, v in pinned.items() if n in (*LIBRARIES, *self.sides.fixed)}
        loose[self.sides.package] = pinned[self.sides.package]
        corner = len(others) in (0, len(self.others))
        return Setting(self._name(package_new, others), (pinned, loose) if corner else (pinned,))

    def _request(self, pins: Sequence[str]) -> dict[str, str]:
        return {**dict(pin.split("==", 1) for pin in pins), **self.sides.fixed}

    def _name(self, package_new: bool, others: Sequence[Change]) -> str:
        s = self.sides
        version = s.new if package_new else s.old
        if not others:
            return f"{version} with the companions of {s.old}"
        if len(others) == len(self.others):
            return f"{version} with the companions of {s.new}"
        named = ", ".join(f"{c.name} {c.new or 'removed'}" for c in others)
        return f"{version} with {named}, else the companions of {s.old}"

    def _probe(self, ready: Setting, attempt: int = 1) -> ProbeVerdict:
        return self.follow.probe(ready.name, lambda: contextlib.nullcontext(ready), attempt)

    # -- the guilty among the others ---------------------------------------------------------

    def _guilty(self, package_new: bool) -> GuiltyAnswer:
        reduction = Reduction(len(self.others))

        def probe(chosen: frozenset[int]) -> ProbeVerdict:
            return self._turned(self._with(package_new, sorted(chosen)))

        found = settle(reduction, probe, _MOST)
        return found or GuiltyAnswer((), False, problem=f"it takes more than {_MOST} probes")

    def _turned(self, verdict: ProbeVerdict) -> ProbeVerdict:
        """In the words of a reduction, which looks for what makes it bad."""
        if self.sides.turns == "bad" or not verdict.decided:
            return verdict
        swapped = GOOD if verdict.kind == Kind.BAD else BAD
        return dataclasses.replace(swapped, trials=verdict.trials)

    # -- where the one guilty companion turns -------------------------------------------------

    def _own_boundary(self, found: CompanionAnswer, package_new: bool) -> CompanionAnswer:
        change = found.companion
        if change is None or change.old is None or change.new is None or found.guilty is None:
            return found
        place = self.others.index(change)
        versions = _between(change)
        own = [self.own] if package_new else []

        def probe(question: Probe) -> ProbeVerdict:
            if question.index == 0 and question.attempt == 1:
                return self._with(package_new, ())
            if question.index == len(versions) - 1 and question.attempt == 1:
                return self._with(package_new, (place,))
            version = versions[question.index]
            pins = applied(self.resolution, [*own, dataclasses.replace(change, new=version)])
            name = self._name(package_new, [dataclasses.replace(change, new=version)])
            return self._probe(Setting(name, (self._request(pins),)), question.attempt)

        last = len(versions) - 1
        ends = (last, 0) if self.sides.turns == "bad" else (0, last)
        rate = self.follow.target.rate
        search = Search(len(versions), Options(bad=ends[0], good=ends[1], rate=rate))
        answer = settle(search, probe, _MOST)
        return dataclasses.replace(found, releases=tuple(versions), boundary=answer)


def _between(change: Change) -> list[str]:
    """The final releases of a companion from its old to its new version, both included."""
    assert change.old is not None and change.new is not None
    low, high = sorted(Version(v) for v in (change.old, change.new))
    found = {Version(change.old): change.old, Version(change.new): change.new}
    with contextlib.suppress(StackError):  # no index: the two that are known
        for release in index.releases(change.name):
            version = Version(release.version)
            if low < version < high and not (release.prerelease or release.yanked):
                found.setdefault(version, release.version)
    ordered = [found[v] for v in sorted(found)]
    return ordered if Version(change.old) <= Version(change.new) else ordered[::-1]
