"""Seconds of work on a device, and the most that its matrix units do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """On a GPU by its own events, so that a host that runs ahead does not count as done."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def matrix_peak(device: torch.device, side: int) -> float:
    """FLOP/s of the product of two square bf16 matrices of ``side``: the median of ten after
    three."""
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    times = [seconds(lambda: left @ right, device) for _ in range(13)][3:]
    return 2.0 * side**3 / statistics.median(times)


def median(times: list[float]) -> dict[str, float]:
    """Milliseconds: the median and both quartiles."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"median": 1e3 * middle, "low": 1e3 * low, "high": 1e3 * high}
