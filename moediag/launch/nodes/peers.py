"""What the messages (pulses) of other nodes mean. Pure: pulses and times are passed in.

The clocks of two hosts are never compared. The count in a node's pulses and our own clock decide
whether it is silent; two times of its own clock give the duration of something there. An echo
confirms a stall: a pulse that quotes our last one was written after it, so ranks that had not
moved by then had not moved when we saw them all stand still.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from moediag.launch.nodes.status import ObservedStall, Pulse
from moediag.launch.rank_sample import RankSample

LATE_NODES = 60.0  # seconds after our first rank until a node without a pulse is ignored
_DEAF = 10.0  # seconds without listening (stopped, starved, or a disk that did not answer)
_FRESH = 3.0  # maximum age of a look in periods, plus one second


@dataclass(slots=True)
class Peer:
    """Another node."""

    pulse: Pulse
    arrived: float
    """When its last new pulse arrived."""
    looked: float
    """When a pulse with new samples of its ranks arrived."""


class Peers:
    """The other nodes of a job. ``own``: our key. ``silence``: a node is silent after this many
    seconds without a pulse. ``joins``: other nodes can send pulses."""

    def __init__(self, own: str, silence: float, joins: bool, now: float) -> None:
        self.own = own
        self.silence = silence
        self.joins = joins
        self.begun = now
        self.late = LATE_NODES
        """Seconds since then in which a node without a pulse is waited for."""
        self.listened = now  # when we last read the pulses
        self.listens = True  # do not wait for nodes that we could not hear
        self.known: dict[str, Peer] = {}
        self._ranks: set[int] = set()  # this node's

    def hear(self, now: float, pulses: Iterable[Pulse]) -> None:
        """Processes all ``pulses`` that exist now, new or old, including our own."""
        if now - self.listened > _DEAF:
            for each in self.known.values():  # pulses sent in between are not late
                each.arrived = each.looked = now
        self.listened = now
        for pulse in pulses:
            if pulse.key == self.own:
                continue
            peer = self.known.get(pulse.key)
            if peer is None:
                self.known[pulse.key] = Peer(pulse, now, now)
            elif pulse.seq > peer.pulse.seq:
                peer.looked = now if pulse.look > peer.pulse.look else peer.looked
                peer.pulse, peer.arrived = pulse, now

    def silent_for(self, peer: Peer) -> float | None:
        """Seconds since its last pulse, once it counts as silent; time in which we did not listen
        does not count."""
        quiet = self.listened - peer.arrived
        return quiet if quiet > self.silence and not peer.pulse.over else None

    def _speaks(self, peer: Peer) -> bool:
        return self.listens and self.silent_for(peer) is None

    def samples(self, now: float, own: Iterable[int], world: int) -> list[RankSample]:
        """A sample of each rank of the world that is not in ``own``."""
        found: dict[int, RankSample] = {}
        self.listens = now - self.listened < LATE_NODES
        self._ranks = own = set(own)
        for peer in self.current:
            silent = self.silent_for(peer) is not None
            late = now - peer.looked > _FRESH * peer.pulse.period + 1.0
            for s in peer.pulse.samples:
                if silent and s.alive:
                    found[s.rank] = replace(s, silent=True, state="silent", runnable=False)
                elif not self.listens and s.alive:
                    found[s.rank] = replace(s, unseen=True, state="unseen", at=None)
                elif late and s.alive and not peer.pulse.over:
                    found[s.rank] = replace(s, known=False)
                else:
                    found[s.rank] = s
        waits = self.joins and now - self.begun < self.late
        for rank in set(range(world)) - found.keys():
            found[rank] = RankSample(rank, known=not waits, unseen=not waits)
        return [found[rank] for rank in sorted(found.keys() - own)]

    @property
    def current(self) -> list[Peer]:
        """The nodes, except ended ones whose ranks another supervisor has now."""
        placed, found = set(self._ranks), []
        for peer in sorted(self.known.values(), key=lambda p: (p.pulse.over, -p.arrived)):
            if not placed & set(peer.pulse.ranks):
                placed |= set(peer.pulse.ranks)
                found.append(peer)
        return found

    @property
    def deaths(self) -> tuple[int, ...]:
        return tuple(rank for peer in self.current for rank in peer.pulse.deaths)

    def echoed(self, seq: int) -> bool:
        """Whether every node that is not silent has received our pulse ``seq``."""
        return all(
            peer.pulse.heard.get(self.own, -1) >= seq
            for peer in self.current
            if not peer.pulse.over and self._speaks(peer)
        )

    def stood(self, samples: Sequence[RankSample]) -> ObservedStall | None:
        """A stall that another node found, if the progress known here agrees with it."""
        here = progress_of(samples)
        for peer in self.current:
            stood = peer.pulse.stood
            if stood is not None and all(
                here.get(rank, number) == number for rank, number in stood.progress.items()
            ):
                return stood
        return None

    def owing(self, number: int, fetched: Mapping[str, int]) -> list[str]:
        """Names of nodes whose evidence ``number`` (or last one) was not published or not fetched.
        A silent node is not waited for."""
        found = []
        for peer in self.current:
            done = peer.pulse.published >= number or peer.pulse.over
            here = fetched.get(peer.pulse.key, 0) >= peer.pulse.published
            if not (done and here) and self._speaks(peer):
                found.append(peer.pulse.name)
        return found

    def lacking(self, number: int) -> list[str]:
        """Names of nodes that have not fetched our evidence ``number`` yet."""
        return [
            peer.pulse.name
            for peer in self.current
            if peer.pulse.has.get(self.own, 0) < number
            and not peer.pulse.over
            and self._speaks(peer)
        ]


def progress_of(samples: Iterable[RankSample]) -> dict[int, int]:
    return {s.rank: s.progress for s in samples if s.rank >= 0 and not s.unseen}
