"""Detectors of trials that did not run to an end that could be judged."""

__all__ = ["cut_short", "interrupted", "no_measurements", "not_applicable", "not_started"]
