"""When a process started: with its pid that identifies it, because pids are used again."""

from __future__ import annotations

from pathlib import Path
from typing import List, Optional, Union

_STARTED = 19  # index of field 22 of /proc/PID/stat among those that follow the name


def stat_fields(pid: Union[int, str]) -> List[str]:
    """The fields of /proc/PID/stat from the third one, the state; empty when there is no such
    process, or no /proc."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The name is in parentheses and may itself hold blanks and parentheses.
    fields = raw[raw.rfind(")") + 2 :].split()
    return fields if len(fields) > _STARTED else []


def start_time(pid: Union[int, str] = "self") -> Optional[int]:
    """Clock ticks from the boot to the start of ``pid``; None when there is no such process."""
    fields = stat_fields(pid)
    return int(fields[_STARTED]) if fields else None
