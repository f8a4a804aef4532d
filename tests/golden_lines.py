"""Holds answers against stored files.

After an intended change write the file with ``MOEDIAG_GOLDEN=write``, and read its difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


def hold(name: str, key: str, found: Any, needed: bool = True) -> None:
    """Compares ``found`` with entry ``key`` of ``tests/golden/NAME``, as JSON. ``needed``: whether
    there must be such an entry."""
    file = FOLDER / name
    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if os.environ.get("MOEDIAG_GOLDEN") == "write":
        stored[key] = found
        text = json.dumps(stored, indent=1, sort_keys=True)
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{text}\n", encoding="utf-8")
    elif needed or key in stored:
        assert json.loads(json.dumps(found)) == stored.get(key), f"{key} in {name}"
