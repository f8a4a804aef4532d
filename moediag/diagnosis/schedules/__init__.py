"""Compares the ranks' schedules: which calls meet, where they diverge, what does not complete."""

__all__ = [
    "align",
    "device_frontier",
    "diverge",
    "matching",
    "replay",
    "starvation",
    "stuck_calls",
    "usual_order",
]
