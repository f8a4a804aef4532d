"""Gradients beside the single-process reference, parameter by parameter, on each rank's shard.

The reference ran in fp32 from the same (possibly rounded) weights. A parameter is wrong when its
largest absolute difference exceeds ``atol + rtol * max |reference of that parameter|``; both are
calibrated on healthy controls: fp32 differs by summation order alone (1e-7 and less), bf16 by
rounding of every activation.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch

from moediag.protocol import GradientError
from moediag.worker.wrap import Wrapped

# dtype of the parameters -> (rtol, atol as a share of the largest gradient of the model)
TOLERANCE = {"float32": (1e-3, 1e-5), "bfloat16": (1e-1, 1e-2)}


def compare(
    wrapped: Wrapped, reference: Dict[str, Optional[torch.Tensor]], dtype: str
) -> Dict[str, GradientError]:
    """``reference``: FQN -> full gradient (fp32) or None where no rank's batch reached it, which
    equals zero. Collective for FSDP1 and DeepSpeed: call it on all ranks or on none."""
    rtol, share = TOLERANCE[dtype]
    largest = max((float(g.abs().max()) for g in reference.values() if g is not None), default=0.0)
    atol = share * largest
    errors: Dict[str, GradientError] = {}
    for fqn, local, select in wrapped.gradients():
        full = reference.get(fqn)
        scale = 0.0 if full is None else float(full.abs().max())
        expected = None if full is None else select(full)
        if local is None and expected is None:
            errors[fqn] = GradientError(0.0, 0.0, wrong=False)
            continue
        actual = torch.zeros_like(expected) if local is None else local.detach().float().cpu()
        difference = actual if expected is None else actual - expected
        max_abs = float(difference.abs().max()) if difference.numel() else 0.0
        # `not <=` rather than `>`: a nan is wrong.
        wrong = not max_abs <= atol + rtol * scale
        errors[fqn] = GradientError(
            _finite(max_abs), scale, wrong=wrong, missing=wrong and local is None
        )
    return errors


def _finite(value: float) -> Any:
    """JSON has no nan: given as text."""
    return value if value == value and abs(value) != float("inf") else str(value)
