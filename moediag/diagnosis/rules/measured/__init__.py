"""Detectors of trials in which every rank reached its end and left its numbers."""

__all__ = [
    "nonfinite_numbers",
    "nothing_compared",
    "only_timed",
    "repeated_samples",
    "resume_drift",
    "resume_exact",
    "resume_undecided",
    "right_numbers",
    "unequal_replicas",
    "wrong_gradients",
    "wrong_metrics",
    "wrong_norm",
    "wrong_ownership",
    "wrong_update",
]
