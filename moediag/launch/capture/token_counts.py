"""Reads the last recorded tokens per expert from the ends of growing logs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from moediag.protocol import events_file

_TAIL = 64 * 1024


def last_loads(folder: Path, ranks: Iterable[int]) -> dict[str, list[int]]:
    """Returns, by MoE block, the sum over ranks of the last counts at the end of each log; empty if
    there are none."""
    total: dict[str, list[int]] = {}
    for rank in ranks:
        for layer, counts in _of_rank(folder / events_file(rank)).items():
            have = total.setdefault(layer, [0] * len(counts))
            if len(have) == len(counts):
                total[layer] = [a + b for a, b in zip(have, counts, strict=True)]
    return total


def _of_rank(path: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with suppress(OSError), path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL))
        for line in file.read().split(b"\n"):
            if line.startswith(b'{"e":"tokens"'):
                with suppress(ValueError, KeyError, TypeError):
                    event = json.loads(line)
                    found[str(event["layer"])] = [int(n) for n in event["counts"]]
    return found
