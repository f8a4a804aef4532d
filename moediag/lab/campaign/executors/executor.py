"""The interface of engines: submit a call, ask for its reply, cancel it. One module per engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from moediag.errors import MoediagError
from moediag.records import dataclass


class Lost(Exception):
    """A job that ended without a reply: its worker was killed, its node failed, it was preempted.
    The text is the reason."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a worker sends back."""

    value: Any = None
    """The result, if nothing below is set."""
    unfit: str = ""
    """Why no item can run on this worker."""
    error: MoediagError | None = None
    """What the item raised."""
    bug: str = ""
    """The traceback of any other exception."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a worker runs, and what it must have to do so. The arguments of
    :func:`~moediag.lab.campaign.executors.worker.perform`."""

    work: bytes
    """A pickled callable without arguments."""
    version: str
    """The release of moediag."""
    tokens: dict[str, str]
    """File in a shared folder -> its content."""
    environment: dict[str, str]
    """Environment variables of moediag."""

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Returns plain values: another release of moediag can read them and say so."""
        return self.work, self.version, self.tokens, self.environment


class Job(ABC):
    """A submitted call."""

    @abstractmethod
    def reply(self) -> Reply | None:
        """Returns the reply, None while there is none; takes at most some seconds. Raises Lost, and
        MachineError if no job of this engine can succeed."""

    @abstractmethod
    def cancel(self) -> None:
        """Ends the job if it has not ended, and returns at once."""


class Executor(ABC):
    """An engine. Several threads submit at once."""

    @abstractmethod
    def submit(self, name: str, call: Call) -> Job:
        """Starts a job; ``name`` is for the engine's own lists. Raises MachineError if the engine
        does not accept it."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Releases what the engine holds on this machine. All jobs have ended or are cancelled."""
