"""A saved tiny checkpoint and the library's own way to load it, sharded or not.

The reference run saves the model once; every rank then calls ``from_pretrained``, with a
``DistributedConfig`` if it divides the model along an axis of the layout. The arguments for expert
parallelism changed three times (measured on 5.7 to 5.23) and those for tensor parallelism once;
only :func:`spelling` and :func:`plan` depend on that.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import traceback
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import torch
from torch import nn

from moediag.axes import EP, TP
from moediag.lab.step import kernels
from moediag.lab.step.models import release_families, tiny
from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable

SHARDERS = ("transformers", "fsdp2", "accelerate")  # wrapper kinds that support an ep axis


def save(model: nn.Module, folder: Path) -> None:
    """Saves the unsharded model atomically: ``folder`` is complete or absent."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    saving: Any = model
    saving.save_pretrained(str(temporary))
    temporary.replace(folder)


def expert_parallel(trial: Trial) -> int:
    """Returns the size of the ep axis, 1 without one."""
    return trial.layout.get(EP, 1)


def spelling(trial: Trial) -> Optional[Dict[str, Any]]:
    """Returns the DistributedConfig arguments of the installed release for the trial's layout; None
    if it needs none. Raises NotApplicable.

    - before 5.13: ``enable_expert_parallel`` alone; the ep axis is the whole world;
    - 5.13 to 5.18: ``tp_size`` ranks share a batch and divide the experts, with ``fsdp_size``;
    - 5.19 on: ``ep_size``; with FSDP the axis is part of ``fsdp_size``, without it part of
      ``tp_size``, which also shards the other weights unless ``tp_plan`` is empty. 5.19 ignores
      that, and 5.23 (whose ranks also exchange tokens if they share a batch) refuses it.
    """
    wrapper, ep = trial.wrapper, expert_parallel(trial)
    if wrapper.distributed_config is not None:
        return dict(wrapper.distributed_config)
    if trial.layout.get(TP, 1) > 1:
        return _tensor_parallel(trial)
    shards = trial.world_size // ep
    if not wrapper.native_fsdp and shards > 1 and (ep > 1 or wrapper.kind == "transformers"):
        left = f"{shards} ranks for each expert" if ep > 1 else f"{shards} ranks"
        raise NotApplicable(
            f"the layout leaves {left}, and nothing shards or replicates over them: kind "
            f"{wrapper.kind} needs an ep axis of {trial.world_size}"
        )
    if ep == 1 and not wrapper.native_fsdp:
        return None
    known = distributed_fields()
    if "ep_size" in known and wrapper.native_fsdp:
        return {"fsdp_size": trial.world_size, "ep_size": ep}
    if "tp_size" not in known and wrapper.native_fsdp:
        raise NotApplicable(f"from_pretrained of transformers {version()} cannot shard by FSDP2")
    if ep > 1 and wrapper.kind in SHARDERS:  # a Trainer distributes batches in its own way
        _one_batch(trial)
    if "ep_size" in known:
        asked: Dict[str, Any] = {"tp_size": ep, "ep_size": ep}
        return asked if "ep_implementation" in known else dict(asked, tp_plan={})
    if "tp_size" in known:
        asked = {"fsdp_size": shards} if wrapper.native_fsdp else {}
        return dict(asked, tp_size=ep, enable_expert_parallel=True) if ep > 1 else asked
    return {"enable_expert_parallel": True}


def _tensor_parallel(trial: Trial) -> Optional[Dict[str, Any]]:
    """Returns the arguments of 5.13 and later, which cut by the model's tp_plan and also shard by
    FSDP2. None for older releases, where ``tp_plan`` is an argument of from_pretrained, see
    :func:`plan`."""
    tp, wrapper, model = trial.layout[TP], trial.wrapper, trial.model
    shards = trial.world_size // tp
    if shards > 1 and not wrapper.native_fsdp:
        raise NotApplicable(
            f"the layout leaves {shards} ranks for each piece, and nothing shards or replicates "
            f"over them: set wrapper.native_fsdp, or {TP} to {trial.world_size}"
        )
    if model.kv_heads % tp or model.heads % tp:
        raise NotApplicable(
            f"{model.heads} heads and {model.kv_heads} key/value heads cannot be divided over "
            f"{tp} ranks"
        )
    if _asked_by_argument():
        if wrapper.native_fsdp:
            raise NotApplicable(
                f"from_pretrained of transformers {version()} cannot shard by FSDP2"
            )
        return None
    sharded = {"fsdp_size": shards} if shards > 1 else {}
    return dict(sharded, tp_size=tp)


def _asked_by_argument() -> bool:
    """Whether this release accepts ``tp_plan`` as an argument of from_pretrained."""
    try:
        return "tp_size" not in distributed_fields()
    except NotApplicable:  # no DistributedConfig at all
        return True


