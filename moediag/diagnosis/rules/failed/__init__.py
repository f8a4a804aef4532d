"""Detectors of ranks that raised, died, or were stopped by the guard."""

__all__ = [
    "crash",
    "guard_stop",
    "logged_positions",
    "lost_connection",
    "lost_node",
    "reported_absence",
    "reported_end",
    "reported_mismatch",
    "schedule_mismatch",
]
