"""Compares the ranks' schedules: which calls meet, where they diverge, what does not complete."""

__all__ = [
    "align",
    "device_frontier",
    "diverge",
    "matching",
    "replay",
    "starvation",
    "step_offset",
    "stuck_calls",
    "usual_order",
]
