"""The interface of engines: submit a call, ask for its reply, cancel it. One module per engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from moediag.errors import MachineError, MoediagError
from moediag.records import dataclass

NEEDS = (
    "Each worker needs the same release of moediag, and must see the folder of --out and the cache "
    "(MOEDIAG_CACHE) under the same paths: put both on a shared file system."
)


class Lost(Exception):
    """A job that ended without a reply: its worker was killed, its node failed, it was preempted.
    The text is the reason."""


class TooLong(Lost):
    """A time limit passed. The item is not repeated: it would take as long again."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a worker sends back."""

    value: Any = None
    """The result, if nothing below is set."""
    unfit: str = ""
    """Why no item can run on this worker."""
    node: str = ""
    """The engine's name of the worker's node."""
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

    running = False
    """Whether it has left the queue. :meth:`reply` keeps it up to date."""

    @abstractmethod
    def reply(self) -> Reply | None:
        """Returns the reply, None while there is none; takes at most some seconds. Raises Lost, and
        MachineError if no job of this engine can succeed."""

    @abstractmethod
    def cancel(self) -> None:
        """Ends the job if it has not ended, and returns at once."""


class Avoided:
    """Nodes on which no item can run, each told when it is found and at the end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.reasons: dict[str, str] = {}
        self._say = say

    def add(self, node: str, why: str) -> None:
        if node not in self.reasons:
            self.reasons[node] = why
            self._say(f"{why}; this node is avoided")

    def none_left(self) -> MachineError:
        return MachineError(f"no node can run it: {'; '.join(self.reasons.values())}", NEEDS)

    def close(self) -> None:
        for why in self.reasons.values():
            self._say(f"not used: {why}")


class Executor(ABC):
    """An engine. Several threads submit at once."""

    @abstractmethod
    def submit(self, name: str, call: Call) -> Job:
        """Starts a job; ``name`` is for the engine's own lists. Raises MachineError if the engine
        does not accept it."""

    def avoid(self, node: str, why: str) -> None:  # noqa: ARG002
        """Uses a node no more. Raises MachineError if no other one is left."""
        raise MachineError(why, NEEDS)

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Releases what the engine holds on this machine. All jobs have ended or are cancelled."""