def plan(trial: Trial, asked: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """Returns from_pretrained arguments for tensor parallelism if DistributedConfig does not cover
    it; else empty. Raises NotApplicable."""
    if trial.layout.get(TP, 1) == 1 or trial.wrapper.distributed_config is not None:
        return {}
    config_class: Any = tiny.import_family(trial.model)[0]
    config = config_class.from_pretrained(str(trial.checkpoint_path))
    if not any(getattr(c, "base_model_tp_plan", None) for c in (config, config.get_text_config())):
        raise NotApplicable(f"{trial.model.family} of transformers {version()} has no tp_plan")
    if asked is not None:
        return {}
    if importlib.util.find_spec("accelerate") is None:
        raise NotApplicable(f"tp_plan of transformers {version()} needs accelerate")
    return {"tp_plan": "auto"}


def _declares_pieces(model: nn.Module, trial: Trial) -> None:
    """Raises NotApplicable if a plain tensor is a piece of a parameter: nothing identifies the
    piece, and packed matrices are not cut into equal runs of rows."""
    if trial.layout.get(TP, 1) == 1:
        return
    with torch.device("meta"):
        whole = {n: p.shape for n, p in tiny.build(trial.model, trial.step.seed).named_parameters()}
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "placements") and parameter.shape != whole[name]:
            raise NotApplicable(
                f"transformers {version()} loads {name} as a plain tensor with a part of its "
                "elements and does not declare which part"
            )


def _one_batch(trial: Trial) -> None:
    """Raises NotApplicable if the ranks of an ep axis must share a batch and would not: they would
    sum different tokens, so the trial itself would make the gradients wrong."""
    if trial.skew.batches not in ("identical", "per-replica"):
        raise NotApplicable(
            f"asked this way, transformers {version()} lets the ranks of an ep axis share a "
            f"batch, and skew.batches is {trial.skew.batches}: set it to per-replica"
        )


def notes(trial: Trial) -> List[str]:
    """Returns how the library was called, for the result."""
    if trial.model.source != "checkpoint":
        return []
    asked = spelling(trial)
    if asked is not None:
        return [f"from_pretrained was asked by {words(asked)}"]
    return [f"from_pretrained was asked by {k}={v!r}" for k, v in plan(trial, asked).items()]


def words(asked: Dict[str, Any]) -> str:
    """Returns ``DistributedConfig(fsdp_size=2, ep_size=2)``."""
    return f"DistributedConfig({', '.join(f'{k}={v!r}' for k, v in asked.items())})"


def from_checkpoint(trial: Trial, device: torch.device) -> nn.Module:
    """Returns the model of ``trial.checkpoint_path`` in training mode, loaded as the trial
    requires, with parameters on ``device``. Collective if it is sharded. Raises NotApplicable, and
    what the library raises."""
    config_class, model_class = tiny.import_family(trial.model)
    asked = spelling(trial)
    arguments: Dict[str, Any] = {dtype_argument(): getattr(torch, trial.model.dtype)}
    arguments.update(plan(trial, asked))
    if known(trial.model.experts_implementation) is not None:
        arguments["experts_implementation"] = trial.model.experts_implementation
    with _no_progress_bars(), _refusals(trial, asked):
        if asked is not None:
            arguments["distributed_config"] = distributed_config(asked)
        model = release_families.from_pretrained(
            model_class, config_class, str(trial.checkpoint_path), attn_implementation="eager",
            **arguments,
        )  # fmt: skip
    for part in (model.config, getattr(model.config, "text_config", None)):
        if part is not None:
            part.use_cache = False  # multimodal families do not accept it as an argument
    _declares_pieces(model, trial)
    return model.to(device).train()


@contextlib.contextmanager
def _refusals(trial: Trial, asked: Optional[Dict[str, Any]]) -> Iterator[None]:
    """Converts a ValueError by which transformers' distribution package refuses the layout, on
    all ranks before it loads anything, to NotApplicable; not if the trial gives the arguments
    itself."""
    try:
        yield
    except ValueError as error:
        if asked is None or trial.wrapper.distributed_config is not None:
            raise
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith("transformers.distributed."):
            raise
        raise NotApplicable(f"transformers {version()} refuses {words(asked)}: {error}") from error


def dtype_argument() -> str:
    """Returns the name of the argument of from_pretrained: ``dtype`` from 4.56 on."""
    major, minor = (int(part) for part in version().split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def distributed_fields() -> Dict[str, Any]:
    fields: Dict[str, Any] = getattr(_config_class(), "__dataclass_fields__", {})
    return fields


def _config_class() -> Any:
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        raise NotApplicable(f"transformers {version()} has no DistributedConfig") from error
    return DistributedConfig


def distributed_config(asked: Dict[str, Any]) -> Any:
    """Returns the config. Raises NotApplicable for arguments that this release does not know."""
    unknown = [name for name in asked if name not in distributed_fields()]
    if unknown:
        raise NotApplicable(
            f"DistributedConfig of transformers {version()} has no {' and no '.join(unknown)}"
        )
    return _config_class()(**asked)


def known(implementation: Optional[str]) -> Optional[str]:
    """Returns ``implementation``. Raises NotApplicable if the release lacks it: it would fail or,
    before 5.0, ignore the argument."""
    if implementation is None:
        return None
    try:
        from transformers.integrations import moe
    except ImportError as error:
        raise NotApplicable(f"transformers {version()} has no experts_implementation") from error
    if implementation == kernels.NAME:
        kernels.register()
    registered: Any = getattr(moe, "ALL_EXPERTS_FUNCTIONS", {})
    if implementation != "eager" and implementation not in registered:
        raise NotApplicable(f"transformers {version()} has no experts_implementation "
                            f"{implementation}")  # fmt: skip
    return implementation


def version() -> str:
    """Returns the version of transformers in this stack."""
    import transformers

    version: str = transformers.__version__
    return version


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Disables progress bars, which would fill the rank's log with carriage returns."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
