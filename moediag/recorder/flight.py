"""torch's Flight Recorder, dumped as JSON without stacks (the first dump with stacks costs
seconds of symbolisation)."""

from __future__ import annotations

import json
from typing import Any, Optional

import torch

# NCCL keeps a recorder of its own, in which each operation has the events around its kernel, so
# whether the device began and completed it. The other, in newer torch, has all other backends.
_JSON = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_PICKLE = ("_dump_nccl_trace", "_dump_fr_trace")


def dump() -> Optional[Any]:
    """The records of this process as plain data, of NCCL where it has any; None when this torch
    keeps none."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    found: Optional[Any] = None
    for name, read in [*((n, _json) for n in _JSON), *((n, _pickled) for n in _PICKLE)]:
        function = getattr(c10d, name, None)
        if function is None or (read is _pickled and found is not None):
            continue
        records = read(function)
        if recorded(records):
            return records
        found = records if found is None else found
    return found


def _json(function: Any) -> Any:
    return json.loads(function(includeCollectives=True, onlyActive=False))


def _pickled(function: Any) -> Any:
    import pickle

    # Our own process made these bytes just now.
    made = function(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    return pickle.loads(made)  # noqa: S301


def recorded(records: Any) -> bool:
    """Whether a dump holds any operation: gloo's are kept from torch 2.11 on (2.9.1 keeps none)."""
    return bool(isinstance(records, dict) and records.get("entries"))
