"""Detectors of trials that did not run far enough to be judged."""

__all__ = [
    "cut_short",
    "interrupted",
    "mixed_jobs",
    "no_measurements",
    "not_applicable",
    "not_comparable",
    "not_started",
]
