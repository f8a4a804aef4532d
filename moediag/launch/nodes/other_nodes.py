"""Protocol between the supervisors of several nodes, as one supervisor uses it.

Each supervisor comes to the same result by itself. The first to find a stall announces it; all
collect their evidence, exchange it, and each reads all of it. There is no leader, so the end of one
node does not lose the result. Every wait is bounded by the time after which a node is silent.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from moediag import protocol
from moediag.evidence.model import Stall
from moediag.launch.nodes.exchange import Exchange
from moediag.launch.nodes.peers import LATE_NODES, Peers, progress_of
from moediag.launch.nodes.relay import RelayedFolder
from moediag.launch.nodes.shared_folder import SharedFolder
from moediag.launch.nodes.status import KEY, ObservedStall, Pulse, name_of
from moediag.launch.rank_sample import RankSample

ANSWER = 20.0  # seconds beyond the silence that others get to publish evidence
LAST_WORD = 10.0  # seconds for our last message if the shared folder is slow
CARRIED_FOLDER = "carried"  # in the attempt's folder, if nodes share none
UNHEARD = 30.0  # seconds without a node in the shared folder until the job's store is asked, too
_ASK_AGAIN = 1.0  # seconds between two checks for the job's token


class Looks(Protocol):
    """What the stacks of this node's ranks showed; in a watched job this is its Patience."""

    @property
    def by_stack(self) -> Collection[int]: ...
    @property
    def work(self) -> Mapping[int, str]: ...
    @property
    def on_device(self) -> frozenset[int]: ...
    @property
    def looked(self) -> bool: ...


