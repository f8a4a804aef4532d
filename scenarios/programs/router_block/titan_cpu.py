"""Makes torchtitan 0.2.x's MoE importable and runnable without a GPU.

Two parts need a GPU. Its kernel that orders tokens is written in triton, which CPU builds of torch
lack: that one module is loaded with a stand-in for triton, and its own CPU implementation is used.
``torch.histc`` does not count integers on the CPU: they are counted as floats.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from moediag.recorder.not_applicable import NotApplicable

NOTES = [
    "torchtitan's own MoE and parallelize plan; routed experts by its for-loop, because its "
    "grouped kernel computes in bfloat16"
]
CPU_NOTE = (
    "on the CPU: torchtitan's token-ordering kernel by its own CPU implementation (no triton), "
    "torch.histc of integers counted as floats"
)
REWRITTEN = (
    "has neither models.moe nor apply_moe_ep_tp. From 0.3.0 on a MoE declares its layout in "
    "sharding_config (models.common.moe_sharding), without the parallel styles that the fixes "
    "replace, and applies the scores after the experts only. This program needs 0.2.x"
)
_KERNELS = "torchtitan.models.moe.kernels"


@dataclass(frozen=True)
class Release:
    """torchtitan's modules ``models.moe.moe`` and ``models.llama4.infra.parallelize``."""

    moe: Any
    parallelize: Any


@functools.lru_cache(maxsize=1)
def load() -> Release:
    """Imports torchtitan, prepared to run without a GPU. Raises NotApplicable if it is missing or
    has no such modules."""
    found = importlib.util.find_spec("torchtitan")
    if found is None or found.origin is None:
        raise NotApplicable("torchtitan is not installed in this stack")
    package = Path(found.origin).parent
    if not (package / "models" / "moe").is_dir():
        raise NotApplicable(f"torchtitan {metadata.version('torchtitan')} {REWRITTEN}")
    try:
        if importlib.util.find_spec("triton") is None:
            _load_kernels(package)
        kernels = importlib.import_module(_KERNELS)
        utils = importlib.import_module("torchtitan.models.moe.utils")
        release = Release(
            importlib.import_module("torchtitan.models.moe.moe"),
            importlib.import_module("torchtitan.models.llama4.infra.parallelize"),
        )
    except (ImportError, OSError) as error:
        raise NotApplicable(
            f"torchtitan's MoE is not that of 0.2.x, or cannot be imported: {error}"
        ) from error
    if not torch.cuda.is_available():
        own: Any = utils
        own.generate_permute_indices = functools.partial(
            kernels.generate_permute_indices, use_cpu=True
        )
        _count_integers()
    return release


def _load_kernels(package: Path) -> None:
    """Loads the module that needs triton, with a stand-in whose decorators do nothing. Other
    modules see no triton, because torch looks for it too."""
    path = package / "models" / "moe" / "kernels.py"
    spec = importlib.util.spec_from_file_location(_KERNELS, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    triton: Any = types.ModuleType("triton")
    language: Any = types.ModuleType("triton.language")
    triton.jit = lambda function: function
    triton.language = language
    language.constexpr = object
    module = importlib.util.module_from_spec(spec)
    stand_ins = {"triton": triton, "triton.language": language}
    hidden = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(hidden)
    sys.modules[_KERNELS] = module


def _count_integers() -> None:
    own = torch.histc

    @functools.wraps(own)
    def histc(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if x.is_floating_point() or x.is_cuda:
            return own(x, *args, **options)
        return own(x.float(), *args, **options).to(x.dtype)

    whole: Any = torch
    whole.histc = histc
