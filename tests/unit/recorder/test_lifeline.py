"""A rank ends with its parent and writes its stacks on SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moediag.protocol import stacks_file

RANK = """
import os, signal, sys
from moediag.recorder import lifeline
lifeline.attach(sys.argv[1], 3)
def waits_for_ever():
    os.write(int(sys.argv[2]), b"ready")
    while True:
        signal.pause()
waits_for_ever()
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]],
                         pass_fds=[int(sys.argv[3])], start_new_session=True)
child.wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's parent signal")
def test_a_rank_dies_with_its_killed_parent(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, RANK, str(tmp_path), str(writing)], pass_fds=[writing]
    )
    os.close(writing)
    assert os.read(reading, 5) == b"ready"
    parent.kill()
    parent.wait()
    # The rank holds the other end, so end of file means that it is gone.
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_sigterm_writes_the_stacks_and_still_ends_the_rank(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path), str(writing)], pass_fds=[writing]
    )
    os.close(writing)
    assert os.read(reading, 5) == b"ready"
    rank.terminate()
    assert rank.wait(timeout=60) == -signal.SIGTERM
    os.close(reading)
    assert "waits_for_ever" in (tmp_path / stacks_file(3)).read_text()
