"""A watched job that restarts again and again: what watcher and ranks hold as time goes by.

Importing torch takes the ranks seconds. Light ones do not: they leave what two ranks recorded
before, so that hundreds of attempts an hour are followed, diagnosed and removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.endurance import cases
from bench.endurance.cases import MOEDIAG

_JOB = """
import os, sys, time, torch, torch.distributed as dist
# torchrun gives restarted ranks the store of those before them (torch 2.13), with the addresses of
# dead processes: without a prefix, gloo connects to these or waits in init_process_group.
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
end = time.monotonic() + float(sys.argv[1])
while True:
    model(torch.ones(2, 64)).sum().backward()
    time.sleep(0.02)
    if time.monotonic() > end and dist.get_rank() == 0:
        os._exit(7)  # as a failing rank does; torchrun starts all of them again
"""

_LIGHT = """
import os, pathlib, shutil, sys, time
folder = pathlib.Path(os.environ["MOEDIAG_WATCH"], "attempt-" + os.environ["MOEDIAG_ATTEMPT"])
folder.mkdir(exist_ok=True)
for path in pathlib.Path(sys.argv[2]).glob(f"rank-{os.environ['RANK']}.*"):
    if not (folder / path.name).exists():
        shutil.copy(path, folder)
time.sleep(float(sys.argv[1]) + (60 if os.environ["RANK"] == "1" else 0))
os._exit(7)
"""
_RECORDED = cases.ROOT / "tests" / "samples" / "watched" / "attempt-0"


@dataclass(frozen=True, slots=True)
class Held:
    """What processes hold at one time: memory and disk in MiB."""

    minutes: float
    restarts: int
    watcher: tuple[float, int, int]  # memory, file descriptors, threads
    ranks: tuple[float, int, int]  # the most of one rank
    disk: float


def run(hours: float, every: float, light: bool = False, restarts: int = 100_000) -> Iterator[Held]:
    """Watches a job that fails every ``every`` seconds; yields about twenty rows. ``light``: its
    ranks do not import torch."""
    with cases.folder() as place:
        (place / "job.py").write_text(_LIGHT if light else _JOB)
        mark = cases.new_mark()
        launcher = [*cases.TORCHRUN, "--max-restarts", str(restarts)]
        launcher += ["--monitor-interval", "0.1"] if light else []
        launcher += ["job.py", str(every), *([str(_RECORDED)] if light else [])]
        process = cases.start([*MOEDIAG, "watch", "--out", "out", "--", *launcher], place, mark)
        began = time.monotonic()
        try:
            for row in range(1, 21):
                time.sleep(max(0.0, began + row * hours * 180 - time.monotonic()))
                if process.poll() is not None:
                    raise RuntimeError(f"the watcher ended: {process.returncode}")
                yield _held(process.pid, mark, place / "out", (time.monotonic() - began) / 60)
        finally:
            process.terminate()
            cases.gone(mark, 30.0)
            process.wait()


def _held(watcher: int, mark: str, out: Path, minutes: float) -> Held:
    ranks = [(0.0, 0, 0)]
    for pid in cases.marked(mark):
        with suppress(OSError):
            if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                ranks.append(_of(pid))
    files = [0]
    for path in out.rglob("*"):
        with suppress(OSError):  # removed meanwhile
            files.append(path.stat().st_size if path.is_file() else 0)
    # Most are removed by then, so the last one's number counts.
    last = max((int(path.name.split("-")[1]) for path in out.glob("attempt-*")), default=0)
    most = tuple(map(max, zip(*ranks, strict=True)))
    return Held(minutes, last, _of(watcher), most, sum(files) / 2**20)  # type: ignore[arg-type]


def _of(pid: int) -> tuple[float, int, int]:
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    memory = int(fields["VmRSS"].split()[0]) / 1024
    return memory, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"])  # noqa: PTH208
