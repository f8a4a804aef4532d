"""Where the search meets the world: what probes a release, whatever that takes."""

from __future__ import annotations

from typing import Protocol

from moediag.bisect.timeline import ProbeRecord


class Prober(Protocol):
    """Builds, launches, judges. Implementations may start processes; the search never does."""

    def probe(self, version: str, attempt: int) -> ProbeRecord:
        """Runs the scenario on ``version``. A release that cannot be tried is a SKIP, not an error;
        MoediagError only where no release could be (the machine, the network, Ctrl-C)."""
        ...

    def prepare(self, version: str) -> None:
        """Builds the environment of a release that may be wanted next; failures are left for
        :meth:`probe` to report."""
        ...
