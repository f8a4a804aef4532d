"""The interface of probers: what builds, launches and judges a release for the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moediag.campaign.bisect.signature_match import Target
from moediag.campaign.bisect.timeline import ProbeRecord


@dataclass(frozen=True, slots=True)
class Learned:
    """The first probe of the bad end. ``target``: None where the declared failure did not show;
    then ``problem`` says what did, and ``record`` holds what it was."""

    record: ProbeRecord
    target: Target | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a probe runs on that is not simply a release. ``name``: of it in the state file and for
    people; ``requests``: environments for stacks.environment, each tried where the one before
    decided nothing; ``source``: a folder from which packages are imported before those that are
    installed."""

    name: str
    requests: tuple[Mapping[str, str], ...]
    source: Path | None = None


class Prober(Protocol):
    """Builds, launches, judges. Implementations may start processes; the search never does."""

    def learn(self, version: str) -> Learned:
        """Probes the bad end, often enough to tell how often the failure shows there. Raises as
        :meth:`probe`."""
        ...

    def probe(self, version: str, attempt: int, target: Target) -> ProbeRecord:
        """Runs the scenario on ``version``. A release that cannot be tried is a SKIP, not an error;
        MoediagError only where no release could be (the machine, the network, Ctrl-C). Called by
        several threads at once with ``--jobs``."""
        ...

    def probe_on(self, setting: Setting, attempt: int, target: Target) -> ProbeRecord:
        """The same on ``setting``; one at a time, in the main thread."""
        ...

    def prepare(self, versions: Sequence[str]) -> None:
        """Begins to make ready the releases that may be wanted next, the likeliest first, and
        returns at once; failures are left for :meth:`probe` to report."""
        ...

    def prepare_on(self, settings: Sequence[Setting]) -> None:
        """The same for :meth:`probe_on`."""
        ...

    def stop(self) -> None:
        """Makes the probes that other threads run end as after Ctrl-C."""
        ...

    def close(self) -> None:
        """Ends what :meth:`prepare` began. It may be used again afterwards."""
        ...
