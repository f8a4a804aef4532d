"""Detectors of hangs."""

__all__ = [
    "busy_ranks",
    "diverged_schedules",
    "idle_ranks",
    "silent_node",
    "stacks_alone",
    "stuck_operation",
    "stuck_watchdog",
    "unexplained_wait",
    "unmet_ranks",
]
