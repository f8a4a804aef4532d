"""SIGKILL for any process at any moment: no process and no partial record is left.

The moments are random on purpose (seeded by the case): importing, forking, meeting, running.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from moediag.evidence.launch_record import read_launch
from moediag.protocol import LAUNCH_FILE
from tests.e2e.marked import gone, marked

pytestmark = pytest.mark.e2e

PARENT = Path(__file__).parents[1] / "victims" / "launch_parent.py"


MOMENTS = [pytest.param(n, marks=() if n < 3 else pytest.mark.wide) for n in range(20)]


@pytest.mark.parametrize("case", MOMENTS)
def test_sigkill_at_a_random_moment_leaves_no_process(case: int, tmp_path: Path) -> None:
    dice = random.Random(case)
    mark = uuid.uuid4().hex
    kind = ("fork", "torchrun")[case % 2]
    command = [sys.executable, str(PARENT), kind, "stubborn-childless", str(tmp_path), mark]
    parent = subprocess.Popen(command, start_new_session=True)
    try:
        time.sleep(dice.uniform(0.05, 3.5))
        below = marked(mark)
        target = dice.choice(below) if below and dice.random() < 0.6 else parent.pid
        os.kill(target, signal.SIGKILL)
        parent.wait(60)
    finally:
        parent.kill()
        parent.wait()
    gone(mark)
    record = tmp_path / "stubborn-childless" / LAUNCH_FILE
    if target != parent.pid:
        assert not read_launch(record).succeeded
    else:
        assert not record.exists() or read_launch(record).started
