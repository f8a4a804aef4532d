"""Runs the cells of a hunt as jobs of an executor. The release is listed on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
from pathlib import Path

from moediag.lab.campaign.executors import Lost, Remote
from moediag.lab.campaign.hunt.findings import HuntCell, Key
from moediag.lab.campaign.hunt.question import Wanted
from moediag.lab.campaign.hunt.workers import Maker, Workers
from moediag.lab.stacks.environment import Stack
from moediag.protocol import RelationOutcome, ReleaseListing, Size


class Elsewhere(Maker):
    """Each job uses :class:`Workers` on its machine. A cell whose job was lost says so."""

    def __init__(
        self, wanted: Wanted, stack: Stack, folder: Path, release: str, earlier: Stack | None,
        remote: Remote,
    ) -> None:  # fmt: skip
        """See :class:`Workers`."""
        one = dataclasses.replace(wanted, at_once=1)
        self._workers = functools.partial(Workers, one, stack, folder.resolve(), release, earlier)
        self._pickled = pickle.dumps(self._workers)
        self._release = release
        self._remote = remote

    def listing(self) -> ReleaseListing:
        with contextlib.closing(self._workers()) as here:
            return here.listing()

    def make(self, key: Key) -> HuntCell:
        try:
            found: HuntCell = self._remote.on_maker(" ".join(key), self._pickled, "make", key)
        except Lost as lost:
            return HuntCell(RelationOutcome(*key, problem=str(lost)), release=self._release)
        return found

    def probe(self, key: Key, way: str, size: Size) -> RelationOutcome:
        name = " ".join((*key, way))
        try:
            found: RelationOutcome = self._remote.on_maker(
                name, self._pickled, "probe", key, way, size
            )
        except Lost as lost:
            return RelationOutcome(*key, problem=str(lost))
        return found

    def stop(self) -> None:
        self._remote.stop()

    def close(self) -> None:
        """Does nothing: the executor ends its workers."""
