"""Functions that ran are recorded once each, even if the rank dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moediag.lab.campaign.bisect.executed import read_executed
from moediag.protocol import executed_file

ROOT = Path(__file__).parents[3]

PACKAGE = """\
import functools


def called(n):
    return n + 1


def not_called():
    return 0


@functools.lru_cache
def decorated():
    return (lambda: 3)()


class Block:
    def forward(self):
        return called(1)
"""

PROGRAM = """
import sys, threading
import torch, json  # the standard library is none of the packages
from moediag.recorder import executed
import probed

class Recorder:
    rank = 3
    on_module = None

recorder = Recorder()
stop = executed.start(sys.argv[1], recorder)
block = probed.Block()
for _ in range(3):
    block.forward()
thread = threading.Thread(target=probed.decorated)
thread.start()
thread.join()

class Wrapped(probed.Block): pass
for name in ("", "layers.0.mlp", "layers.1.mlp"):
    recorder.on_module(Wrapped(), name)
if sys.argv[2] == "killed":
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
stop()
probed.not_called()
"""


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_a_killed_rank_still_records_which_functions_ran(tmp_path: Path, end: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "probed.py").write_text(PACKAGE, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "site")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), end],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == (0 if end == "finished" else -signal.SIGKILL), done.stderr
    found = read_executed(tmp_path)
    # Imported (0), called, decorated with its lambda (from the decorator on), Block.forward.
    assert found.functions["probed.py"] == {0, 4, 12, 14, 18}
    assert found.classes == {("probed.py", "Block"): {"", "layers.*.mlp"}}
    assert "torch/nn/modules/module.py" in found.functions, "imported before it began"
    assert not any(name.startswith(("json", "moediag")) for name in found.functions)
    lines = (tmp_path / executed_file(3)).read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(lines), "each once"


def test_a_truncated_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / executed_file(0)).write_text('[0,"a.py"]\n[0,3]\n[9,7]\nnull\n[0,1', "utf-8")
    (tmp_path / executed_file(1)).write_text('[5,"a.py"]\n[5,8]\n', encoding="utf-8")
    assert read_executed(tmp_path).functions == {"a.py": {3, 8}}
    assert not read_executed(tmp_path / "nothing")
