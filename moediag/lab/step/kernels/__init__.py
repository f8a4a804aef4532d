"""moediag's own grouped matrix product for the experts, selected by transformers' own setting.

``experts_implementation: triton`` is added to transformers' registry of experts functions, beside
eager, batched_mm and grouped_mm. The kernels are written in Triton. They are compiled on a GPU and
interpreted on a CPU (``TRITON_INTERPRET=1``): slow, but the same code, so that their results can be
tested anywhere. Nothing here imports triton until it is needed.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from moediag.recorder.not_applicable import NotApplicable

__all__ = ["ENV_INTERPRET", "NAME", "interpret", "load", "register"]

NAME = "triton"
ENV_INTERPRET = "TRITON_INTERPRET"  # read by triton when a kernel is defined


def interpret() -> None:
    """Makes kernels run in Triton's interpreter, for ranks on the CPU. No effect if the user set
    the variable or triton was already imported."""
    if "triton" not in sys.modules:
        os.environ.setdefault(ENV_INTERPRET, "1")


def load() -> ModuleType:
    """Returns :mod:`moediag.lab.step.kernels.grouped`. Raises NotApplicable without triton."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise NotApplicable(
            "experts_implementation triton needs triton, which is not installed in this stack "
            f"({error}); `--stack triton=3.6.0` adds it"
        ) from error
    from moediag.lab.step.kernels import grouped

    return grouped


def register() -> None:
    """Adds the entry to transformers' registry. Raises NotApplicable without triton, or for a
    release without such a registry (before 5.0)."""
    load()
    from moediag.lab.step.kernels import experts

    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise NotApplicable("this transformers has no registry of experts functions") from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts.forward)
