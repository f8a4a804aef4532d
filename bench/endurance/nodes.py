"""Several nodes under ``moediag watch``, each a network namespace with a host name of its own: what
the page of each node says of a fault, and on which nodes it is the same. Needs root and ``ip``.

A node whose link is cut keeps its connections open, as after a power cut.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.endurance import cases
from bench.endurance.cases import MOEDIAG
from moediag.result.wording import ranks as of_ranks

LIMIT = 550.0  # seconds for a case
RANKS = 2  # of a node
_DEVICE = "moediag-net"
_OPTIONS = ("--on-hang", "abort", "--quiescence", "1", "--patience", "3", "--silence", "5")
_JOB = """
import pathlib, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, fault, begins = dist.get_rank(), sys.argv[1], int(sys.argv[3])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(10**9):
    if rank == 0 and step == begins:
        pathlib.Path(sys.argv[2]).touch()
    if fault == "slow" and step == begins and rank >= dist.get_world_size() - 2:
        end = time.process_time() + 6.0
        while time.process_time() < end:
            pass
    if fault == "slow" and step == begins + 5:
        break
    if fault != "hang" or step < begins or rank != 3:
        dist.all_reduce(torch.ones(4))
    model(torch.ones(2, 8)).sum().backward()
    time.sleep(0.1)
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class Case:
    """``shared``: the folder of each node is usable: of all, "none" or the "last" one is not."""

    name: str
    job: str = "goes-on"
    shared: str = "all"
    cut: bool = False
    """Cut the last node's link while the job trains, and kill the node."""
    kill: bool = False
    """Kill the last node, whose connections the kernel then closes."""
    step: int = 5
    """When the fault begins, ten steps a second at most."""


CASES = (
    Case("hang: rank 3 skips a reduction under an `if`", "hang"),
    Case("dead node: its processes are killed", kill=True),
    Case("dead node: its link is cut, too", cut=True, kill=True),
    Case("link of a node is cut", cut=True),
    Case("slow node: computes for 6 s, then goes on", "slow"),
    Case("hang; the shared folder is unusable on every node", "hang", "none"),
    Case("hang; the shared folder is unusable on the last node", "hang", "last", step=400),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """``pages``: of each node that lives, by its number."""

    case: Case
    pages: dict[int, dict[str, Any]]
    codes: dict[int, int | None]
    seconds: float

    @property
    def groups(self) -> list[tuple[list[int], str]]:
        """The nodes that say the same, and what."""
        found: dict[str, list[int]] = {}
        for number, page in self.pages.items():
            found.setdefault(json.dumps(page, sort_keys=True), []).append(number)
        return [(numbers, _said(json.loads(text))) for text, numbers in found.items()]


def run(count: int, only: str = "") -> Iterator[Ended]:
    """Runs each case on ``count`` nodes of two ranks."""
    for case in CASES:
        if only in case.name:
            with cases.folder() as place, _network(count):
                yield _one(case, count, place)


def _one(case: Case, count: int, place: Path) -> Ended:
    (place / "job.py").write_text(_JOB)
    (place / "file").touch()
    mark = cases.new_mark()
    watchers = [_start(case, number, count, place, mark) for number in range(count)]
    began = time.monotonic()
    living = range(count - (case.cut or case.kill))
    try:
        until = began + LIMIT
        while not (place / "trains").exists() and time.monotonic() < until:
            time.sleep(0.1)
        began = time.monotonic()
        if case.cut:
            _ip("link", "set", f"{_DEVICE}{count - 1}", "down")
        if case.kill:
            for pid in cases.marked(f"{mark}-{count - 1}"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for number in living:
            with suppress(subprocess.TimeoutExpired):
                watchers[number].wait(max(1.0, until - time.monotonic()))
        spent = time.monotonic() - began
    finally:
        for number, watcher in enumerate(watchers):
            for pid in cases.marked(f"{mark}-{number}"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            watcher.wait()
    codes = {number: watchers[number].returncode for number in living}
    pages = {number: page for number in living if (page := _page(place / f"run-{number}"))}
    return Ended(case, pages, codes, spent)


def _start(case: Case, number: int, count: int, place: Path, mark: str) -> subprocess.Popen[bytes]:
    bad = case.shared == "none" or (case.shared == "last" and number == count - 1)
    shared = place / ("file/below" if bad else "shared")
    words = [
        *MOEDIAG, "watch", "--out", f"run-{number}", "--shared", str(shared), *_OPTIONS, "--",
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--node-rank",
        str(number), "--nproc-per-node", str(RANKS), "--rdzv-endpoint", "10.77.0.1:29511",
        "--local-addr", _address(number), "job.py", case.job, str(place / "trains"),
        str(case.step),
    ]  # fmt: skip
    named = f"hostname node-{number} && exec {shlex.join(words)}"
    inside = ("ip", "netns", "exec", f"{_DEVICE}{number}", "unshare", "--uts", "sh", "-c", named)
    return cases.start(inside, place, f"{mark}-{number}", GLOO_SOCKET_IFNAME="veth")


def _page(run: Path) -> dict[str, Any]:
    """What the page says, without what differs by its nature: times, and what this node lacks."""
    with suppress(OSError, ValueError, KeyError, IndexError):
        trial = json.loads((run / "result.json").read_text())["trials"][-1]
        own = ("seconds", "not_seen", "attached")
        return {name: value for name, value in trial.items() if name not in own}
    return {}


def _said(page: dict[str, Any]) -> str:
    who = f", {of_ranks(page['culprits'])}" if page["culprits"] else ""
    return f"{page['verdict']}{who}: {page['cause']} NEXT {page['next_step']}"


# ------------------------------------------------------------------------ the network


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


@contextmanager
def _network(count: int) -> Iterator[None]:
    """``count`` namespaces on one bridge. Raises CalledProcessError without the rights."""
    bridge = f"{_DEVICE}-br"
    names = [f"{_DEVICE}{number}" for number in range(count)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "veth", "netns", name)
            _ip("link", "set", name, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{_address(number)}/24", "dev", "veth")
            for device in ("lo", "veth"):
                _ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)
        for name in (*names, bridge):  # those of a namespace go with it, but later
            subprocess.run(("ip", "link", "del", name), check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)


def row(ended: Ended) -> Sequence[str]:
    """A row of the report's table."""
    same = "; ".join(
        f"nodes {', '.join(map(str, numbers))}: {text}" for numbers, text in ended.groups
    )
    codes = ", ".join(str(code) for code in ended.codes.values())
    return ended.case.name, same or "no page", codes, f"{ended.seconds:.0f} s"
