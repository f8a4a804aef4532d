"""Which job this is, asked once of the store at which its ranks have just met.

Addresses, ports and run ids repeat (the next job takes the port that this one left, a restarted one
keeps its own), so the ranks agree on a token that nobody has had before: the first that comes puts
it down, the others find it. That takes one exchange with a store that has just answered many.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from typing import Any, Dict, List, Optional

_KEY = "moediag/job"
# Who numbers the nodes: torch's elastic agent, Slurm.
_NODE = ("GROUP_RANK", "SLURM_NODEID")


def job(module: Any) -> Optional[Dict[str, Any]]:
    """What ``protocol.job_file`` holds; None where ranks met without a store (MPI). ``module``:
    torch.distributed.distributed_c10d. Raises what the store raises."""
    store = module._get_default_store()
    if store is None:
        return None
    token = store.compare_set(_KEY, "", uuid.uuid4().hex)
    return {
        "job": token.decode() if isinstance(token, bytes) else str(token),
        "node": _node(),
        "store": _address(store),
        "python": sys.executable,
    }


def _node() -> Optional[int]:
    for variable in _NODE:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[variable])
    return None


def _address(store: Any) -> Optional[List[Any]]:
    """Of the TCP store beneath all prefixes; None where it is of another kind, or does not tell."""
    with contextlib.suppress(Exception):
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return [str(store.host), int(store.port)]
    return None
