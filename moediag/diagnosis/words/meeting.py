"""Sentences about ranks that do not meet in ``init_process_group``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from moediag.diagnosis.numbers import agreement
from moediag.evidence.model import Evidence, Frame
from moediag.evidence.rank_stacks import that_counts
from moediag.protocol import natural
from moediag.result.wording import by_value, capital, does, on_each

_JOIN = "init_process_group"


def is_meeting(frames: Iterable[Frame]) -> bool:
    """Whether frames of a stack or traceback, innermost first, are those of the rendezvous."""
    return any(frame.function == _JOIN and not frame.native for frame in frames)


def is_in(evidence: Evidence, rank: int) -> bool:
    """Whether the stack of ``rank`` shows it in the rendezvous."""
    seen = evidence.ranks.get(rank)
    stack = that_counts(seen.stacks) if seen is not None else None
    return stack is not None and is_meeting(stack.frames)


def late(evidence: Evidence, waiting: Sequence[int], elsewhere: Sequence[int]) -> tuple[int, ...]:
    """The ranks ``elsewhere``, if all that wait do so in the rendezvous; else ()."""
    joined = all(is_in(evidence, rank) for rank in waiting)
    outside = not any(is_in(evidence, rank) for rank in elsewhere)
    return tuple(sorted(elsewhere)) if waiting and joined and outside else ()


def of_late(waiting: Sequence[int], late: Sequence[int]) -> str:
    """``Rank 1 has not called init_process_group, where rank 0 waits.``"""
    text = capital(does(late, "has not called init_process_group"))
    return f"{text}, where {does(waiting, 'waits')}."


def unequal(evidence: Evidence) -> str:
    """What ranks passed to the rendezvous differently, so that they cannot meet; "" if nothing."""
    texts = [f"{what} is {', '.join(on_each(given))}" for what, given in _apart(evidence)]
    return f"They were configured differently: {'; '.join(texts)}." if texts else ""


def odd(evidence: Evidence) -> tuple[int, ...]:
    """The ranks that were told to meet otherwise than most; () if no majority agrees."""
    few = [agreement.minority(by_value(given).values()) for _, given in _apart(evidence)]
    return tuple(sorted({rank for who in few for rank in who})) if all(few) else ()


def _apart(evidence: Evidence) -> Iterator[tuple[str, Mapping[int, object]]]:
    """What must agree and does not, with what each rank was given."""
    for field, what in _MUST_AGREE.items():
        every = ((rank, getattr(seen.meeting, field)) for rank, seen in evidence.ranks.items())
        given = {rank: value for rank, value in every if value}
        sides = {*given.values()}
        if len(sides) > 1 and not (field == "address" and _may_be_one(sides)):
            yield what, given


def _may_be_one(addresses: Iterable[object]) -> bool:
    """Whether these are names of one store: a rank on its host may call that by another name."""
    parts = [str(address).rpartition(":") for address in addresses]
    return len({port for _, _, port in parts}) == 1 and any(h in _LOOPBACK for h, _, _ in parts)


_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "tcp://localhost", "tcp://127.0.0.1")
_MUST_AGREE = {
    "world_size": "the world size",
    "address": "the address of the store",
    "backend": "the backend",
}
EQUAL = (
    "Give all ranks the same WORLD_SIZE, MASTER_ADDR, MASTER_PORT and backend, by their launcher "
    "or in the arguments of init_process_group."
)


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
        f"torchrun has restarted the ranks (restart {max(restarts)}). Since torch 2.6, restarted "
        "ranks use the store of the ranks before them, and may read addresses of ended processes "
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
