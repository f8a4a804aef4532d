"""The result object on stdout, in JSON that every parser accepts."""

from __future__ import annotations

import json
import math
from typing import Any

from moediag.report.printable import in_json
from moediag.result import RunResult


def render(result: RunResult) -> str:
    """Returns one JSON object and a newline. A gradient error of nan or inf becomes the text
    ``nan``, ``inf`` or ``-inf``, because JSON has no such numbers."""
    whole = finite(result.to_json())
    return in_json(json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)) + "\n"


def finite(value: Any) -> Any:
    """Returns the same structure with non-finite numbers as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
