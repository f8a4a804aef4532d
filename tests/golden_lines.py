"""Holds answers against stored files.

After an intended change write the file with ``MOEDIAG_GOLDEN=write``, and read its difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


WIDTH = 118


def hold(name: str, key: str, found: Any, needed: bool = True, compact: bool = False) -> None:
    """Compares ``found`` with entry ``key`` of ``tests/golden/NAME``, as JSON. ``needed``: whether
    there must be such an entry. ``compact``: the file has what fits on a line on one."""
    file = FOLDER / name
    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if os.environ.get("MOEDIAG_GOLDEN") == "write":
        stored[key] = found
        text = _compact(stored) if compact else json.dumps(stored, indent=1, sort_keys=True)
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")
    elif needed or key in stored:
        assert json.loads(json.dumps(found)) == stored.get(key), f"{key} in {name}"


def _compact(value: Any, inside: int = 0) -> str:
    line = json.dumps(value, sort_keys=True)
    if len(line) + inside <= WIDTH or not isinstance(value, (dict, list)):
        return line
    if isinstance(value, dict):
        parts = [
            f"{json.dumps(key)}: {_compact(one, inside + 1)}" for key, one in sorted(value.items())
        ]
    else:
        parts = [_compact(one, inside + 1) for one in value]
    lines = [parts[0]]
    for part in parts[1:]:
        if "\n" in lines[-1] + part or len(lines[-1]) + len(part) + inside > WIDTH:
            lines.append(part)
        else:
            lines[-1] += f", {part}"
    first, last = "{}" if isinstance(value, dict) else "[]"
    return (
        first
        + ",".join(f"\n{' ' * (inside + 1)}{one}" for one in lines)
        + f"\n{' ' * inside}{last}"
    )
