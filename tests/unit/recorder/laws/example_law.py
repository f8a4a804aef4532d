"""Records the dtype that new tensors have, at checked steps.

default_dtype   step dtype
"""

from __future__ import annotations

import torch

from moediag.recorder.laws.context import LawContext


def install(context: LawContext) -> None:
    def write(step: int) -> None:
        context.log.event("default_dtype", step=step, dtype=str(torch.get_default_dtype()))

    context.on_check.append(write)
