"""Inline SVG of a result's numbers: one module per chart, each from plain data to markup.

Coordinates are percentages of the width, so text keeps its size on a phone. Colours and dashes are
CSS classes of the page; what a colour says is also a letter, a number, a dash or a text.
"""

__all__ = ["bars", "error_map", "rank_grid", "svg", "token_map", "wait_lanes"]
