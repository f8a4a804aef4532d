"""The device mesh: one class for each axis, and the grid of ranks that their sizes span."""

from moediag.axes.axis import AXES, Axis, find, register, supported
from moediag.axes.layout import WORLD, Layout
from moediag.axes.mesh_axes import CP, DP_REPLICATE, DP_SHARD, EP, ETP, PP, TP

__all__ = [
    "AXES",
    "CP",
    "DP_REPLICATE",
    "DP_SHARD",
    "EP",
    "ETP",
    "PP",
    "TP",
    "WORLD",
    "Axis",
    "Layout",
    "find",
    "register",
    "supported",
]
