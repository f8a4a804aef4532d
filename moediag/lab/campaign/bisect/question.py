"""The question of a bisect: scenario, variant, package, releases, and what stays fixed."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

from packaging.utils import canonicalize_name

from moediag.errors import NoEnvironments, StackError, UsageError
from moediag.lab.campaign.bisect.candidates import as_of, searched, spelled
from moediag.lab.campaign.bisect.search.direction import schedule
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.search.search import Options
from moediag.lab.campaign.bisect.signature_match import Match
from moediag.lab.campaign.engine import Header
from moediag.lab.scenario.plan import BACKENDS, Plan, PlannedTrial, plan
from moediag.lab.scenario.schema import Scenario, Variant
from moediag.lab.scenario.source import nearest as like
from moediag.lab.stacks import releases as index
from moediag.lab.stacks.base import cache_root, current_base
from moediag.lab.stacks.releases import Release
from moediag.records import dataclass

PATIENCE = 6  # stop after this many undecided releases between bad and good
LIBRARIES = ("transformers", "accelerate")  # uv resolves them as of a date


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line."""

    name: str = ""  # scenario, as typed
    package: str = "transformers"
    bad: str = ""  # "" for the scenario's own release
    good: str = ""  # "" for none
    oldest: str = ""  # "" for :data:`candidates.REACH`
    window: bool = False
    pre: bool = False
    yanked: bool = False
    hold: Mapping[str, str] = field(default_factory=dict)
    python: str = ""
    match: Match = Match.EXACT
    variant: str = ""  # "" for the first unfixed one
    world_size: int | None = None
    device: str = "cpu"
    launcher: str = "auto"
    timeout: float | None = None
    calibrate: int = 3  # trials of the bad end


@dataclass(frozen=True, slots=True)
class Setting:
    """What a probe runs on."""

    name: str  # in the state file and in messages; a release's is its version
    # environments for stacks.environment, tried in order until one decides
    requests: tuple[Mapping[str, str], ...]
    source: Path | None = None  # folder to import packages from before the installed ones
    release: Release | None = None  # None: not one of the searched releases
    problem: str = ""  # why there is no environment


@dataclass(frozen=True, slots=True)
class Question:
    """What a bisect searches for, and what stays fixed."""

    scenario: Scenario  # reduced to ``variant`` and its controls, without versions
    variant: str
    package: str
    pins: Mapping[str, str]  # other packages that the scenario pins
    releases: tuple[Release, ...]  # those that are searched, oldest first
    bad: str
    good: str | None  # None if it must be found
    python: str
    asked: Asked

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(r.version for r in self.releases)

    @property
    def ends(self) -> tuple[str, ...]:
        """Returns the releases that are tried as the bad end, in order. Without ``--bad`` these are
        the scenario's own, then newer and older ones in growing steps: with ``--set`` the failure
        may be elsewhere, because the own release lacks the family, for example."""
        if self.asked.bad:
            return (self.bad,)
        versions = self.versions
        own = versions.index(self.bad)
        newer = [own + step for step in schedule(len(versions) - 1 - own, None, False)]
        older = [own - step for step in schedule(own, None, False)]
        tried = (versions[place] for place in (own, *newer, *older))
        return tuple(version for version in tried if version != self.good)

    @property
    def controls(self) -> tuple[str, ...]:
        return tuple(name for name in self.scenario.variants if name != self.variant)

    @property
    def backend(self) -> str:
        return BACKENDS[self.asked.device]

    @property
    def world_size(self) -> int:
        return self.asked.world_size or self.scenario.world.default

    @property
    def declared(self) -> tuple[str, ...]:
        """Returns the verdicts that the variant's expectation allows."""
        return self.scenario.variants[self.variant].expect.verdicts(self.backend)

    @property
    def pattern(self) -> str | None:
        return self.scenario.variants[self.variant].expect.pattern

    def request(self, release: Release) -> dict[str, str]:
        """Returns the environment of a probe of ``release``, for stacks.environment.

        A search over transformers uses the companions of the release's own day. A search over
        another package uses the scenario's other pins, because the failure belongs to those
        releases. ``--hold`` overrides both.
        """
        hold = dict(self.asked.hold)
        wanted = {self.package: release.version, **hold}
        if self.asked.python:
            wanted["python"] = self.asked.python
        for name, version in self.pins.items():
            if name in wanted or name == "python":
                continue
            if self.package != "transformers" or name == "torch":
                wanted[name] = version
            elif name not in LIBRARIES:
                wanted[name] = as_of(name, release.uploaded, self.python) or version
        return wanted

    def setting(self, version: str) -> Setting:
        """Returns what a probe of a release runs on. Raises NoEnvironments."""
        release = next(r for r in self.releases if r.version == version)
        try:
            return Setting(version, (self.request(release),), release=release)
        except NoEnvironments:
            raise
        except StackError as error:
            return Setting(version, (), release=release, problem=error.message)

    def plan(self, request: Mapping[str, str], trials: int, noting: bool = False) -> Plan:
        """Returns a probe's trials: the variant ``trials`` times, each control once. ``noting``:
        the variant's trials record of which files they run functions, which slows them."""
        own = self.scenario.variants[self.variant]
        variants = {
            **self.scenario.variants,
            self.variant: own.model_copy(update={"repeats": trials}),
        }
        asked = self.asked
        probed = self.scenario.model_copy(update={"stack": dict(request), "variants": variants})
        whole = plan(
            probed,
            self.world_size,
            asked.device,
            launcher=asked.launcher,
            timeout=asked.timeout,
        )
        return replace(whole, trials=tuple(map(self._noting, whole.trials))) if noting else whole

    def _noting(self, planned: PlannedTrial) -> PlannedTrial:
        noted = planned.trial.variant == self.variant
        return replace(planned, trial=replace(planned.trial, executed=noted))

    def options(self, versions: Sequence[str], rate: Rate) -> Options:
        """Returns the options of a search over ``versions``."""
        place = {version: number for number, version in enumerate(versions)}
        return Options(
            bad=place[self.bad],
            good=None if self.good is None else place[self.good],
            window=self.asked.window,
            patience=PATIENCE,
            rate=rate,
        )

    def header(self, command: Sequence[str]) -> Header:
        asked = self.asked
        # Nothing from the index: a new release must not prevent resuming.
        told = self.scenario.identity()
        return Header(
            "bisect",
            {
                "scenario": self.scenario.name,
                "package": self.package,
                "Python": self.python,
                "platform": f"{sys.platform}-{platform.machine()}",
                "--match": str(asked.match),
                "bad end": self.bad,
                "good end": self.good,
                "oldest": asked.oldest or None,
                "window": asked.window,
                "pre-releases": asked.pre,
                "yanked": asked.yanked,
                "variant": self.variant,
                "hold": dict(sorted(asked.hold.items())),
                "pins": dict(sorted(self.pins.items())),
                "torch": current_base(cache_root()).torch,
                "ranks": self.world_size,
                "device": asked.device,
                "launcher": asked.launcher,
                "timeout": asked.timeout,
                "trials of the bad end": asked.calibrate,
            },
            {f"the scenario {self.scenario.name}": hashlib.sha256(told.encode()).hexdigest()[:16]},
            {"releases": list(self.versions)},
            tuple(command),
        )

    def over(self, versions: Sequence[str]) -> Question:
        """Returns the same question over the releases that an earlier run searched."""
        known = {r.version: r for r in index.releases(self.package)}
        kept = tuple(known.get(version, Release(version)) for version in versions)
        return replace(self, releases=kept)


