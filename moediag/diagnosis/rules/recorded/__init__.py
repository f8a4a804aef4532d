"""Detectors of jobs that were only recorded, without measured numbers."""

__all__ = ["healthy_job", "no_records", "open_calls", "unknown_end"]
