"""`moediag attach --follow`: looks at a running job again and again until it hangs or ends."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from moediag import protocol
from moediag.errors import UsageError
from moediag.evidence import looks
from moediag.pipeline.attach import Attached
from moediag.records import dataclass
from moediag.result import FAILURES, Verdict

# Seconds after which a job that was not found is looked for once more: it may restart.
_AGAIN = 10.0
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Followed:
    """A job that was followed."""

    last: Attached
    """The last look."""
    ended: bool
    """The job ended, and no look found a failure."""
    clean: int
    """How many looks found that the job progresses."""


def follow(
    look: Callable[[Path | None], Attached], out: Path | None, every: float,
    tell: Callable[[str], None], pause: Callable[[float], None] = time.sleep,
) -> Followed:  # fmt: skip
    """Looks every ``every`` seconds, always into the same run directory, until a look finds a
    failure or, twice in a row, no job. ``tell`` gets the cause of each new undecided look. Raises
    UsageError if the first look finds no job."""
    last = look(out)
    clean, missed, told = 0, False, ""
    while True:
        found = last.result.trials[-1]
        if found.verdict in FAILURES:
            return Followed(last, False, clean)
        missed = missed or _ended(last.folder)
        clean += found.verdict == Verdict.CLEAN and not missed
        kind = _NUMBERS.sub("", found.cause)
        if found.verdict != Verdict.CLEAN and not missed and kind != told:
            tell(found.cause)
            told = kind
        pause(_AGAIN if missed else every)
        try:
            last, missed = _again(look, last.folder), False
        except UsageError:
            if missed:
                return Followed(last, True, clean)
            missed = True


def _ended(folder: Path) -> bool:
    """Whether the ranks ended while they were looked at."""
    seen = looks.read(folder / protocol.attempt_folder(0))
    return seen is not None and len(seen.doing(looks.GONE)) == len(seen.ranks)


def _again(look: Callable[[Path | None], Attached], folder: Path) -> Attached:
    """Looks into the same run directory. The last look stays there until there is another one."""
    kept = folder.with_name(f".{folder.name}-before")
    folder.rename(kept)
    try:
        found = look(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        kept.rename(folder)
        raise
    shutil.rmtree(kept)
    return found
