"""Schedules of all ranks side by side: who met whom, where they part, what does not complete."""

__all__ = [
    "align",
    "device_position",
    "diverge",
    "matching",
    "replay",
    "starvation",
    "step_offset",
    "stuck_calls",
    "usual_order",
]
