"""Makes a folder of records that a program names itself, and may name again, that of one run.

Ranks send each other nothing here, so each rank moves only its own files, and rank 0 those of ranks
that this run does not have. A reader tells apart what is left by :func:`run_name`.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import IO, Optional

from moediag.protocol import events_file

EARLIER = "earlier-"  # prefix of the folders for files of earlier runs
_OF_RUN = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")


def run_name() -> str:
    """Returns what launchers tell all ranks of one run alike; "" without a launcher."""
    told = [os.environ.get(variable, "") for variable in _OF_RUN]
    return "/".join(told) if any(told) else ""


def claim(folder: str, rank: int) -> Optional[IO[str]]:
    """Returns an open file whose lock makes this process the only one that records ``rank`` into
    ``folder``; None where files cannot be locked. The kernel frees it when the process ends.

    Raises RuntimeError if another process holds it.
    """
    try:
        import fcntl
    except ImportError:
        return None
    path = Path(folder) / f".rank-{rank}.lock"
    file = path.open("a+", encoding="utf-8")
    try:
        # A record lock: forked workers of a data loader do not inherit it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise RuntimeError(
            f"{folder}: process {holder or '(unknown)'} records rank {rank} into this folder now; "
            "give each job its own folder"
        ) from None
    except OSError:  # a file system without locks
        file.close()
        return None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def release(claimed: Optional[IO[str]]) -> None:
    """Frees what :func:`claim` returned."""
    if claimed is not None:
        Path(claimed.name).unlink(missing_ok=True)
        claimed.close()


def set_aside(folder: str, rank: int, world_size: int) -> str:
    """Moves this rank's files of an earlier run, and on rank 0 those of ranks from ``world_size``
    on, into a folder beside them. Returns that folder, "" if there were none."""
    place = Path(folder)
    old = [path for path in place.glob("rank-*.*") if _is_moved(path.name, rank, world_size)]
    if not old:
        return ""
    log = place / events_file(rank)
    written = max(path.stat().st_mtime for path in ([log] if log.exists() else old))
    target = place / (EARLIER + time.strftime("%Y%m%d-%H%M", time.localtime(written)))
    target.mkdir(exist_ok=True)
    for path in old:
        path.replace(_free(target / path.name))
    return str(target)


def _is_moved(name: str, rank: int, world_size: int) -> bool:
    found = re.match(r"rank-(\d+)\.", name)
    number = int(found[1]) if found else -1
    return number == rank or (rank == 0 and number >= world_size)


def _free(path: Path) -> Path:
    """``path``, or with a number where two earlier runs ended in the same minute."""
    taken, number = path, 1
    while taken.exists():
        number += 1
        taken = path.with_name(f"{number}-{path.name}")
    return taken
