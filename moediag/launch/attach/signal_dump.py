"""Stacks that ranks write themselves on a signal, if they have called ``faulthandler.register``.

Only with the user's permission: nothing shows whose handler a signal has, and that of a scheduler
may save and end the job. A rank without a handler would die, so it gets no signal.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from moediag import protocol
from moediag.evidence import looks
from moediag.evidence.looks import Looks
from moediag.evidence.rank_stacks import in_collective, parse_faulthandler, that_counts
from moediag.launch.attach.looking import Target
from moediag.launch.attach.proc import Proc
from moediag.launch.processes import catches

_ANSWER = 4.0  # seconds
_PERIOD = 0.1
_MOST_BYTES = 1 << 20
_FIRST = "(most recent call first)"


def ask(folder: Path, targets: Sequence[Target], sig: signal.Signals, proc: Proc) -> list[str]:
    """Sends ``sig`` and keeps what each rank then wrote to its standard error as
    ``rank-N.stacks.txt``; returns what is missing."""
    asked = {}
    lost = []
    for target in targets:
        seen = proc.seen(target.process.pid)
        if seen is None or seen.state == "T":
            lost.append(f"rank {target.rank}: stacks on {sig.name} (it is stopped or gone)")
        elif not catches(target.process.pid, sig):
            lost.append(f"rank {target.rank}: stacks on {sig.name} (not sent: it has no handler)")
        else:
            output = Path(proc.root, str(target.process.pid), "fd", "2")
            asked[target.rank] = output, _size(output)
            target.process.send(sig)
    until = time.monotonic() + _ANSWER
    while asked and time.monotonic() < until:
        time.sleep(_PERIOD)
        for rank, (output, before) in list(asked.items()):
            text = _since(output, before) if before is not None else ""
            if _FIRST in text and text == _written(folder, rank):
                del asked[rank]
            elif _FIRST in text:
                (folder / protocol.stacks_file(rank)).write_text(text, encoding="utf-8")
    return [*lost, *_silent(asked, sig)]


def waiting(found: Looks, folder: Path) -> Looks:
    """``found``, in which ranks wait that py-spy could not read and whose own stacks show a
    collective. One outside Python's communication may still wait in C++."""
    ranks = dict(found.ranks)
    for rank in found.doing(looks.UNREAD):
        stack = that_counts(parse_faulthandler(_written(folder, rank)))
        if stack is not None and in_collective(stack):
            ranks[rank] = replace(ranks[rank], does=looks.WAITS)
    return replace(found, ranks=ranks)


def _silent(asked: dict[int, tuple[Path, int | None]], sig: signal.Signals) -> Iterator[str]:
    for rank, (_, before) in asked.items():
        why = "see the output of the job" if before is None else "nothing was written"
        yield f"rank {rank}: stacks on {sig.name} ({why})"


def _size(path: Path) -> int | None:
    """The size of a regular file; None for a pipe or a terminal."""
    with suppress(OSError):
        found = path.stat()
        return found.st_size if stat.S_ISREG(found.st_mode) else None
    return None


def _since(path: Path, offset: int) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(offset, os.SEEK_SET)
        return file.read(_MOST_BYTES).decode("utf-8", "replace")
    return ""


def _written(folder: Path, rank: int) -> str:
    with suppress(OSError):
        return (folder / protocol.stacks_file(rank)).read_text(encoding="utf-8")
    return ""
