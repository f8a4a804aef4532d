"""torch's Flight Recorder, dumped as JSON without stacks (the first dump with stacks costs
seconds of symbolisation)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Optional

import torch

# NCCL keeps a recorder of its own, in which each operation has the events around its kernel, so
# whether the device began and completed it. The other, in newer torch, has all other backends.
_JSON = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_PICKLE = ("_dump_nccl_trace", "_dump_fr_trace")


class Dump(NamedTuple):
    """``text``: the records as JSON; ``recorded``: whether they hold any operation (gloo's are kept
    from torch 2.11 on, 2.9.1 keeps none)."""

    text: str
    recorded: bool


def dump() -> Optional[Dump]:
    """The records of this process, of NCCL where it has any; None when this torch keeps none."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    found: Optional[Dump] = None
    for name, read in [*((n, _json) for n in _JSON), *((n, _pickled) for n in _PICKLE)]:
        function = getattr(c10d, name, None)
        if function is None or (read is _pickled and found is not None):
            continue
        made = read(function)
        if made.recorded:
            return made
        found = made if found is None else found
    return found


def _json(function: Any) -> Dump:
    """As torch wrote it: 20,000 operations are written again in seconds, with the GIL held."""
    raw = function(includeCollectives=True, onlyActive=False)
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
    return Dump(text, _recorded(json.loads(text)))


def _pickled(function: Any) -> Dump:
    import pickle

    # Our own process made these bytes just now.
    made = function(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    records = pickle.loads(made)  # noqa: S301
    return Dump(json.dumps(records), _recorded(records))


def _recorded(records: Any) -> bool:
    return bool(isinstance(records, dict) and records.get("entries"))
