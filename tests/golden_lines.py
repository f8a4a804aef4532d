"""Holds answers against a stored file with one line for each.

After an intended change write the file with ``MOEDIAG_GOLDEN=write``, and read its difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


def hold(name: str, key: str, found: Any, needed: bool = True) -> None:
    """Compares ``found`` with line ``key`` of ``tests/golden/NAME``, as JSON. ``needed``: whether
    there must be such a line."""
    file = FOLDER / name
    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if os.environ.get("MOEDIAG_GOLDEN") == "write":
        stored[key] = found
        lines = (
            f"{json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(stored.items())
        )
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    elif needed or key in stored:
        assert json.loads(json.dumps(found)) == stored.get(key), f"{key} in {name}"
