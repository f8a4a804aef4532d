"""DeepSpeed ZeRO for the step under test; an optional extra that the stack must include.

On the CPU, DeepSpeed would compile a shared-memory kernel at start-up, and a stale lock of an
interrupted build makes later starts hang. So the builder is disabled, and gloo is used.
"""

from __future__ import annotations

import os
import sys
from typing import Any, ContextManager, Optional

import torch
from torch import nn

from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable

NOTE = "DeepSpeed on the CPU without its shared-memory kernel (build_shm_op switched off)"


def initialize(model: nn.Module, trial: Trial) -> Any:
    """Returns the DeepSpeed engine of stage 2 or 3 (``trial.wrapper.kind``). Raises NotApplicable
    if the stack has no deepspeed."""
    on_cpu = trial.backend == "gloo"
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
    except ImportError as error:
        raise NotApplicable(
            f"this stack has no deepspeed ({error}); add it, e.g. --stack deepspeed=0.19.8"
        ) from error
    communication: Any = sys.modules.get("deepspeed.comm.torch")
    if on_cpu and communication is not None and hasattr(communication, "build_shm_op"):
        communication.build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend=trial.backend)
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(parameters, lr=trial.step.lr),
        config=_config(trial),
        dist_init_required=False,
    )
    return engine


def _config(trial: Trial) -> Any:
    step = trial.step
    config = {
        "train_micro_batch_size_per_gpu": step.batch,
        "gradient_accumulation_steps": step.accumulate,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3 if trial.wrapper.kind == "zero3" else 2,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
        },
        "steps_per_print": 1_000_000,
    }
    if step.clip is not None:
        config["gradient_clipping"] = step.clip
    if trial.model.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    return config


def gathered(model: nn.Module) -> ContextManager[Any]:
    """Gathers parameters, which ZeRO-3 empties, on every rank while they are read. Collective."""
    import deepspeed

    context: ContextManager[Any] = deepspeed.zero.GatheredParameters(list(model.parameters()))
    return context


def full_gradient(parameter: nn.Parameter) -> Optional[torch.Tensor]:
    """Returns the whole reduced gradient, fp32, collected from its partitions. Collective."""
    from deepspeed.utils import safe_get_full_grad

    gradient: Optional[torch.Tensor] = safe_get_full_grad(parameter)
    return gradient
