"""Copies the Flight Recorder dumps of torch's watchdog into the run directory. In /tmp, the next
job would overwrite them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from moediag import protocol


def keep(folder: Path, ranks: Iterable[int], since: float) -> None:
    """Copies each rank's newest dump written after ``since`` (epoch seconds). The rank's pid file
    has their paths."""
    for rank in ranks:
        target = folder / protocol.watchdog_dump(rank)
        with suppress(OSError, ValueError, TypeError):
            raw = json.loads((folder / protocol.pid_file(rank)).read_text(encoding="utf-8"))
            places = [Path(f"{prefix}{rank}") for prefix in raw.get("flight_dumps") or ()]
            written = [p for p in places if p.is_file() and p.stat().st_mtime >= since]
            if written and not target.exists():
                shutil.copyfile(max(written, key=lambda p: p.stat().st_mtime), target)
