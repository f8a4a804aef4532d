"""Identifies the job by a token in the store through which its ranks have just met.

Addresses, ports and run ids repeat (the next job reuses the port of this one, a restarted one keeps
its own). So the ranks agree on a unique token: the first one writes it, the others read it. That
takes one exchange with a store that has just answered many. Under an elastic agent the agents do it
at each rendezvous, because restarted ranks may find the store of their predecessors.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from typing import Any, Dict, List, Optional

from moediag import protocol

_KEY = "moediag/job"
# Variables with the node's number, of torch's elastic agent and Slurm.
_NODE = ("GROUP_RANK", "SLURM_NODEID")


def job(store: Any) -> Optional[Dict[str, Any]]:
    """Returns the content of ``protocol.job_file``; None if unknown. ``store``: where the ranks
    met, None before that or if there is none (MPI). Raises what the store raises."""
    agreed = os.environ.get(protocol.ENV_JOB)
    if store is None and not agreed:
        return None
    return {
        "job": agreed or token(store),
        "node": _node(),
        "store": _address(store) if store is not None else None,
        "python": sys.executable,
    }


def token(store: Any) -> str:
    """Returns a token, the same for all clients of one store. Waits for no other client."""
    found = store.compare_set(_KEY, "", uuid.uuid4().hex)
    return found.decode() if isinstance(found, bytes) else str(found)


def _node() -> Optional[int]:
    for variable in _NODE:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[variable])
    return None


def _address(store: Any) -> Optional[List[Any]]:
    """Returns the TCP store's address below all prefixes; None for another kind or if unknown."""
    with contextlib.suppress(Exception):
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return [str(store.host), int(store.port)]
    return None
