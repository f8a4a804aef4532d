"""How many random cases a test tries: an eighth of them in CI, all of them in `make wide`."""

from __future__ import annotations

import os

DEEP = os.environ.get("DEEP_TESTS") == "1"


def cases(number: int) -> int:
    return number if DEEP else max(1, number // 8)
