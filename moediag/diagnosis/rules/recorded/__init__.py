"""Detectors of jobs that were only recorded: nothing they computed was measured."""

__all__ = ["healthy_job", "no_records", "open_calls", "unknown_end"]
