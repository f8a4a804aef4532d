"""docs/reference/launchers.md states numbers; they must be the code's."""

from __future__ import annotations

from pathlib import Path

from moediag.launch.follow import supervise, watchdog
from moediag.launch.settings import LaunchOptions

DOCS = Path(__file__).parents[3] / "docs"
TEXT = " ".join((DOCS / "reference" / "launchers.md").read_text(encoding="utf-8").split())


def test_the_numbers_on_the_page_match_the_code() -> None:
    options = LaunchOptions()
    assert f"quiescence window ({options.quiescence:.0f} s)" in TEXT
    assert f"more than {watchdog.CPU_SHARE:.0%}".replace("%", " %") in TEXT
    assert f"all ranks in parallel, within {options.capture} s" in TEXT
    assert f"Peers get {options.settle} s to fail" in TEXT
    assert f"({supervise.LEAVE:.0f} s if they wrote an error)" in TEXT
