"""What makes the items of a campaign: one object here, or the same on each worker of an engine."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from moediag.errors import StackError
from moediag.lab.campaign.executors.remote import Remote
from moediag.lab.stacks import environment

Requests = Iterable[Mapping[str, str]]


class Makes(Protocol):
    """What a maker needs of its object."""

    def stop(self) -> None:
        """Ends the items of other threads as after Ctrl-C."""
        ...

    def close(self) -> None: ...


M = TypeVar("M", bound=Makes)


class Maker(Generic[M]):
    """Calls methods of one object: of :attr:`here`, or with an engine of one on each worker, which
    keeps it for its next item."""

    def __init__(
        self, make: Callable[[], M], remote: Remote | None = None,
        doing: Callable[[str, str], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        """``make``: picklable if there is a ``remote``; ``doing``: gets an item's name and what
        happens to it."""
        self.here = make()
        """Also with an engine: for what only this machine can do."""
        self.remote = remote
        self._pickled = pickle.dumps(make) if remote is not None else b""
        self._doing = doing

    def call(
        self, name: str, method: str, *arguments: Any, needs: Callable[[], Requests] = tuple
    ) -> Any:
        """Returns what the method returns. ``name``: of the item, another one for each call.
        ``needs``: the environments of a job. They are built on this machine, because nodes often
        have no network; what cannot be built is left to the job, which fails for the same reason
        and reports it. Raises as the method and :meth:`Remote.call`."""
        if self.remote is None:
            return getattr(self.here, method)(*arguments)
        with contextlib.suppress(StackError):
            for request in needs():
                environment.ensure(request, lambda text, _: self._doing(name, text))
        self._doing(name, "as a job")
        return self.remote.on_maker(name, self._pickled, method, *arguments)

    def stop(self) -> None:
        """Ends the items of other threads as after Ctrl-C, until :meth:`close`."""
        self.here.stop()
        if self.remote is not None:
            self.remote.stop()

    def close(self) -> None:
        """Releases what this machine holds. The engine ends its workers."""
        self.here.close()
        if self.remote is not None:
            self.remote.start_again()
