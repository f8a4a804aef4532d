"""Where the search meets the world: what probes a release, whatever that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moediag.bisect.signatures import Target
from moediag.bisect.timeline import ProbeRecord


@dataclass(frozen=True, slots=True)
class Learned:
    """The first probe of the bad end. ``target``: None where the declared failure did not show;
    then ``problem`` says what did, and ``record`` holds what it was."""

    record: ProbeRecord
    target: Target | None
    problem: str = ""


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

    def prepare(self, versions: Sequence[str]) -> None:
        """Begins to make ready the releases that may be wanted next, the likeliest first, and
        returns at once; failures are left for :meth:`probe` to report."""
        ...

    def stop(self) -> None:
        """Makes the probes that other threads run end as after Ctrl-C."""
        ...

    def close(self) -> None:
        """Ends what :meth:`prepare` began."""
        ...
