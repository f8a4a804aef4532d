"""Batches that data loaders gave, and exceptions that are being handled."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moediag.evidence.events import read_log
from moediag.recorder import Recorder, install


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = install(str(tmp_path), 0, 1, of_job=True)
    yield made
    made.uninstall()


def loader(number: int) -> object:
    return torch.utils.data.DataLoader(torch.ones(number, 2), batch_size=1)


def test_a_loader_that_ended(recorder: Recorder, tmp_path: Path) -> None:
    for _ in loader(3):
        pass
    (found,) = read_log(tmp_path, 0).batches
    assert (found.number, found.ended) == (3, True)
    assert found.line.startswith("test_batches.py:") and found.line.endswith(
        " test_a_loader_that_ended"
    )


def test_a_loader_in_use(recorder: Recorder, tmp_path: Path) -> None:
    batches = iter(loader(3))
    next(batches)
    next(batches)
    before = recorder.heartbeat.progress
    recorder.captured()
    recorder.captured()
    assert [(b.number, b.ended) for b in read_log(tmp_path, 0).batches] == [(2, False)]
    assert recorder.heartbeat.progress == before, "the rank itself made no progress"


def test_a_loader_that_was_examined_and_then_ended_counts_once(
    recorder: Recorder, tmp_path: Path
) -> None:
    for _ in loader(2):
        recorder.captured()
    assert [(b.number, b.ended) for b in read_log(tmp_path, 0).batches] == [(2, True)]


def test_a_loader_that_an_exception_left(recorder: Recorder, tmp_path: Path) -> None:
    def train() -> None:
        for _ in loader(3):
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    try:
        train()
    except RuntimeError as error:
        recorder.error(error)
    (found,) = read_log(tmp_path, 0).batches
    assert found.line.endswith(" train") and (found.number, found.ended) == (1, False)


def test_a_discarded_loader_is_not_kept_alive(recorder: Recorder, tmp_path: Path) -> None:
    batches = iter(loader(3))
    next(batches)
    del batches
    recorder.captured()
    assert read_log(tmp_path, 0).batches == []


def test_after_uninstall_loaders_are_as_before(tmp_path: Path) -> None:
    kind = torch.utils.data.dataloader._BaseDataLoaderIter
    original = kind.__next__
    made = install(str(tmp_path), 0, 1, of_job=True)
    assert kind.__next__ is not original
    made.uninstall()
    assert kind.__next__ is original


def fail() -> None:
    raise ValueError("corrupt sample")


def test_an_exception_that_is_handled(recorder: Recorder, tmp_path: Path) -> None:
    try:
        fail()
    except ValueError:
        recorder.captured()
    error = read_log(tmp_path, 0).handling
    assert error is not None
    assert (error.type, error.message) == ("ValueError", "corrupt sample")
    assert error.where.endswith(" fail")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_exceptions_that_end_threads(recorder: Recorder, tmp_path: Path) -> None:
    for function in (fail, sys.exit, list):
        thread = threading.Thread(target=function, name="sender")
        thread.start()
        thread.join()
    (error,) = read_log(tmp_path, 0).thread_errors
    assert (error.type, error.message, error.thread) == ("ValueError", "corrupt sample", "sender")
    assert error.where.endswith(" fail")
    assert error.time > 0


def test_an_exception_that_was_handled_is_forgotten(recorder: Recorder, tmp_path: Path) -> None:
    with contextlib.suppress(ValueError):
        fail()
    recorder.captured()
    assert read_log(tmp_path, 0).handling is None
