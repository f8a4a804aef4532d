"""The checks of ``moediag watch --laws`` for programs that do not run under it.

    import moediag.laws

    dist.init_process_group()
    moediag.laws.record("laws-run")     # on every rank, before the model is wrapped
    ...                                 # train as usual
    moediag.laws.finish()               # or let the program end

``moediag diagnose laws-run`` then compares the ranks' logs. Nothing is sent between the ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moediag import protocol

__all__ = ["allow", "finish", "place", "record", "recording", "records"]

_log = logging.getLogger("moediag")
_recorder: Any = None
_claimed: Any = None  # keeps other processes out of the folder


def record(folder: str, every: int = 0) -> bool:
    """Records this rank into ``folder`` from now on, which all ranks must reach or which is copied
    together afterwards. Steps 1, 2, 3 are checked, then 6, 12, 24 and so on, or every ``every``
    steps. Files of an earlier run in ``folder`` are moved into a folder in it. Does nothing in a
    job under ``moediag watch``, and while it records already; returns whether it began.

    Raises UsageError for a wrong argument, OSError if ``folder`` cannot be written, RuntimeError if
    another process records the same rank into it.
    """
    global _claimed, _recorder
    if _recorder is not None or protocol.ENV_WATCH in os.environ:
        return False
    from moediag import arguments
    from moediag.recorder import fresh_folder, install

    arguments.path("folder", folder)
    arguments.whole("every", every, 0)
    rank, world_size = place()
    Path(folder).mkdir(parents=True, exist_ok=True)
    _claimed = fresh_folder.claim(folder, rank)
    if earlier := fresh_folder.set_aside(folder, rank, world_size):
        _log.info("records of an earlier run of rank %d are in %s now", rank, earlier)
    protocol.Trial(
        name="laws", scenario=Path(sys.argv[0]).name or "python", variant=protocol.LAWS_VARIANT,
        launcher="", world_size=world_size, backend="", task=protocol.WatchTask(),
    ).write(folder)  # fmt: skip
    before = os.environ.get(protocol.ENV_LAWS)
    os.environ[protocol.ENV_LAWS] = str(every)
    try:
        _recorder = install(folder, rank, world_size, of_job=True)
    finally:
        if before is None:
            del os.environ[protocol.ENV_LAWS]
        else:
            os.environ[protocol.ENV_LAWS] = before
    atexit.register(_at_exit)
    return True


def allow(law: str) -> None:
    """Says that the program breaks ``law`` on purpose: ``"replicas-apart"``, or only for parameters
    whose names match a pattern of the shell, ``"replicas-apart:experts.*"``. The laws are those of
    docs/reference/laws.md. Does nothing where nothing is recorded for the laws.

    Raises UsageError for one that does not exist (Python 3.10 and newer).
    """
    from moediag.recorder import start

    if sys.version_info >= (3, 10):  # noqa: UP036  # the list of laws needs it, ranks do not
        from moediag import arguments
        from moediag.diagnosis import LAW_NAMES

        arguments.law(f"law={law!r}", law, LAW_NAMES)

    if start.installed is not None and start.installed.allow is not None:
        start.installed.allow(law)


def records() -> bool:
    """Whether this process records now."""
    return _recorder is not None


def finish(error: BaseException | None = None) -> None:
    """Ends the record of this rank as that of a rank that finished normally, or that ``error``
    ended."""
    global _recorder
    from moediag import arguments

    arguments.exception("error", error)
    recorder, _recorder = _recorder, None
    if recorder is None:
        return
    from moediag.recorder import fresh_folder

    if error is None:
        recorder.finish()
    else:
        recorder.error(error)
    recorder.uninstall()
    fresh_folder.release(_claimed)


@contextlib.contextmanager
def recording(folder: str, every: int = 0) -> Iterator[None]:
    """:func:`record` inside the block; an exception is recorded as the rank's end. Every rank calls
    it; :func:`moediag.diagnose` reads the record.

        import torch

        import moediag

        with moediag.laws.recording("laws-run"):
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()

        (trial,) = moediag.diagnose("laws-run").trials
        assert trial.verdict == "clean"
    """
    record(folder, every)
    try:
        yield
    except BaseException as error:
        finish(error)
        raise
    finish()


def _at_exit() -> None:
    """The interpreter ends, perhaps by an exception that nobody caught."""
    finish(getattr(sys, "last_value", None))


def place() -> tuple[int, int]:
    """The rank and the number of ranks: of the process group, else of the launcher."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return _number("RANK", 0), _number("WORLD_SIZE", 1)


def _number(variable: str, otherwise: int) -> int:
    value: str | None = os.environ.get(variable)
    return int(value) if value else otherwise
