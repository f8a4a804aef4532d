"""Counts of tokens that are still on the device, with stand-ins for its events."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moediag.evidence.events import read_log
from moediag.evidence.model import TokenCount
from moediag.recorder import install
from moediag.recorder.core import Recorder

COUNTS = torch.tensor([3, 0, 5])


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = install(str(tmp_path), 0, 1)
    yield made
    made.uninstall()


def pending(recorder: Recorder, arrived: bool) -> None:
    event = SimpleNamespace(query=lambda: arrived)
    recorder.deferred_tokens._pending.append((1, "layers.0.mlp", COUNTS, event))


def test_counts_of_a_rank_that_stopped_are_written(recorder: Recorder, tmp_path: Path) -> None:
    pending(recorder, arrived=True)
    pending(recorder, arrived=False)  # behind the call in which the device is stuck
    recorder.stopped()
    assert read_log(tmp_path, 0).tokens == [TokenCount(1, "layers.0.mlp", (3, 0, 5))]


def test_no_count_is_read_while_a_graph_is_captured(recorder: Recorder, tmp_path: Path) -> None:
    pending(recorder, arrived=True)
    recorder.captures._running += 1
    recorder.stopped()
    assert read_log(tmp_path, 0).tokens == []
    recorder.captures._running -= 1
    recorder.stopped()
    assert len(read_log(tmp_path, 0).tokens) == 1
