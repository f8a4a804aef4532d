"""A worker that a queueing system starts: it performs the calls in a folder, one after the other.

A job of one item would start Python and import torch for each. A call is taken by renaming it, so
only one worker has it; the name then says which:

- ``KEY.call``: not taken; ``KEY.alone.call``: for a worker that has performed none;
- ``KEY.JOB.N.taken``: the N-th call of the worker of that job;
- ``KEY.reply``: the reply;
- ``JOB.up``: the worker of that job has started.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moediag
from moediag.lab.campaign.executors import worker
from moediag.lab.campaign.executors.executor import Reply

IDLE = 30.0  # seconds without a call after which it ends
POLL = 0.3  # seconds
MARGIN = 1.5  # what the time left must be of the longest call so far

ALONE = ".alone.call"
CALL = ".call"
REPLY = ".reply"
TAKEN = ".taken"
UP = ".up"


def serve(
    folder: Path, job: str, seconds: float, perform: Callable[..., Reply] = worker.perform,
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> None:  # fmt: skip
    """Performs calls until none comes for :data:`IDLE` seconds, the next one may not end within the
    ``seconds`` of the job, or the node is not fit for any."""
    begun = free = clock()
    longest, served = 0.0, 0
    (folder / f"{job}{UP}").touch()
    while not served or seconds - (clock() - begun) > MARGIN * longest:
        waiting = sorted(path.name for path in folder.glob(f"*{CALL}"))
        ours = [name for name in waiting if not (served and name.endswith(ALONE))]
        taken = next(filter(None, (_take(folder, name, job, served + 1) for name in ours)), None)
        if taken is None:
            if clock() - free > IDLE or (waiting and not ours):
                return
            sleep(POLL)
            continue
        started = clock()
        reply = perform(*pickle.loads(taken.read_bytes()))  # noqa: S301 - from the command
        put(folder, taken.name.removesuffix(f".{job}.{served + 1}{TAKEN}"), reply)
        taken.unlink(missing_ok=True)
        free, served = clock(), served + 1
        longest = max(longest, free - started)
        if reply.unfit:
            return


def put(folder: Path, key: str, reply: Reply) -> None:
    """Writes a reply, whole or not at all."""
    try:
        data = pickle.dumps((moediag.__version__, reply))
    except Exception:
        data = pickle.dumps((moediag.__version__, Reply(bug=traceback.format_exc())))
    unfinished = folder / f"{key}.unfinished"
    unfinished.write_bytes(data)
    unfinished.replace(folder / f"{key}{REPLY}")


def _take(folder: Path, name: str, job: str, number: int) -> Path | None:
    """Returns the file of a call that is ours now, None if another worker was first."""
    key = name.removesuffix(CALL).removesuffix(".alone")
    taken = folder / f"{key}.{job}.{number}{TAKEN}"
    try:
        (folder / name).rename(taken)
    except OSError:
        return None
    return taken


def main(folder: str, seconds: str) -> None:
    def end(*_: Any) -> None:
        raise KeyboardInterrupt  # so that the ranks of an item end with it

    signal.signal(signal.SIGTERM, end)
    try:
        serve(Path(folder), os.environ["SLURM_JOB_ID"], float(seconds))
    finally:
        worker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
