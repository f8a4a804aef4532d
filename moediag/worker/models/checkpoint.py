"""A saved tiny checkpoint and the library's own way to load it, sharded or not.

The reference run saves the model once; every rank then goes through ``from_pretrained``, with a
``DistributedConfig`` where it divides the model along an axis of the layout. How a release is asked
for expert parallelism changed three times (measured on 5.7 to 5.23) and for tensor parallelism
once; :func:`spelling` and :func:`plan` are the only places that know.
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
from moediag.protocol import Trial
from moediag.worker import kernels
from moediag.worker.models import tiny
from moediag.worker.not_applicable import NotApplicable

SHARDERS = ("transformers", "fsdp2", "accelerate")  # wrapper kinds that can lie on an ep axis


def save(model: nn.Module, folder: Path) -> None:
    """``save_pretrained`` of the unsharded model, atomically: ``folder`` is whole or absent."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    saving: Any = model
    saving.save_pretrained(str(temporary))
    temporary.replace(folder)


def expert_parallel(trial: Trial) -> int:
    """Size of the ep axis, 1 without one."""
    return trial.layout.get(EP, 1)


def spelling(trial: Trial) -> Optional[Dict[str, Any]]:
    """Arguments of DistributedConfig by which the installed release is asked for the trial's
    layout; None where it needs none. Raises NotApplicable.

    - before 5.13: ``enable_expert_parallel`` alone; the ep axis is the whole world;
    - 5.13 to 5.18: ``tp_size`` ranks share a batch and divide the experts, ``fsdp_size`` besides;
    - 5.19 on: ``ep_size``; with FSDP the axis is carved out of ``fsdp_size``, without it out of
      ``tp_size``, which shards the other weights too unless ``tp_plan`` is empty. 5.19 overlooks
      that, and 5.23 (whose ranks also exchange tokens where they share a batch) refuses it.
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
    known = _fields()
    if "ep_size" in known and wrapper.native_fsdp:
        return {"fsdp_size": trial.world_size, "ep_size": ep}
    if "tp_size" not in known and wrapper.native_fsdp:
        raise NotApplicable(f"from_pretrained of transformers {version()} cannot shard by FSDP2")
    if ep > 1 and wrapper.kind in SHARDERS:  # a Trainer has its own way to deal out batches
        _one_batch(trial)
    if "ep_size" in known:
        asked: Dict[str, Any] = {"tp_size": ep, "ep_size": ep}
        return asked if "ep_implementation" in known else dict(asked, tp_plan={})
    if "tp_size" in known:
        asked = {"fsdp_size": shards} if wrapper.native_fsdp else {}
        return dict(asked, tp_size=ep, enable_expert_parallel=True) if ep > 1 else asked
    return {"enable_expert_parallel": True}


def _tensor_parallel(trial: Trial) -> Optional[Dict[str, Any]]:
    """DistributedConfig of 5.13 and later cuts by the model's tp_plan, and shards by FSDP2 besides.
    None for older releases: there ``tp_plan`` is an argument of from_pretrained, see
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
    """Whether this release takes ``tp_plan`` as an argument of from_pretrained."""
    try:
        return "tp_size" not in _fields()
    except NotApplicable:  # no DistributedConfig at all
        return True


