"""What a campaign of cheap items must leave; `python -m bench.endurance --campaigns` runs them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.endurance import campaigns, cheap_items


def test_what_a_campaign_left_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cheap_items, "HASHES", 1)
    found = campaigns.Round(campaigns.LOCAL, 3, 0.0, 0.0)
    one = campaigns._Campaign(found, tmp_path, {}, 0.0, random.Random(0))
    cheap_items.main([str(one.out), "3", "local"])
    expected = campaigns._results(3)
    one._check(expected)
    assert found.failures == []
    journal = one.out / "journal.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:-1], lines[1]]))
    (one.out / ".seen-by-workers-a").touch()
    one._check(expected)
    assert [text.split(":")[0] for text in found.failures] == [
        "an item is in the journal twice", "3 results, which are not the local ones",
        "files are left",
    ]  # fmt: skip
