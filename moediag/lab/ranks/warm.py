"""Imports in advance everything that torch and transformers import lazily.

The first optimizer step, ``clip_grad_norm_`` and FSDP2 call import ``torch._dynamo`` and more. The
host does this once for all trials, so that a rank under load is not mistaken for a hung one. No
process group and no autograd here: the host forks its ranks afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from typing import Sequence

_LAZY = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.launcher.api",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.checkpoint",
    "torch.utils.serialization.config",
    "moediag.recorder.start",
    "moediag.recorder.background",
    "moediag.recorder.collectives",
    "moediag.recorder.data_loaders",
    "moediag.recorder.fsdp1",
    "moediag.recorder.fsdp2",
    "moediag.recorder.handled_errors",
    "moediag.recorder.missing_gradients",
    "moediag.lab.step.content",
    "moediag.lab.step.sequence",
    "moediag.lab.step.tasks.cost",
    "moediag.lab.step.tasks.generation",
    "moediag.lab.step.tasks.resume",
    "moediag.lab.step.tasks.step",
    "moediag.lab.step.tasks.trainer",
)
_TRAINERS = ("trl.trainer.sft_trainer", "datasets", "tokenizers")


def warm(families: Sequence[str]) -> None:
    """Imports ``families``: names of :data:`moediag.lab.families.FAMILIES`, or model types of the
    release. Skips those that the installed release lacks: the trial reports them."""
    import torch

    # TRL reads it on import. It counts its users, and a test is not one.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from moediag.lab.step import kernels

    kernels.interpret()  # torch._dynamo imports triton, and forked ranks have no GPU
    for name in _LAZY:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # another torch; the step imports what it has
    from moediag.lab.families import FAMILIES
    from moediag.lab.step.measure import reference  # noqa: F401
    from moediag.lab.step.models import release_families, tiny
    from moediag.recorder.not_applicable import NotApplicable

    if importlib.util.find_spec("trl") is not None:  # only a stack that asks for it has it
        for name in _TRAINERS:
            importlib.import_module(name)

    if importlib.util.find_spec("torchtitan") is not None:
        from moediag.lab.step import content

        with contextlib.suppress(NotApplicable):  # a release other than its scenario's
            content.program("tp-router").titan_cpu.load()

    for family in families:
        try:
            if family in FAMILIES:
                tiny.import_recipe(family)
            else:
                release_families.load(family)
        except NotApplicable:
            continue
    # It compiles a thousand patterns, which every process that loads or saves a model needs.
    with contextlib.suppress(ImportError, AttributeError):  # before 5.0 there was none
        from transformers import conversion_mapping

        conversion_mapping.get_checkpoint_conversion_mapping("")
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.zeros(2)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    torch.optim.AdamW([weight]).step()
