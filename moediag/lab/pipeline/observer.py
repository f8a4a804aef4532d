"""The interface through which running trials report, and a short text for a running trial."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from moediag.result import wording

if TYPE_CHECKING:
    from moediag.launch.settings import Progress


class Observer(Protocol):
    """Receives progress, possibly from several threads."""

    def stack(self, key: str, text: str, fraction: float | None) -> None:
        """Reports a software stack being built; ``fraction`` from 0 to 1, None if unknown."""

    def doing(self, name: str, text: str) -> None:
        """Reports what the trial ``name`` is doing; called often."""

    def event(self, text: str) -> None:
        """Reports something that belongs in a log."""


class Silent:
    """Ignores everything."""

    def stack(self, key: str, text: str, fraction: float | None) -> None: ...

    def doing(self, name: str, text: str) -> None: ...

    def event(self, text: str) -> None: ...


def glance(progress: Progress) -> str:
    """Returns rank states in brief: ``running  rank 0 in-collective, rank 1 running  step 2``."""
    by_state: dict[str, list[int]] = {}
    for rank, state in progress.states.items():
        by_state.setdefault(state, []).append(rank)
    states = ", ".join(f"{wording.ranks(members)} {state}" for state, members in by_state.items())
    return "  ".join(filter(None, (progress.doing, states, _step(progress.steps))))


def _step(steps: Mapping[int, int]) -> str:
    latest = max(steps.values(), default=0)
    return f"step {latest}" if latest > 0 else ""
