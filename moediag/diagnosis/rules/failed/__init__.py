"""Detectors of ranks that raised, died, or were stopped by the guard."""

__all__ = [
    "crash",
    "guard_stop",
    "lost_connection",
    "lost_node",
    "reported_mismatch",
    "schedule_mismatch",
]
