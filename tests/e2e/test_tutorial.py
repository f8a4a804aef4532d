"""The tutorial's program hangs and is silently wrong as its page says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(body) for body in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)]


def watched(folder: Path, program: str, *options: str) -> dict[str, object]:
    (folder / "train.py").write_text(program, encoding="utf-8")
    line = [sys.executable, "-m", "moediag", "watch", "--json", *options, "--out", "run", "--"]
    line += [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node", "2", "train.py"]
    done = subprocess.run(
        line, cwd=folder, check=False, capture_output=True, text=True, timeout=180
    )
    trial: dict[str, object] = json.loads(done.stdout)["trials"][-1]
    return trial


def test_the_program_hangs(tmp_path: Path) -> None:
    found = watched(tmp_path, BLOCKS[0], "--on-hang", "abort")
    assert (found["verdict"], found["culprits"]) == ("hang", [0])


def test_repaired_and_then_silently_wrong_it_breaks_a_law(tmp_path: Path) -> None:
    program, repair, mistake = BLOCKS
    head, tail = program.split("        if step == 3:\n")
    end = tail[tail.index("    dist.destroy_process_group()") :]
    program = head + textwrap.indent(repair, " " * 8) + end
    assert watched(tmp_path, program)["verdict"] == "clean"
    wrong = program.replace("        scheduler.step()\n", textwrap.indent(mistake, " " * 8))
    assert wrong != program
    (tmp_path / "again").mkdir()
    found = watched(tmp_path / "again", wrong, "--laws")
    assert found["verdict"] == "replica-divergence"
    assert "The learning rate differs since step 3: 0.01 on rank 0" in str(found["cause"])
