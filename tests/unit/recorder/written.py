"""What rank 0 has written into a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moediag.evidence.law_model import RankLaws
from moediag.evidence.law_records import read_laws


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "rank-0.events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["e"] == kind]


def laws(folder: Path) -> RankLaws:
    found, lost = read_laws(folder, 0)
    assert found is not None
    assert not lost
    return found
