"""Measures the seconds from the last progress of a job of four ranks to the page of `moediag
watch`, minus the quiescence window."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.accuracy import bounded

ROOT = Path(__file__).parents[1]
JOB = ROOT / "tests" / "victims" / "jobs.py"
RANKS = 4
BOUND = 180.0
_PAGE = re.compile(r"CAUSE")


def stall_to_page(victim: str = "skips") -> tuple[float, str]:
    """Returns the seconds until the page can be read from the pipe. Raises RuntimeError if no page
    comes."""
    with tempfile.TemporaryDirectory(prefix="moediag-bench-") as place:
        run = Path(place) / "run"
        command = [
            sys.executable, "-m", "moediag", "watch", "--out", str(run), "--",
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(RANKS), str(JOB), victim,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=ROOT, env=bounded.environment(), stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            shown = _when_shown(process)
            process.send_signal(signal.SIGINT)  # by default a job that hangs is left alone
            process.wait(60)
        finally:
            bounded.end(process.pid)
            process.wait()
        (attempt,) = run.glob("attempt-0")
        launch = json.loads((attempt / "launch.json").read_text())
        trial = json.loads((run / "result.json").read_text())["trials"][-1]
    since = shown - launch["started"] - launch["stall"]["at"]
    window = launch["stall"]["window"]
    return since - window, (
        f"{RANKS} ranks, {trial['verdict']}, page after {since:.1f} s, window {window:.1f} s, "
        f"evidence {launch['capture_seconds']:.1f} s of it"
    )


def _when_shown(process: subprocess.Popen[bytes]) -> float:
    """Returns the time (epoch seconds) at which the page arrived."""
    assert process.stdout is not None
    descriptor, text, until = process.stdout.fileno(), b"", time.monotonic() + BOUND
    os.set_blocking(descriptor, False)
    while time.monotonic() < until:
        try:
            part = os.read(descriptor, 65536)
        except BlockingIOError:
            time.sleep(0.02)
            continue
        if not part:
            break
        text += part
        if _PAGE.search(text.decode(errors="replace")):
            return time.time()
    raise RuntimeError(f"no page came: {text.decode(errors='replace')[-500:]}")


if __name__ == "__main__":
    print(stall_to_page())  # noqa: T201
