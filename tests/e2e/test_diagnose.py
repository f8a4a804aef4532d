"""`moediag diagnose` on the files of a real torch job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from moediag.cli import app
from tests.e2e.launchers import PLAIN

VICTIM = Path(__file__).parents[1] / "victims" / "leaves_dumps.py"


@pytest.mark.e2e
def test_dumps_and_stacks_of_a_real_job_are_diagnosed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    job = subprocess.Popen(
        [*PLAIN, "3", str(VICTIM), str(tmp_path)], env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        _, said = job.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, said
    (tmp_path / "left-out").unlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"trace_rank_{r}" for r in range(3)]
    diagnose = ["diagnose", "--json", str(tmp_path)]
    # gloo's dumps do not tell when they were written, so the job may have been running.
    assert app.main(diagnose) == 3
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert (trial["verdict"], trial["culprits"], trial["victims"]) == ("inconclusive", [], [])
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    assert app.main([*diagnose, "--taken-at", later.isoformat()]) == 1
    (trial,) = json.loads(capsys.readouterr().out)["trials"]
    assert (trial["verdict"], trial["culprits"], trial["victims"]) == ("hang", [2], [0, 1])
    line = next(n for n, t in enumerate(VICTIM.read_text().splitlines(), 1) if "all_gather(" in t)
    assert f"all_gather at leaves_dumps.py:{line} step" in trial["cause"]