def plan(trial: Trial, asked: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """Arguments of from_pretrained that ask for tensor parallelism where DistributedConfig does
    not; empty without. Raises NotApplicable."""
    if trial.layout.get(TP, 1) == 1 or trial.wrapper.distributed_config is not None:
        return {}
    config_class: Any = tiny.import_family(trial.model.family)[0]
    config = config_class.from_pretrained(str(trial.checkpoint_path))
    if not any(getattr(c, "base_model_tp_plan", None) for c in (config, config.get_text_config())):
        raise NotApplicable(f"{trial.model.family} of transformers {version()} has no tp_plan")
    if asked is not None:
        return {}
    if importlib.util.find_spec("accelerate") is None:
        raise NotApplicable(f"tp_plan of transformers {version()} needs accelerate")
    return {"tp_plan": "auto"}


def _declares_pieces(model: nn.Module, trial: Trial) -> None:
    """Raises NotApplicable where a plain tensor is a piece of a parameter: nothing says which one
    it is, and packed matrices are not cut into equal runs of rows."""
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
    """Raises NotApplicable where the ranks of an ep axis must share a batch and would not: what
    they add up would be of different tokens, and the gradients wrong by the trial's own doing."""
    if trial.skew.batches not in ("identical", "per-replica"):
        raise NotApplicable(
            f"asked this way, transformers {version()} lets the ranks of an ep axis share a "
            f"batch, and skew.batches is {trial.skew.batches}: set it to per-replica"
        )


def notes(trial: Trial) -> List[str]:
    """How the library was asked, for the result."""
    if trial.model.source != "checkpoint":
        return []
    asked = spelling(trial)
    if asked is not None:
        return [f"from_pretrained was asked by {words(asked)}"]
    return [f"from_pretrained was asked by {k}={v!r}" for k, v in plan(trial, asked).items()]


def words(asked: Dict[str, Any]) -> str:
    """``DistributedConfig(fsdp_size=2, ep_size=2)``."""
    return f"DistributedConfig({', '.join(f'{k}={v!r}' for k, v in asked.items())})"


def from_checkpoint(trial: Trial, device: torch.device) -> nn.Module:
    """The model of ``trial.checkpoint_path`` in training mode, loaded as the trial asks; its
    parameters lie on ``device``. Collective where it is sharded. Raises NotApplicable, and what
    the library raises."""
    _, model_class = tiny.import_family(trial.model.family)
    asked = spelling(trial)
    arguments: Dict[str, Any] = {_dtype_argument(): getattr(torch, trial.model.dtype)}
    arguments.update(plan(trial, asked))
    if known(trial.model.experts_implementation) is not None:
        arguments["experts_implementation"] = trial.model.experts_implementation
    loader: Any = model_class
    with _no_progress_bars(), _refusals(trial, asked):
        if asked is not None:
            arguments["distributed_config"] = _config(asked)
        model = loader.from_pretrained(
            str(trial.checkpoint_path), attn_implementation="eager", **arguments
        )
    for part in (model.config, getattr(model.config, "text_config", None)):
        if part is not None:
            part.use_cache = False  # as an argument, multimodal families do not know it
    _declares_pieces(model, trial)
    return model.to(device).train()


@contextlib.contextmanager
def _refusals(trial: Trial, asked: Optional[Dict[str, Any]]) -> Iterator[None]:
    """A ValueError by which transformers' own package of distribution refuses the layout, on all
    ranks before it loads anything, becomes NotApplicable; not where the trial spells it out."""
    try:
        yield
    except ValueError as error:
        if asked is None or trial.wrapper.distributed_config is not None:
            raise
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__")).startswith("transformers.distributed."):
            raise
        raise NotApplicable(f"transformers {version()} refuses {words(asked)}: {error}") from error


def _dtype_argument() -> str:
    """What from_pretrained calls it: ``dtype`` from 4.56 on, which older ones do not know."""
    major, minor = (int(part) for part in version().split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"


def _fields() -> Dict[str, Any]:
    fields: Dict[str, Any] = getattr(_config_class(), "__dataclass_fields__", {})
    return fields


def _config_class() -> Any:
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        raise NotApplicable(f"transformers {version()} has no DistributedConfig") from error
    return DistributedConfig


def _config(asked: Dict[str, Any]) -> Any:
    """Raises NotApplicable for arguments that this release does not know."""
    unknown = [name for name in asked if name not in _fields()]
    if unknown:
        raise NotApplicable(
            f"DistributedConfig of transformers {version()} has no {' and no '.join(unknown)}"
        )
    return _config_class()(**asked)


def known(implementation: Optional[str]) -> Optional[str]:
    """The same again. Raises NotApplicable where the release does not have it: it would fail or,
    before 5.0, ignore the word."""
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
    """Of transformers, in this stack."""
    import transformers

    version: str = transformers.__version__
    return version


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """They would fill the rank's log with carriage returns."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
