"""Runs calls as jobs of an engine. A lost job is submitted once more; nothing waits for ever."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import pickle
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import moediag
from moediag.errors import Interrupted
from moediag.lab.campaign.executors.executor import Call, Executor, Lost, Reply, TooLong
from moediag.lab.campaign.executors.worker import on_maker
from moediag.lab.stacks.base import cache_root

T = TypeVar("T")

POLL = 0.5  # seconds between two questions for a reply


class Remote:
    """Calls that run elsewhere; threads of a campaign use it at once. Call :meth:`close` at the
    end."""

    def __init__(
        self, executor: Executor, folder: Path, limit: float, say: Callable[[str], None],
        poll: float = POLL, queue: float = math.inf,
    ) -> None:  # fmt: skip
        """``folder``: of the campaign; ``limit``: seconds for one item from its start; ``queue``:
        seconds before it; ``say``: gets lines for the user."""
        self._executor = executor
        self._limit = limit
        self._queue = queue
        self._say = say
        self._poll = poll
        self._stopping = threading.Event()
        cache = cache_root()
        cache.mkdir(parents=True, exist_ok=True)
        campaign = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        token, name = uuid.uuid4().hex, f".seen-by-workers-{campaign}-"
        self._tokens: dict[str, str] = {}
        for shared in (folder.resolve(), cache.resolve()):
            for left in shared.glob(f"{name}*"):  # by a command that was killed
                left.unlink(missing_ok=True)
            self._tokens[str(shared / f"{name}{token}")] = token
        for path in self._tokens:
            Path(path).write_text(token, encoding="utf-8")

    def on_maker(self, name: str, make: bytes, method: str, *arguments: Any) -> Any:
        """Calls a method of what ``make``, a pickled callable, returns on the worker. Raises as
        :meth:`call`."""
        return self.call(name, functools.partial(on_maker, make, method, *arguments))

    def call(self, name: str, work: Callable[[], T]) -> T:
        """Returns what ``work``, which must be picklable, returns on a worker. Raises what it
        raises, Lost with the reason if two jobs were lost, MachineError if the worker or the engine
        cannot run it, and Interrupted after :meth:`stop`."""
        try:
            return self._once(name, work)
        except TooLong:
            raise
        except Lost as first:
            self._say(f"{name}: its job was lost ({first}); submitted again")
            try:
                return self._once(name, work)
            except TooLong:
                raise
            except Lost as second:
                raise Lost(
                    f"not run, because its job was lost twice: {first}; then {second}"
                ) from None

    def _once(self, name: str, work: Callable[[], T]) -> T:
        environment = {k: v for k, v in os.environ.items() if k.startswith("MOEDIAG_")}
        if self._stopping.is_set():
            raise Interrupted(f"stopped before {name}")
        call = Call(pickle.dumps(work), moediag.__version__, self._tokens, environment)
        while (reply := self._reply(name, call)).unfit:
            self._executor.avoid(reply.node, reply.unfit)
        if isinstance(reply.error, Interrupted):
            raise Lost("it was interrupted on its worker")
        if reply.error is not None:
            raise reply.error
        if reply.bug:
            raise RuntimeError(f"on the worker, {name}:\n{reply.bug}")
        value: T = reply.value
        return value

    def _reply(self, name: str, call: Call) -> Reply:
        submitted, started = time.monotonic(), None
        job = self._executor.submit(name, call)
        try:
            while (reply := job.reply()) is None:
                if self._stopping.wait(self._poll):
                    raise Interrupted(f"interrupted during {name}")
                now = time.monotonic()
                started = now if started is None and job.running else started
                if started is None and now - submitted > self._queue:
                    raise TooLong(f"not run, because it waited {self._queue:g} s in the queue")
                if started is not None and now - started > self._limit:
                    raise TooLong(f"not decided: it gave no result within {self._limit:g} s")
        except BaseException:
            job.cancel()
            raise
        return reply

    def stop(self) -> None:
        """Cancels all jobs: each thread that waits for one raises Interrupted."""
        self._stopping.set()

    def start_again(self) -> None:
        """Lets calls run again after :meth:`stop`, which has ended the earlier ones."""
        self._stopping.clear()

    def close(self) -> None:
        self.stop()
        for path in self._tokens:
            with contextlib.suppress(OSError):
                Path(path).unlink()
        self._executor.close()
