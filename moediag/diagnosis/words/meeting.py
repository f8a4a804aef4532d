"""Sentences about ranks that do not meet in ``init_process_group``."""

from __future__ import annotations

from collections.abc import Iterable

from moediag.evidence.model import Evidence, Frame
from moediag.protocol import natural

_JOIN = "init_process_group"


def is_meeting(frames: Iterable[Frame]) -> bool:
    """Whether frames of a stack or traceback, innermost first, are those of the rendezvous."""
    return any(frame.function == _JOIN and not frame.native for frame in frames)


def old_store(evidence: Evidence) -> str:
    """That restarted ranks share the store of those before them; "" if nothing shows that.

    torch up to 2.5.1 gave each restart a prefix of its own (`_create_c10d_store` in
    torch/distributed/rendezvous.py). From 2.6.0 on, and still in 2.15.0, it gives none, because the
    agent makes a new store for each restart; but both rendezvous handlers keep the first one.
    """
    restarts = [seen.restart for seen in evidence.ranks.values() if seen.restart is not None]
    old = [seen.versions.get("torch") for seen in evidence.ranks.values()]
    if not restarts or max(restarts) < 1 or any(_has_prefix(version) for version in old):
        return ""
    return (
        f"This is restart {max(restarts)} of the ranks by torchrun. Since torch 2.6, restarted "
        "ranks use the store of those before them, and may read the addresses of ended processes "
        "there."
    )


def _has_prefix(version: str | None) -> bool:
    first = [natural(text) for text in (version or "").split(".")[:2]]
    known = [number for number in first if number is not None]
    return len(known) < 2 or known < [2, 6]


OWN_PREFIX = (
    "Give each restart a part of the store of its own: pass init_process_group a "
    "store=PrefixStore(os.environ['TORCHELASTIC_RESTART_COUNT'], TCPStore(host, port, "
    "is_master=False)), with rank and world_size. Or start the whole job again instead of "
    "--max-restarts."
)
LOOK = (
    "Check that each rank has its own RANK and the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT, "
    "that no earlier job uses this port, and which network interface the backend takes "
    "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
)
