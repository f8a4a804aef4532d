"""torch's Flight Recorder, dumped as JSON without stacks (the first dump with stacks costs
seconds of symbolisation)."""

from __future__ import annotations

import json
from typing import Any, Optional

import torch

# By age. The JSON form exists from 2.5 on for NCCL and for every backend in newer torch.
_JSON = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_PICKLE = ("_dump_fr_trace", "_dump_nccl_trace")


def dump() -> Optional[Any]:
    """The records of this process as plain data; None when this torch keeps none."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    for name in _JSON:
        function = getattr(c10d, name, None)
        if function is not None:
            return json.loads(function(includeCollectives=True, onlyActive=False))
    for name in _PICKLE:
        function = getattr(c10d, name, None)
        if function is not None:
            import pickle

            # Our own process made these bytes just now.
            made = function(includeCollectives=True, includeStackTraces=False, onlyActive=False)
            return pickle.loads(made)  # noqa: S301
    return None


def recorded(records: Any) -> bool:
    """Whether a dump holds any operation: gloo's are kept from torch 2.11 on (2.9.1 keeps none)."""
    return bool(isinstance(records, dict) and records.get("entries"))
