"""Detectors of jobs that were only recorded, without measured numbers."""

__all__ = [
    "failed_calls",
    "healthy_job",
    "no_records",
    "open_calls",
    "trained_alone",
    "unknown_end",
]
