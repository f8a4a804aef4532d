"""``@pytest.mark.ranks`` on real ranks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moediag import pytest_plugin
from tests.e2e.marked import MARK, eventually, gone

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

TESTS = Path(__file__).parents[1] / "victims" / "ranks_tests.py"


def session(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Starts pytest on the tests of the victim in ``folder``, whose path is the session's mark."""
    shutil.copy(TESTS, folder / "test_ranks.py")
    root = str(Path(pytest_plugin.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", MARK: str(folder)}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", pytest_plugin.NAME, "-rA", "--show-capture=no",
         *options, "test_ranks.py"],
        cwd=folder, text=True, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_ranks_fail_with_the_page(tmp_path: Path) -> None:
    text, _ = session(tmp_path, "-k", "not sleeps and not forks and not awaits").communicate(
        timeout=300
    )
    assert "4 failed, 2 passed" in text, text
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


def test_two_sessions_in_one_folder_beside_other_plugins(tmp_path: Path) -> None:
    which = ("-k", "good or hangs or forks or awaits")
    sessions = [session(tmp_path, *which, *more) for more in (("-n", "2"), ("--timeout", "280"))]
    try:
        texts = [one.communicate(timeout=300)[0] for one in sessions]
    finally:
        for one in sessions:
            one.kill()
    for text in texts:
        assert "1 failed, 3 passed" in text, text
        assert re.search(r"^rank 0 at test_ranks.py:\d+ test_hangs: hang", text, re.M)
    assert len(list(tmp_path.glob("moediag-runs/*/result.json"))) == 2
    gone(str(tmp_path))


@pytest.mark.parametrize(
    ("ending", "options"),
    [
        (signal.SIGKILL, ()),
        (signal.SIGTERM, ()),
        (signal.SIGINT, ()),
        (signal.SIGKILL, ("-n", "1")),
    ],
)
def test_nothing_outlives_pytest(
    tmp_path: Path, ending: signal.Signals, options: tuple[str, ...]
) -> None:
    """Each rank writes its pid, then sleeps; pytest is ended once both have."""
    one = session(tmp_path, "-k", "sleeps", *options)
    try:
        eventually(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "both ranks run", 120)
        one.send_signal(ending)
        one.wait(60)
    finally:
        one.kill()
        one.communicate()
    gone(str(tmp_path))
