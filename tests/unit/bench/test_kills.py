"""A few kills; ``python -m bench.endurance --kills 1000`` does the rest."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from bench.endurance import __main__ as endurance
from bench.endurance import cases

TRACEBACK = 'Traceback (most recent call last):\n  File "/x.py", line 1, in f\n  File "'


def test_a_killed_watch_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kills", "2", "--only", "without torch", "--at-once", "2", "--seed", "1"]
    failed = endurance.main(words)
    said = capsys.readouterr().out
    assert not failed, said
    assert "| watch, 2 ranks without torch | 2 |" in said


def test_a_process_that_stays_is_found_and_killed() -> None:
    with cases.folder() as place:
        mark = cases.new_mark()
        stays = cases.start(
            [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"],
            place, mark,
        )  # fmt: skip
        ends = time.monotonic() + 60
        while "up" not in (place / "output.txt").read_text():  # until then it has our environment
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert cases.marked(mark) == [stays.pid]
        assert cases.gone(mark, 0.1) is None
        assert stays.wait(10) == -9
        assert cases.gone(mark, 0.1) is not None


def test_a_bug_in_the_output_is_found() -> None:
    with cases.folder() as place:
        process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        (place / "output.txt").write_text(f'x\n{TRACEBACK}/moediag/cli/app.py"\nerror: y\nz\n')
        end = cases.ended(process, place, 30.0)
    assert (end.code, end.said) == (3, "error: y")
    assert cases.BUG.search(end.text)
    assert not cases.BUG.search(f'{TRACEBACK}/torch/run.py"\nChildFailedError\n')