def ask(scenario: Scenario, asked: Asked) -> Question:
    """Returns the question of a command line. Queries the index. Raises UsageError, NoSuchRelease
    and what :mod:`moediag.lab.stacks.releases` raises."""
    package = str(canonicalize_name(asked.package))
    hold = {str(canonicalize_name(name)): version for name, version in asked.hold.items()}
    if package in hold or package == "python":
        raise UsageError(f"--hold {package}: it is the package that is searched")
    if "python" in hold:
        raise UsageError("--hold python: use --python", "For example: --python 3.11")
    variant = _variant(scenario, asked.variant)
    merged = scenario.merged(variant)
    pins = {str(canonicalize_name(n)): v for n, v in merged.stack.items()}
    base = current_base(cache_root())
    python = asked.python or pins.get("python") or base.python
    bad = asked.bad or pins.pop(package, "") or (base.torch or "" if package == "torch" else "")
    pins.pop(package, None)
    if not bad:
        raise UsageError(
            f"{scenario.name} names no release of {package}, so where is it bad?",
            "Give a release that has the failure with --bad.",
        )
    listed = index.releases(package)
    bad, good = spelled(package, bad, listed), None
    if asked.good:
        good = spelled(package, asked.good, listed)
        if good == bad:
            raise UsageError(f"--good {good} and --bad {bad} are the same release")
    chosen = searched(package, listed, bad, good, asked.oldest, asked.pre, asked.yanked)
    reduced = _reduced(scenario, variant)
    question = Question(
        reduced,
        variant,
        package,
        pins,
        tuple(chosen),
        bad,
        good,
        python,
        replace(asked, hold=hold),
    )
    question.plan(question.request(chosen[0]), 1)  # report now what cannot be planned
    return question


def _variant(scenario: Scenario, name: str) -> str:
    unfixed = [n for n, v in scenario.variants.items() if v.role == "unfixed"]
    if name and name not in unfixed:
        raise UsageError(
            f"--variant {name}: no unfixed variant of {scenario.name}{like(name, unfixed)}",
            f"It has: {', '.join(unfixed)}.",
        )
    return name or unfixed[0]


def _reduced(scenario: Scenario, variant: str) -> Scenario:
    """Returns ``variant`` and the controls that apply to it: on the scenario's own stack, with its
    model. Another family's control may fail because of a bug in that family."""
    family = scenario.merged(variant).model.family
    controls = {n: v for n, v in scenario.variants.items() if v.role == "control" and not v.stack}
    close = {n: v for n, v in controls.items() if scenario.merged(n).model.family == family}
    chosen = close or controls
    if not chosen:
        raise UsageError(
            f"{scenario.name} has no control on its own stack: clean would prove nothing",
            "Add a variant with `role: control` and without `stack`.",
        )
    kept: dict[str, Variant] = {
        variant: scenario.variants[variant].model_copy(update={"stack": {}}),
        **chosen,
    }
    reduced = scenario.model_copy(update={"variants": kept, "stack": {}, "cost": None})
    return reduced.with_overrides(scenario.overrides)
