"""Simulated nights for the tests of `moediag nightly`."""

from __future__ import annotations

from typing import Any

from moediag.lab.campaign.nightly.night import Entry, Job, Night

STACK = {"python": "3.11.7", "transformers": "5.0.0", "accelerate": "1.12.0", "torch": "2.13.0+cpu"}


def entry(state: str = "bad", version: str = "5.0.0", **changes: Any) -> Entry:
    verdict = {"good": "clean", "bad": "hang", "unknown": "inconclusive"}[state]
    signature = "hang:all_gather:dp_shard" if state == "bad" else verdict
    values = {
        "scenario": "starve", "variant": "unfixed", "role": "unfixed", "state": state,
        "track": "transformers=newest", "verdict": verdict, "expected": "hang",
        "signature": signature, "stack": {**STACK, "transformers": version},
        "command": "moediag run starve --variant unfixed --cpu 2", **changes,
    }  # fmt: skip
    return Entry(**values)


def night(day: int, *entries: Entry, lane: str = "cpu-2", **changes: Any) -> Night:
    values = {"moediag_version": "1.0", "machine": {}, "complete": True, **changes}
    return Night(f"2026-03-{day:02}T02:00:00.000+00:00", lane, entries=entries, **values)


def job(scenario: str = "starve", track: str = "pinned", **changes: Any) -> Job:
    return Job(scenario, track, **{"finished": True, "seconds": 10.0, **changes})
