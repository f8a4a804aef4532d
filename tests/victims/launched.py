"""Small rank programs for the launchers, chosen by the trial's variant.

Real gloo ranks that write their own heartbeat, so these tests need no recorder. A victim that a
test must interrupt at a certain point writes ``ready-N``, and the test waits for that file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from moediag import protocol


def warm(families: list[str]) -> None:
    import torch.distributed.launcher.api  # noqa: F401


class Rank:
    def __init__(self, folder: Path) -> None:
        import torch.distributed as dist

        self.folder = folder
        self.rank = int(os.environ["RANK"])
        self.progress = 0
        self.beat("starting")
        dist.init_process_group("gloo")
        self.dist = dist
        self.beat("running")

    def beat(self, state: str) -> None:
        """In place: the watchdog never sees a file that is shorter than a heartbeat."""
        self.progress += 1
        record = protocol.Heartbeat.LAYOUT.pack(
            protocol.Heartbeat.MAGIC, self.progress, -1,
            protocol.Heartbeat.STATES.index(state), time.time(), self.progress,
        )  # fmt: skip
        path = self.folder / protocol.heartbeat_file(self.rank)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(fd, record.ljust(protocol.Heartbeat.SIZE, b"\0"))
        os.close(fd)

    def ready(self) -> None:
        (self.folder / f"ready-{self.rank}").touch()

    def all_reduce(self, marked: bool = True) -> float:
        import torch

        self.beat("in-collective" if marked else "running")
        value = torch.ones(4) * (self.rank + 1)
        self.dist.all_reduce(value)
        self.beat("running")
        return float(value[0])


def main(trial_path: str) -> None:
    trial = protocol.Trial.read(trial_path)
    folder = Path(trial_path).parent
    if trial.variant in ALONE:
        ALONE[trial.variant](folder)
        return
    victim = Rank(folder)
    VICTIMS[trial.variant](victim)
    victim.beat("finished")
    victim.dist.destroy_process_group()


def success(me: Rank) -> None:
    assert me.all_reduce() == sum(range(1, me.dist.get_world_size() + 1))
    os.write(1, f"rank {me.rank} prints\n".encode())
    os.write(2, b"native output\n")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    protocol.write_json(me.folder / f"env-{me.rank}.json", {n: os.environ[n] for n in names})


def watched(me: Rank) -> None:
    """Ends once the watching test has created the file ``seen``."""
    me.all_reduce()
    while not (me.folder / "seen").exists():
        time.sleep(0.001)
    success(me)


def exception(me: Rank) -> None:
    me.all_reduce()
    if me.rank == 1:
        raise ValueError("the router is gone")
    me.all_reduce()


def killed(me: Rank) -> None:
    me.all_reduce()
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    me.all_reduce()


def death_beside_waiter(me: Rank) -> None:
    """Rank 0 does not notice rank 1's end: it waits for something else."""
    me.all_reduce()
    me.ready()
    if me.rank == 1:
        while not (me.folder / "ready-0").exists():
            time.sleep(0.001)
        raise ValueError("alone")
    signal.pause()


def hang(me: Rank) -> None:
    me.all_reduce()
    me.ready()
    if me.rank == 0:
        me.all_reduce()
    signal.pause()


def hang_two_groups(me: Rank) -> None:
    """Each rank waits in a collective of another group; no heartbeat says so."""
    groups = [me.dist.new_group([0, 1]) for _ in range(2)]
    import torch

    me.all_reduce()
    me.ready()
    me.dist.all_reduce(torch.ones(1), group=groups[me.rank])


def busy(me: Rank) -> None:
    me.all_reduce()
    me.ready()
    if me.rank == 1:
        while True:
            pass
    me.all_reduce()


def blocked_outside(me: Rank) -> None:
    """Waits, but no rank is in a collective."""
    me.all_reduce()
    me.ready()
    signal.pause()


def stubborn_childless(me: Rank) -> None:
    """Ignores all signals that it can."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    me.all_reduce()
    me.ready()
    signal.pause()


def stubborn(me: Rank) -> None:
    """Ignores what it can, and has a child that does too, of rank 0 even in another session. Then
    it hangs."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, signal.SIG_IGN)
    me.all_reduce()
    subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=me.rank == 0
    )
    me.ready()
    if me.rank == 0:
        me.all_reduce()
    signal.pause()


def slow_start(folder: Path) -> None:
    """Works before its first heartbeat for longer than the quiescence window of its test, as slow
    imports do: rank 0 waits for rank 1, which computes."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        until = time.process_time() + 2.0
        while time.process_time() < until:
            pass
    Rank(folder).all_reduce()


def reference(folder: Path) -> None:
    protocol.write_json(folder / "reference.json", os.environ["WORLD_SIZE"])


def early_exit(folder: Path) -> None:
    raise RuntimeError("before anything")


VICTIMS: dict[str, Callable[[Rank], None]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        success, watched, exception, killed, death_beside_waiter, hang, hang_two_groups, busy,
        blocked_outside, stubborn, stubborn_childless,
    )
}  # fmt: skip
ALONE: dict[str, Callable[[Path], None]] = {
    "slow-start": slow_start, "reference": reference, "early-exit": early_exit,
}  # fmt: skip
