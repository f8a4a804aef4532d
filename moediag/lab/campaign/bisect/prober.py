"""Probes a setting: the interface of probers, and the one way in which a campaign calls them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from moediag.lab.campaign.bisect.probe_verdict import skip
from moediag.lab.campaign.bisect.question import Question, Setting
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.timeline import ProbeRecord, probe_name
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.executors import Choice, Lost, Maker, opened
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found."""

    record: ProbeRecord
    target: Target | None = None  # the failure that it was to learn; None if it did not show
    problem: str = ""  # then says what showed instead


class Prober(Protocol):
    """Builds, launches and judges. Implementations may start processes; the search never does."""

    def probe(self, setting: Setting, attempt: int, target: Target | None) -> Probed:
        """Runs the scenario on ``setting``. Without a ``target`` it is learned, with enough trials
        to estimate its failure rate. What cannot be tried is a SKIP, not an error. Raises
        MoediagError only if nothing could be tried (machine, network, Ctrl-C). Several threads call
        it at once with ``--jobs``."""
        ...

    def prepare(self, settings: Sequence[Setting], hosts: bool = True) -> None:
        """Starts to prepare what may be needed next, likeliest first, and returns at once.
        :meth:`probe` reports failures. ``hosts``: whether probes run on this machine."""
        ...

    def stop(self) -> None:
        """Ends the probes of other threads as after Ctrl-C."""
        ...

    def close(self) -> None:
        """Ends what :meth:`prepare` started. The prober can be used again afterwards."""
        ...


def probe(prober: Maker[Prober], setting: Setting, attempt: int, target: Target | None) -> Probed:
    """Makes a probe, here or as a job. A lost job is a SKIP that does not last."""
    try:
        found: Probed = prober.call(
            probe_name(setting.name, attempt) + ", learning" * (target is None),
            "probe", setting, attempt, target, needs=lambda: setting.requests[:1],
        )  # fmt: skip
    except Lost as lost:
        record = ProbeRecord(setting.name, skip(str(lost)), attempt, lasting=False)
        return Probed(record, None, str(lost))
    return found


MakeProber = Callable[[Question, Path, Display], Prober]
"""Gets the folder of the campaign."""


@contextlib.contextmanager
def made(
    make: MakeProber, question: Question, folder: Path, display: Display, executor: Choice
) -> Iterator[Maker[Prober]]:
    """Returns the prober of a campaign, connected to its engine."""
    with opened(executor, folder, display.say) as remote:
        one = functools.partial(make, question, folder.resolve(), display)
        with contextlib.closing(Maker(one, remote, display.doing)) as prober:
            yield prober
