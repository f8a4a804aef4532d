"""Follows a trial whose ranks run on several nodes. Each node follows its own ranks and receives
the state of the others. A hang concerns all ranks, and every node collects all evidence."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from moediag import protocol
from moediag.evidence.launch_record import LaunchRecord, read_launch
from moediag.evidence.model import Stall
from moediag.lab.launch.rendezvous import job_of
from moediag.launch import signals
from moediag.launch.base import Running
from moediag.launch.follow.supervise import Supervisor
from moediag.launch.nodes.other_nodes import OtherNodes
from moediag.launch.rank_sample import RankSample
from moediag.launch.settings import LaunchOptions, OnProgress

BROKEN_OFF = "another node was interrupted during this trial"  # a launch error
AFTER_SILENCE = 15.0  # seconds that a silent node's peers get to show a hang or a death
AFTER_DEATH = 5.0  # seconds that ranks here get to fail by themselves after a death elsewhere


class NodesSupervisor(Supervisor):
    """Follows the ranks of this node. ``options.job`` is the run's token, the same on all nodes."""

    # Read by OtherNodes; unlike a watched job, a trial needs no Patience.
    work: Mapping[int, str] = {}
    looked = True

    def __init__(
        self,
        running: Running,
        trial: protocol.Trial,
        folder: Path,
        ranks: int,
        options: LaunchOptions,
        on_progress: OnProgress | None,
    ) -> None:
        super().__init__(running, trial, folder, ranks, options, on_progress)
        job = job_of(options.job, trial.name)
        self.nodes = OtherNodes(folder, options.shared, options.silence)
        self.nodes.join(job, options.node_rank, trial.world_size)
        self.on_device: frozenset[int] = frozenset()
        self._held: tuple[tuple[tuple[int, int], ...], Stall] | None = None
        self._shared = False
        self._ended_before: frozenset[int] | None = None  # a stall, or the timeout

    def run(self, kind: str) -> LaunchRecord:
        """Returns the record of this node's ranks; the other nodes' evidence is beside it."""
        try:
            record = super().run(kind)
            self._ends_after_stall_are_ours()
            if not record.interrupted:
                try:
                    self._share(kind)
                except KeyboardInterrupt:
                    self.seen.interrupted = True
            record = self.record(kind)
            with signals.held():
                record.write(self.folder)
        finally:
            # Do not change files that other nodes may be reading.
            self.nodes.close(publish=not self._shared)
        return record

    def _look(self) -> list[RankSample]:
        samples = super()._look()
        deaths = [death.rank for death in self.seen.deaths(self.folder)]
        self.nodes.look(samples, self, deaths)
        return samples

    def _stalled(self, now: float, samples: Sequence[RankSample]) -> Stall | None:
        everyone = sorted([*samples, *self.nodes.others], key=lambda s: s.rank)
        progress = tuple((s.rank, s.progress) for s in everyone)
        if self._held is not None and self._held[0] != progress:
            self._held, self.on_device = None, frozenset()
        stall = self.watchdog.observe(now, everyone)
        if stall is not None and self._gpu:
            # Devices are checked only every ten seconds: keep the stall until the nodes agree.
            self._held = progress, stall
        agreed = self.nodes.agreed(stall or (self._held[1] if self._held else None), samples)
        if agreed is None and (gone := self.nodes.gone(AFTER_SILENCE)):
            # Ranks still in rendezvous are not a hang and would wait until the trial's timeout.
            self.seen.launch_error = f"{', '.join(gone)}: the trial was ended"
            self._capture(samples)
        return agreed

    @property
    def by_stack(self) -> Sequence[int]:
        return self.watchdog.by_stack

    def _blocked(self, ranks: Sequence[int]) -> list[int]:
        return [*super()._blocked(ranks), *self.nodes.blocked]

    def _on_device(self, ranks: Sequence[int]) -> list[int]:
        here = super()._on_device(ranks)
        self.on_device = frozenset(here)
        return [*here, *(s.rank for s in self.nodes.others if s.on_device)]

    def _someone_died(self) -> bool:
        return super()._someone_died() or bool(self.nodes.deaths)

    def _is_over(self) -> bool:
        """Also ends ranks that survive a peer's failure, once their evidence is collected."""
        late = self._first_death is not None and time.monotonic() - self._first_death > AFTER_DEATH
        if self.seen.launch_error:
            return True
        return super()._is_over() or (late and self._released and bool(self.nodes.deaths))

    def _ends_after_stall(self, samples: Sequence[RankSample]) -> bool:
        """Stops this node's ranks until all nodes have collected evidence: ranks that end on one
        node make their peers on another fail."""
        self._ended_before = frozenset(self.seen.exits)
        for s in samples:
            if s.alive and s.known:
                self.seen.processes[s.rank].send(signal.SIGSTOP)
        self._share("torchrun")
        return True

    def _ends_after_stall_are_ours(self) -> None:
        """Marks failures of our ranks after the stall as caused by the shutdown: another node may
        end its ranks first, and ours then lose their peers."""
        if self._ended_before is None:
            return
        for rank, status in self.seen.exits.items():
            if rank not in self._ended_before and status.code != 0:
                self.seen.exits[rank] = replace(status, by_us=True)

    # ------------------------------------------------------------------ evidence

    def _share(self, kind: str) -> None:
        if self._shared:
            return
        self._shared = True
        self.record(kind).write(self.folder)
        self.seen.not_seen += self.nodes.share(self._look)
        places = list((self.folder / protocol.NODES_FOLDER).glob("*"))
        for place in places:
            _measured(place, self.folder)
        self._judge_whole(places)

    def _judge_whole(self, places: Sequence[Path]) -> None:
        """Sets a launch error if evidence of a node is missing or a node was interrupted."""
        if any(read_launch(place / protocol.LAUNCH_FILE).interrupted for place in places):
            for rank, status in self.seen.exits.items():
                if status.code != 0:
                    self.seen.exits[rank] = replace(status, by_us=True)
            self.seen.launch_error = BROKEN_OFF
            return
        missing = self.nodes.unheard()
        fine = not (self.seen.stall or self.seen.timed_out or self._someone_died())
        if missing and fine and not self.seen.launch_error:
            self.seen.launch_error = (
                f"nothing was received from {', '.join(missing)}: what its ranks did is not known"
            )


def _measured(place: Path, folder: Path) -> None:
    """Copies measurements of other nodes' ranks to where costs and tables are read."""
    for path in place.glob("rank-*.outcome.json"):
        if not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
