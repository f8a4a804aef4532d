"""``@pytest.mark.ranks`` on real ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moediag import pytest_plugin

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
