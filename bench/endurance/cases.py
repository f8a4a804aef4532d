"""What all parts of the campaign share: commands in a folder of their own, and what they leave."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moediag.errors import MoediagError
from moediag.launch.processes import all_stats
from moediag.pipeline.examine import examine

MOEDIAG = (sys.executable, "-m", "moediag")
MARK = "MOEDIAG_ENDURANCE_MARK"
ROOT = Path(__file__).parents[2]

# Two ranks without torch, which take a second: hundreds of kills take minutes.
PLAIN_JOB = """
import os, subprocess, sys, time
if "RANK" in os.environ:
    for step in range(int(sys.argv[1])):
        print("step", step, flush=True)
        time.sleep(0.05)
else:
    ranks = [subprocess.Popen([sys.executable, *sys.argv],
                              env=dict(os.environ, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE="2"))
             for r in range(2)]
    sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
GLOO_JOB = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(int(sys.argv[1])):
    if len(sys.argv) > 2 and step == 3 and dist.get_rank() == 1:
        dist.all_reduce(torch.ones(3))
    model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""
RESUMING_JOB = """
import sys, torch
path = sys.argv[1] + "/ckpt.pt"
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
first = 0
if len(sys.argv) > 2:
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 6):
    model(torch.full((2, 4), float(step))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "step": step + 1}, path)
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
# A traceback through the control side; jobs and torchrun print others.
BUG = re.compile(
    r"a bug in moediag|^Traceback \(most recent call last\):(?:\n  .*)*?"
    r"\n  File \".*/moediag/(?:lab/)?(?:cli|pipeline|launch|campaign)/",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended; ``code`` None if it had to be killed."""

    code: int | None
    text: str
    seconds: float

    @property
    def said(self) -> str:
        """The error that the user saw, else the last line."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return next((one for one in lines if one.startswith("error: ")), lines[-1] if lines else "")


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder with the victims' programs."""
    with tempfile.TemporaryDirectory(prefix="endurance-", ignore_cleanup_errors=True) as name:
        place = Path(name)
        (place / "plain.py").write_text(PLAIN_JOB)
        (place / "gloo.py").write_text(GLOO_JOB)
        (place / "resuming.py").write_text(RESUMING_JOB)
        yield place


def variables(mark: str) -> dict[str, str]:
    """The environment of a command whose processes are marked."""
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NO_COLOR": "1", MARK: mark}
    return {**os.environ, **given}


def start(words: Sequence[str], place: Path, mark: str, **more: str) -> subprocess.Popen[bytes]:
    """Starts a command in ``place``, its output in ``output.txt``, its processes marked."""
    with (place / "output.txt").open("ab") as out:
        return subprocess.Popen(
            words, cwd=place, env={**variables(mark), **more}, stdout=out, stderr=out,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def ended(process: subprocess.Popen[bytes], place: Path, seconds: float) -> Ended:
    began = time.monotonic()
    try:
        code: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    text = (place / "output.txt").read_text(encoding="utf-8", errors="replace")
    return Ended(code, text, time.monotonic() - began)


def marked(mark: str) -> list[int]:
    """The living processes that a command started."""
    found = []
    for stat in all_stats().values():
        try:
            environment = Path(f"/proc/{stat.pid}/environ").read_bytes()
        except OSError:
            continue
        if stat.alive and f"{MARK}={mark}".encode() in environment.split(b"\0"):
            found.append(stat.pid)
    return found


def gone(mark: str, seconds: float, stayed: list[str] | None = None) -> float | None:
    """Waits until no process of a command is left; returns the seconds, or None if some stay. Those
    are killed; ``stayed`` gets the state, parent and command of each."""
    began = time.monotonic()
    while left := marked(mark):
        if time.monotonic() - began > seconds:
            for pid in left:
                if stayed is not None:
                    stat = all_stats().get(pid)
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    stayed.append(f"{stat}: {b' '.join(command).decode(errors='replace')[-60:]}")
                os.kill(pid, signal.SIGKILL)
            return None
        time.sleep(0.05)
    return time.monotonic() - began


def new_mark() -> str:
    return uuid.uuid4().hex


def unreadable(out: Path) -> str:
    """Why `moediag diagnose` cannot read what a command left; "" if it can, or says why not."""
    try:
        examine([out])
    except MoediagError:
        return ""
    except Exception as error:  # this is what is looked for
        return f"{type(error).__name__}: {error}"
    return ""


def shown(words: Sequence[str]) -> str:
    names = ["moediag" if words[:3] == MOEDIAG else "", *words[3:]]
    return shlex.join(names).replace(sys.executable, "python")
