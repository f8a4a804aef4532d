"""Runs cells in processes.

A cell is one process, forked from a host that imported torch and transformers once. A family that
crashes or uses too much memory or time costs its cell only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from moediag.errors import StackError
from moediag.evidence.launch_record import LaunchRecord
from moediag.lab.campaign.hunt import launched, layouts
from moediag.lab.campaign.hunt.findings import HuntCell, Key
from moediag.lab.campaign.hunt.question import Wanted
from moediag.lab.launch.launcher import launcher
from moediag.lab.pipeline import register
from moediag.lab.pipeline.single_process import OFFLINE, why_no_answer
from moediag.lab.stacks.environment import Stack
from moediag.launch.base import Launcher
from moediag.launch.settings import LaunchOptions
from moediag.protocol import (
    EARLIER_CHECKPOINT,
    CheckpointTask,
    FamiliesTask,
    ModelSpec,
    RelationOutcome,
    RelationTask,
    ReleaseListing,
    Size,
    Task,
    Trial,
    WayOutcome,
    output_file,
)

CELLS_FOLDER = "cells"
LISTING_TIMEOUT = 600.0  # seconds; it imports every configuration that may have experts


class Workers:
    """One launcher per cell that runs at the same time; each keeps its host."""

    def __init__(
        self, wanted: Wanted, stack: Stack, folder: Path, release: str = "",
        earlier: Stack | None = None,
    ) -> None:  # fmt: skip
        """``release``: see HuntCell; its files are in a folder of this name. ``earlier``: the
        release whose checkpoints this one loads."""
        self._earlier = None if earlier is None else Workers(wanted, earlier, folder, "earlier")
        self.timeout = wanted.timeout
        self.root = folder
        self.folder = folder / release
        self.release = release
        self.known = register.read()
        self.stopping = threading.Event()
        options = LaunchOptions(environment=OFFLINE, stop=self.stopping)
        self._all = [
            launcher("fork", stack, self.folder / "hosts" / str(number), options)
            for number in range(wanted.at_once)
        ]
        # The last one used comes first: its host is warm.
        self._idle: queue.LifoQueue[Launcher] = queue.LifoQueue()
        for one in self._all:
            self._idle.put(one)

    def listing(self) -> ReleaseListing:
        """Returns the families, and the relations in one process and on several ranks. Raises
        StackError if the release cannot be listed."""
        folder = self.folder / "listing"
        record = self._run(_trial("listing", FamiliesTask(), "", LISTING_TIMEOUT), folder)
        try:
            listed = ReleaseListing.read(folder)
        except (OSError, ValueError) as error:
            raise StackError(
                f"the families of this release cannot be listed: {why_no_answer(record, folder)}",
                f"What the process printed is in {folder / output_file(0)}.",
            ) from error
        of_ranks = {relation.name: relation.says for relation in layouts.RELATIONS.values()}
        relations = {**listed.relations, **of_ranks}
        if self._earlier is None:
            relations.pop(EARLIER_CHECKPOINT, None)
        return dataclasses.replace(listed, relations=relations)

    def make(self, key: Key) -> HuntCell:
        family, relation = key
        folder = self.folder / CELLS_FOLDER / f"{family}-{relation}"
        begun = time.monotonic()
        if relation in layouts.RELATIONS:

            def listed(way: WayOutcome) -> bool:
                return any(entry.matches(relation, family, way) for entry in self.known)

            with self._launcher() as one:
                outcome = launched.check(
                    layouts.RELATIONS[relation], family, one, folder, self.timeout, listed
                )
        elif relation == EARLIER_CHECKPOINT and self._earlier is not None:
            outcome = self._loaded(family, folder, self._earlier)
        else:
            outcome = self._answer(RelationTask(relation), family, folder)
        spent = round(time.monotonic() - begun, 3)
        if all(way.holds for way in outcome.ways) and not outcome.problem:
            shutil.rmtree(folder, ignore_errors=True)
            return HuntCell(outcome, spent, release=self.release)
        return HuntCell(outcome, spent, str(folder.relative_to(self.root)), self.release)

    def _loaded(self, family: str, folder: Path, earlier: Workers) -> RelationOutcome:
        """Checks what the earlier release saves."""
        place = folder / "saved"
        saving = CheckpointTask(str(place / "checkpoints"))
        saved = earlier._answer(saving, family, place)
        if saved.applicable is not None:
            return dataclasses.replace(saved, applicable=f"the earlier release: {saved.applicable}")
        if saved.problem:
            return dataclasses.replace(saved, problem=f"the earlier release: {saved.problem}")
        try:
            return self._answer(
                RelationTask(EARLIER_CHECKPOINT, earlier=saving.folder), family, folder
            )
        finally:
            shutil.rmtree(saving.folder, ignore_errors=True)

    def _answer(
        self, task: RelationTask | CheckpointTask, family: str, folder: Path
    ) -> RelationOutcome:
        """Checks a relation, or saves for one, in one process."""
        name = task.relation if isinstance(task, RelationTask) else EARLIER_CHECKPOINT
        record = self._run(_trial(name, task, family, self.timeout), folder)
        try:
            return RelationOutcome.read(folder)
        except (OSError, ValueError):
            return RelationOutcome(family, name, problem=why_no_answer(record, folder))

    def probe(self, key: Key, way: str, size: Size) -> RelationOutcome:
        """Returns whether this way holds at this size, without the conditions."""
        family, relation = key
        folder = self.folder / "probes" / f"{family}-{relation}"
        if relation in layouts.RELATIONS:
            with self._launcher() as one:
                return launched.check_way(
                    layouts.RELATIONS[relation], way, size, family, one, folder, self.timeout
                )
        shutil.rmtree(folder, ignore_errors=True)  # of the size before
        return self._answer(RelationTask(relation, way, size), family, folder)

    def stop(self) -> None:
        self.stopping.set()
        if self._earlier is not None:
            self._earlier.stop()

    def close(self) -> None:
        for one in self._all:
            one.close()
        if self._earlier is not None:
            self._earlier.close()

    def _run(self, trial: Trial, folder: Path) -> LaunchRecord:
        with self._launcher() as one:
            return one.run(trial, folder)

    @contextlib.contextmanager
    def _launcher(self) -> Iterator[Launcher]:
        one = self._idle.get()
        try:
            yield one
        finally:
            self._idle.put(one)


def _trial(name: str, task: Task, family: str, timeout: float) -> Trial:
    model = ModelSpec(family=family) if family else ModelSpec()
    return Trial(
        name=name, scenario=layouts.SCENARIO, variant=name, task=task, world_size=1, model=model,
        record=False, timeout=timeout,
    )  # fmt: skip
