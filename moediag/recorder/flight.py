"""Dumps torch's Flight Recorder as JSON without stacks: the first dump with stacks takes seconds to
symbolise."""

from __future__ import annotations

import json
from typing import Any, FrozenSet, NamedTuple, Optional, Tuple

import torch

# NCCL has its own recorder. It keeps events around each kernel, so it knows whether the device
# started and completed the operation. Newer torch has a second one for all other backends.
_JSON = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_PICKLE = ("_dump_nccl_trace", "_dump_fr_trace")


class Dump(NamedTuple):
    """One dump of the Flight Recorder."""

    text: str  # the records as JSON
    recorded: bool  # whether they hold an operation; torch 2.11 keeps gloo's, 2.9.1 does not


def dump() -> Optional[Dump]:
    """Dumps this process's records, NCCL's if there are any; None if this torch keeps none."""
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


def executing() -> FrozenSet[Tuple[str, str, str]]:
    """The collectives that this process's devices have started and not completed, each by its
    group, its number there and its name; none if this torch does not know. A receive may be posted
    long before its data are sent, so it shows no wait."""
    function = getattr(getattr(torch._C, "_distributed_c10d", None), _JSON[0], None)
    if function is None:
        return frozenset()
    records = json.loads(_json(function, active=True).text)
    return frozenset(
        (str(e.get("pg_id")), str(e.get("collective_seq_id")), str(e.get("profiling_name")))
        for e in records.get("entries") or ()
        if e.get("state") == "started" and not e.get("is_p2p")
    )


def _json(function: Any, active: bool = False) -> Dump:
    """Keeps torch's own JSON: re-encoding 20,000 operations holds the GIL for seconds."""
    raw = function(includeCollectives=True, onlyActive=active)
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
    return Dump(text, _recorded(json.loads(text)))


def _pickled(function: Any) -> Dump:
    import pickle

    # Trusted: this process has just created these bytes.
    made = function(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    records = pickle.loads(made)  # noqa: S301
    return Dump(json.dumps(records), _recorded(records))


def _recorded(records: Any) -> bool:
    return bool(isinstance(records, dict) and records.get("entries"))
