"""Objects that the recorder knows by identity, recorded decisions, and pauses."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from moediag.recorder import Recorder, decision  # noqa: E402
from moediag.recorder.core import ByObject  # noqa: E402
from tests.unit.recorder.written import events  # noqa: E402


class Thing:
    """An object without cycles, so it is freed immediately."""


class TestByObject:
    def test_each_object_has_one_entry(self) -> None:
        known, one, other = ByObject(), Thing(), Thing()
        assert known.set(one, "a") == "a"
        assert known.setdefault(one, "b") == "a"
        assert (known.get(one), known.get(other)) == ("a", None)

    def test_another_object_at_the_same_address_has_no_entry(self) -> None:
        known = ByObject()
        thing = Thing()
        for _ in range(1000):
            address = id(thing)
            known.set(thing, "old")
            del thing
            thing = Thing()
            if id(thing) == address:
                break
        else:
            pytest.skip("no address was given twice")
        assert known.get(thing) is None
        assert known.setdefault(thing, "new") == "new"

    def test_values_of_deleted_objects_are_dropped(self) -> None:
        known, lost, *kept = ByObject(), *(Thing() for _ in range(200))
        value = weakref.ref(known.set(lost, Thing()))
        del lost
        for one in kept:
            known.set(one, "a")
        assert value() is None and all(known.get(one) == "a" for one in kept)


def test_decisions_of_a_job_are_recorded(recorder: Recorder, tmp_path: Path) -> None:
    recorder.step(3)
    decision("micro-batches", 2)
    decision("optimizer step", "skipped optimizer.step()")
    decision("metric", ("loss", "kl"))
    told = [(e["what"], e["value"], e["step"]) for e in events(tmp_path, "decision")]
    assert told == [
        ("micro-batches", 2, 3),
        ("optimizer step", "skipped optimizer.step()", 3),
        ("metric", ["loss", "kl"], 3),
    ]


def test_computation_in_a_pause_is_not_recorded(recorder: Recorder, tmp_path: Path) -> None:
    with recorder.paused():
        decision("micro-batches", 9)
        beside = nn.Linear(2, 2)
        beside(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(beside.parameters(), lr=0.1).step()
    assert recorder.active
    assert events(tmp_path, "decision") == []
    assert recorder.roots == []
    job = nn.Sequential(nn.Linear(2, 2))
    job(torch.ones(1, 2))
    assert [reference() for _, reference in recorder.roots] == [job]


def test_what_is_not_seen_is_told_once_and_is_no_progress_of_the_rank(
    recorder: Recorder, tmp_path: Path
) -> None:
    recorder.phase("training")
    before = recorder.heartbeat.progress
    recorder.note_not_seen("Flight Recorder: this torch keeps none")
    recorder.note_not_seen("Flight Recorder: this torch keeps none")
    assert len(events(tmp_path, "not_seen")) == 1
    assert recorder.heartbeat.progress == before, "watch would withdraw its verdict"
