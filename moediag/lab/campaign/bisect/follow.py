"""Probes after the releases are known: commits and corners.

Each search is a separate machine (see ``search.search_machine``) that asks one question at a time.
A finished probe is written to the journal before anything else happens, and is never repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from moediag.errors import NoEnvironments, StackError
from moediag.lab.campaign.bisect.probe_verdict import ProbeVerdict, skip
from moediag.lab.campaign.bisect.prober import Prober, probe
from moediag.lab.campaign.bisect.question import Setting
from moediag.lab.campaign.bisect.search.search_machine import Machine
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.state import State
from moediag.lab.campaign.bisect.timeline import ProbeRecord, probe_line, probe_name
from moediag.lab.campaign.engine import Display
from moediag.lab.campaign.executors import Maker

Q = TypeVar("Q", bound=Hashable)
A = TypeVar("A")
Ready = Callable[[], contextlib.AbstractContextManager[Setting]]


class Follow:
    """Makes the probes that its machines request."""

    def __init__(
        self, state: State, prober: Maker[Prober], display: Display, target: Target
    ) -> None:
        self.state = state
        self.prober = prober
        self.display = display
        self.target = target
        self._needed: set[str] = set()

    @property
    def made(self) -> int:
        """Returns how many probes its machines have needed so far, earlier commands included."""
        return len(self._needed)

    def probe(self, name: str, setting: Ready, attempt: int = 1) -> ProbeVerdict:
        """Returns the verdict on ``name``. ``setting`` is prepared only if the verdict is unknown;
        if it raises StackError the verdict is SKIP."""
        named = probe_name(name, attempt)
        self._needed.add(named)
        record = self.state.known(named)
        if record is None:
            self.display.begun(named)
            record = self._made(name, setting, attempt)
            self.state.finished_extra(record)
            self.display.finished(named, probe_line(record, self.target.signatures))
        return record.verdict

    def prepare(self, settings: Sequence[Setting]) -> None:
        """Starts to build the environments of those not known yet."""
        unknown = [s for s in settings if self.state.known(s.name) is None]
        self.prober.here.prepare(unknown, hosts=self.prober.remote is None)

    def _made(self, name: str, setting: Ready, attempt: int) -> ProbeRecord:
        try:
            with setting() as ready:
                return probe(self.prober, ready, attempt, self.target).record
        except NoEnvironments:
            raise
        except StackError as error:
            return ProbeRecord(name, skip(error.message), attempt)


def settle(machine: Machine[Q, A], probe: Callable[[Q], ProbeVerdict], most: int) -> A | None:
    """Returns the machine's answer, or None if it needs more than ``most`` probes."""
    for _ in range(most):
        if machine.answer is not None:
            return machine.answer
        (question,) = machine.next(1)
        machine.told(question, probe(question))
    return machine.answer
