"""Detectors of hangs."""

__all__ = [
    "busy_ranks",
    "diverged_schedules",
    "idle_ranks",
    "silent_node",
    "stuck_operation",
    "unexplained_wait",
]