class OtherNodes:
    """The other nodes of one attempt, whose files are in ``folder``. ``root``: the folder that the
    nodes share, None without one."""

    def __init__(self, folder: Path, root: Path | None, silence: float) -> None:
        self.folder = folder
        self.root = root
        self.silence = silence
        self.key = uuid.uuid4().hex[:16]
        self.host = socket.gethostname()
        self.started = time.time()
        self.world = 0
        self.others: list[RankSample] = []
        self.exchange: Exchange | None = None
        self._peers: Peers | None = None
        self._job = ""
        self._number: int | None = None
        self._asked = 0.0
        self._looks = 0
        self._heard: dict[str, int] = {}
        self._fetched: Mapping[str, int] = {}
        self._candidate: tuple[dict[int, int], int] | None = None
        self._published = 0
        self._no_relay = ""
        self._given = False
        self._bridged = False
        self._complete = 0.0  # when all other nodes were heard

    def join(self, job: str, number: int | None, world: int) -> None:
        """Joins a trial, whose job name is already known."""
        assert self.root is not None
        self._given = True
        self._job, self._number, self.world = job, number, world
        self._begin({})

    # ------------------------------------------------------------------ normal operation

    def look(self, own: Sequence[RankSample], patience: Looks, deaths: Sequence[int]) -> None:
        """Sends ``own``, samples of this node's ranks, and updates ``others``, samples of the other
        nodes' ranks."""
        now = time.monotonic()
        ranks = [s.rank for s in own if s.rank >= 0]
        if self.world <= len(ranks) and self.exchange is None:
            self.others = []
            return
        if self._peers is None:
            self._peers = Peers(self.key, self.silence, self.root is not None, now)
        if now - self._asked > _ASK_AGAIN and not self._given:
            self._asked = now
            self._find_job(ranks)
        if self.exchange is not None:
            self._looks += 1
            told = tuple(_as_told(s, now, patience) for s in own if s.rank >= 0)
            self.exchange.say(
                samples=told, look=self._looks, heard=dict(self._heard), deaths=tuple(deaths)
            )
            heard = self.exchange.heard()
            if heard is not None:
                self._peers.hear(heard.time, heard.pulses)
                self._heard = {pulse.key: pulse.seq for pulse in heard.pulses}
                self._fetched = heard.fetched
        missing = any(s.rank < 0 for s in own)
        found = self._peers.samples(now, ranks, self.world)
        self.others = [s for s in found if not (missing and s.unseen)]
        works = self.exchange is not None and not self.exchange.error
        if works and all(s.known and not s.unseen for s in self.others):
            self._complete = now

    def _bridge(self, raw: Mapping[str, Any]) -> None:
        """Also uses the job's store if a node, or this one, may be unable to use the folder."""
        now = time.monotonic()
        late = now - self._complete > UNHEARD
        if self.root is None or self._bridged or not (late or any(s.silent for s in self.others)):
            return
        with suppress(OSError, KeyError, TypeError, ValueError):  # a job without such a store
            if self.exchange is not None and self._peers is not None:
                self.exchange.bridge(self._relayed_folder(raw))
                self._bridged = True
                self._peers.late = now - self._peers.begun + LATE_NODES

    def _find_job(self, ranks: Sequence[int]) -> None:
        """Reads the job's token, which exists once a rank has joined the others. A script may run
        one program after the other; the last token counts."""
        for rank in ranks:
            raw = read_job(self.folder, rank)
            job = str(raw.get("job", ""))
            if KEY.fullmatch(job) and (self.root is not None or raw.get("store")):
                if job != self._job:
                    self._job, number = job, raw.get("node")
                    self._number = number if isinstance(number, int) else None
                    self._begin(raw)
                self._bridge(raw)
                return

    def _begin(self, raw: Mapping[str, Any]) -> None:
        if self.exchange is not None:
            self.exchange.close(0.0)
            self.exchange.shared.close()
            self.exchange = None
        if self.root is not None:
            shared = SharedFolder(self.root, self._job, self.key)
        else:
            try:
                shared = self._relayed_folder(raw)
            except (OSError, KeyError, TypeError, ValueError) as error:
                self._no_relay = f"other nodes (the job's store: {error})"
                return
        self._bridged, self._complete = False, time.monotonic()
        self._peers = Peers(self.key, self.silence, True, time.monotonic())
        if self.root is None:  # the others may have a folder, and look here later
            self._peers.late += UNHEARD
        own = Pulse(self.key, self.host, self._number)
        self.exchange = Exchange(shared, own, self.folder, self.folder / protocol.NODES_FOLDER)
        self.exchange.start()

    def _relayed_folder(self, raw: Mapping[str, Any]) -> RelayedFolder:
        host, port = raw["store"]
        return RelayedFolder(
            self.folder / CARRIED_FOLDER, self._job, self.key, (str(host), int(port)),
            str(raw["python"]),
        )  # fmt: skip

    @property
    def deaths(self) -> tuple[int, ...]:
        """Ranks of other nodes that failed by themselves."""
        return self._peers.deaths if self._peers is not None else ()

    @property
    def spoken_for(self) -> int:
        """Number of ranks of other nodes that their supervisors know."""
        return sum(s.at is not None for s in self.others)

    @property
    def blocked(self) -> list[int]:
        """Ranks of other nodes that only their stacks show in a collective."""
        return [s.rank for s in self.others if s.blocked]

    def agreed(self, stall: Stall | None, own: Sequence[RankSample]) -> Stall | None:
        """The stall that the nodes agree on. ``stall`` is what this node found; it counts once each
        node that is not silent has looked again. A stall that another node found counts if our
        ranks still have the progress that it names."""
        peers = self._peers
        if peers is None or self.exchange is None:
            return _of_seen(stall, self.others)
        everyone = [*own, *self.others]
        stood = peers.stood(everyone)
        if stood is not None and (stall is None or stall.early or not stood.early):
            last = max((s.time for s in own), default=0.0)
            at = max(0.0, last - self.started)
            return Stall(at, 0.0, stood.waiting, stood.elsewhere, early=stood.early)
        stall = _of_seen(stall, self.others)
        progress = progress_of(everyone)
        if stall is None:
            self._candidate = None
        elif self._candidate is None or self._candidate[0] != progress:
            self._candidate = progress, self.exchange.next_seq
        elif peers.echoed(self._candidate[1]):
            found = ObservedStall(progress, stall.waiting, stall.elsewhere, stall.early)
            self.exchange.say(stood=found)
            return stall
        return None

    def went_on(self) -> None:
        """Withdraws the stall because the job has continued."""
        self._candidate = None
        if self.exchange is not None:
            self.exchange.say(stood=None)

    # ------------------------------------------------------------------ after a failure

    @property
    def trouble(self) -> bool:
        """Whether another node reports a death or a stall."""
        peers = self._peers.current if self._peers is not None else ()
        return any(p.pulse.deaths or p.pulse.stood is not None for p in peers)

    def share(self, tick: Callable[[], object]) -> tuple[str, ...]:
        """Publishes our evidence, fetches the others' and writes ``nodes.json``. ``tick`` is called
        while waiting. Returns what was not received."""
        if self.exchange is not None and self._peers is not None:
            self._published += 1
            self.exchange.want()
            self.exchange.publish()
            end = time.monotonic() + self.silence + ANSWER
            while time.monotonic() < end and (self._owes() or self._is_owed()):
                if self.root is None and self.exchange.error:
                    break
                tick()
                time.sleep(0.05)
        self.write()
        return self.not_seen()

    def _owes(self) -> bool:
        assert self._peers is not None and self.exchange is not None
        if not self.exchange.published or self._peers.owing(self._published, self._fetched):
            return True
        waits = any(not s.known for s in self.others)
        return waits and time.monotonic() - self._peers.begun < self.silence

    def _is_owed(self) -> bool:
        """Whether others still have to fetch our evidence: a store may end with the job, while the
        files in a shared folder stay."""
        assert self._peers is not None and self.exchange is not None
        answers = self.exchange.carried and not self.exchange.error
        return answers and bool(self._peers.lacking(self._published))

    def write(self) -> None:
        """Writes ``nodes.json``: the nodes known now, this one first."""
        if self._peers is None or not self.others:
            return
        elsewhere = {s.rank for s in self.others}
        nodes: list[dict[str, Any]] = [
            {"key": self.key, "name": name_of(self._number, self.host), "host": self.host,
             "ranks": sorted(set(range(self.world)) - elsewhere), "silent": None, "seen": True},
        ]  # fmt: skip
        for peer in sorted(self._peers.current, key=lambda peer: peer.pulse.ranks):
            pulse, silent = peer.pulse, self._peers.silent_for(peer)
            nodes.append(
                {"key": pulse.key, "name": pulse.name, "host": pulse.host,
                 "ranks": list(pulse.ranks),
                 "silent": None if silent is None else round(silent, 1),
                 "seen": self._is_current(pulse)}
            )  # fmt: skip
        known = {rank for node in nodes for rank in node["ranks"]}
        if rest := sorted(set(range(self.world)) - known):
            nodes.append({"key": "", "name": "", "host": "", "ranks": rest, "silent": None,
                          "seen": False})  # fmt: skip
        protocol.write_json(
            self.folder / protocol.NODES_FILE,
            {"schema_version": 1, "job": self._job, "shared": self.root is not None,
             "nodes": nodes},
        )  # fmt: skip

    def _is_current(self, pulse: Pulse) -> bool:
        """Whether the evidence fetched from there belongs to this stall or death, not to an earlier
        one."""
        here = self._fetched.get(pulse.key, 0)
        return here >= self._published > 0 or (pulse.over and here == pulse.published > 0)

    def not_seen(self) -> tuple[str, ...]:
        found = [self._no_relay] if self._no_relay else []
        if self.exchange is not None:
            if self.exchange.error:
                found.append(f"other nodes ({self.exchange.error})")
            found += self.exchange.left_out
            for key, why in dict(self.exchange.shared.refused).items():
                found.append(f"a message of node {key}, which was refused ({why})")
        return tuple(found)

    def gone(self, seconds: float) -> list[str]:
        """A sentence for each node that has been silent for ``seconds`` longer than the limit."""
        found = []
        for peer in self._peers.current if self._peers is not None else ():
            silent = self._peers.silent_for(peer) if self._peers is not None else None
            if silent is not None and silent > self.silence + seconds:
                name = f"{peer.pulse.name} ({peer.pulse.host})"
                found.append(f"{name} has sent nothing for {silent:.0f} s")
        return found

    def unheard(self) -> list[str]:
        """After ``share``: names of nodes whose evidence is missing."""
        found = [
            peer.pulse.name
            for peer in (self._peers.current if self._peers is not None else ())
            if not self._is_current(peer.pulse)
        ]
        never = [s.rank for s in self.others if s.at is None]
        return found + ([f"the node of rank {never[0]}"] if never else [])

    def close(self, publish: bool = True) -> None:
        """Ends the exchange. ``publish``: publish our present evidence once more."""
        if self.exchange is not None:
            self.exchange.close(LAST_WORD, publish)
            self.exchange.shared.close()


def read_job(folder: Path, rank: int) -> dict[str, Any]:
    """Returns the rank's job file; empty if the rank has not joined the others."""
    with suppress(OSError, ValueError):
        raw = protocol.read_json(folder / protocol.job_file(rank))
        return raw if isinstance(raw, dict) else {}
    return {}


def _as_told(s: RankSample, now: float, patience: Looks) -> RankSample:
    return replace(
        s,
        at=now,
        work=patience.work.get(s.rank, ""),
        on_device=s.rank in patience.on_device,
        blocked=s.rank in patience.by_stack,
        looked=patience.looked,
    )


def _of_seen(stall: Stall | None, others: Sequence[RankSample]) -> Stall | None:
    """``stall`` without ranks that no supervisor saw."""
    unseen = {s.rank for s in others if s.unseen}
    if stall is None or not unseen:
        return stall
    return replace(stall, elsewhere=tuple(r for r in stall.elsewhere if r not in unseen))
