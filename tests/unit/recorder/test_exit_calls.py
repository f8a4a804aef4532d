"""Where the program ends its process itself."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moediag.evidence.events import read_log
from moediag.evidence.model import Left
from moediag.recorder import install


@pytest.fixture
def codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What a recorded process passed to ``os._exit``, which did not end it."""
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    made = install(str(tmp_path), 0, 1, of_job=True)
    yield found
    made.uninstall()
    assert os._exit == found.append


def left(folder: Path) -> Left | None:
    return read_log(folder, 0).left


def test_at_once(codes: list[int], tmp_path: Path) -> None:
    os._exit(3)
    found = left(tmp_path)
    assert found is not None and found.how == "os._exit(3)" and found.at_once
    assert found.lines[0].startswith("test_exit_calls.py:")
    assert found.lines[0].endswith(" test_at_once")
    assert codes == [3]


def test_by_an_exception(codes: list[int], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as raised:
        sys.exit("why")
    assert raised.value.code == "why"
    found = left(tmp_path)
    assert found is not None and found.how == "sys.exit()" and not found.at_once


def test_the_end_of_a_thread_is_none_of_the_process(codes: list[int], tmp_path: Path) -> None:
    def run() -> None:
        with contextlib.suppress(SystemExit):
            sys.exit()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert left(tmp_path) is None


def test_a_program_that_caught_it_and_went_on(codes: list[int], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        sys.exit(1)
    assert left(tmp_path) is not None
    path = next(tmp_path.glob("rank-0.events.jsonl"))
    with path.open("a") as file:
        file.write('{"e":"collective","t":1.0,"n":0,"k":0,"group":"0","op":"barrier"}\n')
    assert left(tmp_path) is None
