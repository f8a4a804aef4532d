"""Times work on a device, and measures the peak of its matrix units."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of ``work``; on a GPU by its own events, because the host runs ahead."""
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
    """Returns the FLOP/s of a product of two square bf16 matrices of ``side``: the median of ten,
    after three warm-up products."""
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    times = [seconds(lambda: left @ right, device) for _ in range(13)][3:]
    return 2.0 * side**3 / statistics.median(times)


def median_within(values: list[float]) -> tuple[float, float]:
    """Returns the interval that holds the median of all such values with 95 % confidence, by order
    statistics; from the least to the greatest where there are too few values to say so."""
    ordered, count = sorted(values), len(values)
    outside = int((count - 1.96 * count**0.5) / 2)
    outside = max(0, outside)
    return ordered[outside], ordered[count - 1 - outside]


def median(times: list[float]) -> dict[str, float]:
    """Returns the median and both quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return {"median": 1e3 * middle, "low": 1e3 * low, "high": 1e3 * high}
