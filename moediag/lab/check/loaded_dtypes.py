"""Parameters that from_pretrained leaves in float32 whatever dtype it is given."""

from __future__ import annotations

import importlib
import re
from typing import Any, Dict, List, Optional, Pattern

import torch

_HALVES = (torch.float16, torch.bfloat16)


def kept(model: Any, dtype: torch.dtype) -> Optional[Pattern[str]]:
    """Returns what matches their names, by the release's own rules; None: there are none."""
    planned = getattr(model, "_get_dtype_plan", None)
    names = list(planned(dtype)) if planned is not None else _listed(model, dtype)
    if not names:
        return None
    try:
        matching: Any = importlib.import_module("transformers.core_model_loading")
        found: Pattern[str] = matching.build_glob_alternation(names)[0]
    except ImportError:  # before 5.0
        found = re.compile("|".join(rf"((^|\.){name}($|\.))" for name in names))
    return found


def _listed(model: Any, dtype: torch.dtype) -> List[str]:
    """Returns the names as releases before 5.12 collect them: 5.0 whatever the dtype."""
    always = getattr(model, "dtype_plan", None)
    if always is not None:
        return list(always)
    asked: Dict[str, bool] = {
        "_keep_in_fp32_modules": dtype == torch.float16,
        "_keep_in_fp32_modules_strict": dtype in _HALVES,
    }
    return [
        name for attribute, applies in asked.items() if applies
        for name in getattr(model, attribute, None) or ()
    ]  # fmt: skip
