"""The interface of probers, which build, launch and judge a release for the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Learned:
    """The first probe of the bad end."""

    record: ProbeRecord  # the probe
    target: Target | None  # None if the declared failure did not show
    problem: str = ""  # then says what showed instead


@dataclass(frozen=True, slots=True)
class Setting:
    """What a probe runs on that is not simply a release."""

    name: str  # in the state file and in messages
    # environments for stacks.environment, tried in order until one decides
    requests: tuple[Mapping[str, str], ...]
    source: Path | None = None  # folder to import packages from before the installed ones


class Prober(Protocol):
    """Builds, launches and judges. Implementations may start processes; the search never does."""

    def learn(self, version: str) -> Learned:
        """Probes the bad end often enough to estimate its failure rate. Raises as :meth:`probe`."""
        ...

    def probe(self, version: str, attempt: int, target: Target) -> ProbeRecord:
        """Runs the scenario on ``version``. A release that cannot be tried is a SKIP, not an error.
        Raises MoediagError only if no release could be tried (machine, network, Ctrl-C). Several
        threads call it at once with ``--jobs``."""
        ...

    def probe_on(self, setting: Setting, attempt: int, target: Target) -> ProbeRecord:
        """Does the same on ``setting``; one at a time, in the main thread."""
        ...

    def prepare(self, versions: Sequence[str]) -> None:
        """Starts to prepare the releases that may be needed next, likeliest first, and returns at
        once. :meth:`probe` reports failures."""
        ...

    def prepare_on(self, settings: Sequence[Setting]) -> None:
        """Does the same for :meth:`probe_on`."""
        ...

    def stop(self) -> None:
        """Ends the probes of other threads as after Ctrl-C."""
        ...

    def close(self) -> None:
        """Ends what :meth:`prepare` started. The prober can be used again afterwards."""
        ...
