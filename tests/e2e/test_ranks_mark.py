"""``@pytest.mark.ranks`` on real ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from moediag import pytest_plugin
from tests.e2e.marked import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

TESTS = Path(__file__).parents[1] / "victims" / "ranks_tests.py"


def test_ranks_fail_with_the_page(tmp_path: Path) -> None:
    shutil.copy(TESTS, tmp_path / "test_ranks.py")
    root = str(Path(pytest_plugin.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    line = [sys.executable, "-m", "pytest", "-p", pytest_plugin.NAME, "-rA", "--show-capture=no"]
    done = subprocess.run(
        [*line, "test_ranks.py"], cwd=tmp_path, check=False, capture_output=True, text=True,
        env=environment, timeout=300,
    )  # fmt: skip
    text = done.stdout
    assert "4 failed, 2 passed" in text, text + done.stderr
    assert "PASSED test_ranks.py::test_good" in text
    assert "PASSED test_ranks.py::test_keeps_the_laws" in text
    of = dict(re.findall(r"^_+ (test_\w+) _+\n(.*?)(?=^_+ test|^=+ )", text, re.S | re.M))
    assert "rank 1 of 2:" in of["test_wrong"] and "CAUSE" not in of["test_wrong"]
    assert re.search(r"CULPRIT +rank 0", of["test_hangs"])
    assert "under `if rank == 0` at test_ranks.py:" in of["test_hangs"]
    assert "replica-divergence" in of["test_breaks_a_law"]
    assert "The ranks were ended after 15 seconds." in of["test_never_ends"]
    for name in ("wrong", "hangs", "breaks_a_law", "never_ends"):
        assert list(tmp_path.glob(f"moediag-runs/*test-test_{name}/result.json")), name
    assert not list(tmp_path.glob("moediag-runs/*test_good*"))


def test_nothing_outlives_a_killed_pytest(tmp_path: Path) -> None:
    """Each rank writes its pid, then sleeps; pytest is killed once both have."""
    (tmp_path / "test_sleeps.py").write_text(
        "import os, pathlib, time, pytest\n"
        "@pytest.mark.ranks(2)\n"
        "def test_sleeps():\n"
        "    rank = os.environ['RANK']\n"
        "    pathlib.Path(f'part-{rank}').write_text(str(os.getpid()))\n"
        "    os.rename(f'part-{rank}', f'pid-{rank}')\n"
        "    time.sleep(3600)\n"
    )
    root = str(Path(pytest_plugin.__file__).parents[1])
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", pytest_plugin.NAME, "test_sleeps.py"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        eventually(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "both ranks run", 120)
    finally:
        session.kill()
        session.wait()
    ranks = [psutil.Process(int(file.read_text())) for file in tmp_path.glob("pid-*")]
    eventually(lambda: not any(rank.is_running() for rank in ranks), "no rank lives on")
