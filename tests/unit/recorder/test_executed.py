"""Files of which a function ran are recorded once each, even if the rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moediag.lab.campaign.bisect.afterwards import read_executed
from moediag.protocol import executed_file

ROOT = Path(__file__).parents[3]

PACKAGE = """\
def called(n):
    return n + 1


class Block:
    def forward(self):
        return called(1)
"""

PROGRAM = """
import sys, threading
import torch, json  # the standard library is none of the packages
from moediag.lab.step import executed
import imported, probed, threaded

stop = executed.start(sys.argv[1], 3)
block = probed.Block()
for _ in range(3):
    block.forward()
torch.nn.Linear(1, 1)
json.dumps(1)
thread = threading.Thread(target=threaded.called, args=(1,))
thread.start()
thread.join()
if sys.argv[2] == "killed":
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
stop()
imported.called(1)
"""


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_a_killed_rank_still_records_of_which_files_functions_ran(tmp_path: Path, end: str) -> None:
    (tmp_path / "site").mkdir()
    for name in ("imported", "probed", "threaded"):
        (tmp_path / "site" / f"{name}.py").write_text(PACKAGE, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "site")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), end],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == (0 if end == "finished" else -signal.SIGKILL), done.stderr
    found = read_executed(tmp_path)
    assert {"probed.py", "threaded.py", "torch/nn/modules/linear.py"} <= found
    assert "imported.py" not in found, "its function was called after the end"
    assert not any(name.startswith(("json", "moediag")) for name in found)
    lines = (tmp_path / executed_file(3)).read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(lines), "each once"


def test_an_incomplete_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "unfixed").mkdir()
    (tmp_path / "unfixed" / executed_file(0)).write_text("a.py\nb.py\nc.p", encoding="utf-8")
    (tmp_path / "unfixed" / executed_file(1)).write_text("d.py\n", encoding="utf-8")
    assert read_executed(tmp_path) == {"a.py", "b.py", "d.py"}
    assert not read_executed(tmp_path / "nothing")
