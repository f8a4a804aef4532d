"""`moediag watch` on two nodes: two agents on the loopback, each under its own watcher. On one
machine a killed node closes its connections; after a power cut it would not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from moediag.pipeline import examine
from tests.victims.table import JOBS, marked

pytestmark = pytest.mark.e2e

QUICK = ("--quiescence", "1", "--patience", "2", "--silence", "3")
LIMIT = 180.0  # seconds


@dataclass
class Nodes:
    """Watchers started so far, by the number of their node."""

    folder: Path
    shared: bool = True
    bad: int | None = None
    """The node that cannot use the shared folder."""
    options: Sequence[str] = ("--on-hang", "abort", *QUICK)
    port: int = 0
    watchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, command: Sequence[str], **environment: str) -> None:
        number = len(self.watchers)
        env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", **environment)
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        own = ["--json", "--out", str(self.run(number))]
        shared = self.folder / ("file/below" if number == self.bad else "shared")
        own += ["--shared", str(shared)] if self.shared else []
        line = [sys.executable, "-m", "moediag", "watch", *own, *self.options, "--", *command]
        with (self.folder / f"{number}.err").open("w") as err:
            self.watchers.append(
                subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=err, text=True)
            )

    def agents(self, *victim: str, ranks: Sequence[int], options: Sequence[str] = ()) -> None:
        """A torchrun for each node."""
        for number, mine in enumerate(ranks):
            self.start(
                [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(ranks)),
                 "--node-rank", str(number), "--nproc-per-node", str(mine),
                 "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--local-addr", "127.0.0.1",
                 *options, str(JOBS), *victim]
            )  # fmt: skip

    def tasks(self, *victim: str, world: int) -> None:
        """One rank per node without an agent, as srun starts them."""
        for rank in range(world):
            self.start(
                [sys.executable, str(JOBS), *victim], RANK=str(rank), WORLD_SIZE=str(world),
                LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port),
            )  # fmt: skip

    def run(self, number: int) -> Path:
        return self.folder / f"run-{number}"

    def result(self, number: int) -> tuple[int, dict[str, Any]]:
        """Exit code and last trial of one node's watcher."""
        code, trials = self.trials(number)
        return code, trials[-1]

    def trials(self, number: int) -> tuple[int, list[dict[str, Any]]]:
        watcher = self.watchers[number]
        out, _ = watcher.communicate(timeout=LIMIT)
        said = (self.folder / f"{number}.err").read_text()
        assert out, said
        return watcher.returncode, json.loads(out)["trials"]

    def everything(self, number: int) -> list[psutil.Process]:
        """A node: its watcher, agent and ranks."""
        watcher = psutil.Process(self.watchers[number].pid)
        return [watcher, *watcher.children(recursive=True)]

    def hit(self, number: int, sig: signal.Signals) -> None:
        for process in self.everything(number):
            process.send_signal(sig)

    def end(self) -> None:
        for number, watcher in enumerate(self.watchers):
            if watcher.poll() is None:
                self.hit(number, signal.SIGKILL)
                watcher.wait()
            assert watcher.stdout is not None
            watcher.stdout.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = Nodes(tmp_path, port=port)
    try:
        yield found
    finally:
        found.end()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.05)


def test_both_watchers_report_the_rank_on_the_other_node(nodes: Nodes) -> None:
    nodes.options = ("--on-hang", "abort", "--quiescence", "1", "--patience", "1")
    nodes.tasks("data_loader", world=2)
    for number in range(2):
        code, trial = nodes.result(number)
        assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", [1]), trial["cause"]
        assert "waits for data" in trial["cause"]
        assert "Rank 1 runs on node 1" in trial["cause"]
        assert trial["world_size"] == 2


def _page(run: Path) -> dict[str, Any]:
    """What the page of a node says, without what differs by its nature."""
    (trial,) = json.loads((run / "result.json").read_text())["trials"]
    own = ("seconds", "not_seen", "attached")
    return {name: value for name, value in trial.items() if name not in own}


@pytest.mark.wide
def test_a_rank_that_skips_a_collective_is_the_culprit(nodes: Nodes) -> None:
    nodes.agents("skips", ranks=(1, 2))
    for number in range(2):
        code, trial = nodes.result(number)
        assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", [1]), trial["cause"]
        assert trial["victims"] == [0, 2]
        assert any(line in trial["cause"] for line in marked("skips"))
        assert "Rank 1 runs on node 1" in trial["cause"]
    (again,) = examine.examine([nodes.run(0), nodes.run(1)]).result.trials
    assert (again.verdict, again.culprits, again.victims) == ("hang", (1,), (0, 2))
    assert again.cause == trial["cause"]
    assert _page(nodes.run(0)) == _page(nodes.run(1))


@pytest.mark.wide
def test_a_node_that_cannot_use_the_shared_folder_is_met_at_the_store(nodes: Nodes) -> None:
    (nodes.folder / "file").touch()
    nodes.bad = 0
    nodes.agents("skips", ranks=(1, 2))
    for number in range(2):
        code, trial = nodes.result(number)
        assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", [1]), trial["cause"]
    assert _page(nodes.run(0)) == _page(nodes.run(1))


@pytest.mark.wide
def test_a_killed_node_is_reported(nodes: Nodes, tmp_path: Path) -> None:
    nodes.agents("goes_on", str(tmp_path / "trains"), ranks=(2, 1))
    wait_for(tmp_path / "trains")
    nodes.hit(1, signal.SIGKILL)
    code, trial = nodes.result(0)
    assert (code, trial["culprits"]) == (1, [2]), trial["cause"]
    assert trial["verdict"] in ("crash", "hang")
    assert "ode 1 (" in trial["cause"]
    assert "rank 2) has sent nothing for" in trial["cause"]
    assert any(text.startswith("node 1 (ranks 2)") for text in trial["not_seen"])
    assert trial["next_step"].startswith("See whether node 1 (")


@pytest.mark.wide
def test_a_disconnected_node_is_reported(nodes: Nodes, tmp_path: Path) -> None:
    """Its connections stay open but carry nothing: watcher, agent and ranks are stopped."""
    nodes.agents("goes_on", str(tmp_path / "trains"), ranks=(1, 2))
    wait_for(tmp_path / "trains")
    nodes.hit(1, signal.SIGSTOP)
    code, trial = nodes.result(0)
    assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", [1, 2]), trial["cause"]
    assert "ode 1 (" in trial["cause"]
    assert "has sent nothing for" in trial["cause"]
    assert "all_reduce" in trial["cause"]


@pytest.mark.wide
def test_starts_of_the_same_job_are_separate(nodes: Nodes) -> None:
    """torch may need one or two more starts: its ranks find addresses of earlier ranks."""
    nodes.agents("raises", ranks=(1, 1), options=("--max-restarts", "1", "--rdzv-backend", "c10d"))
    for number in range(2):
        code, trials = nodes.trials(number)
        assert code == 1
        assert len(trials) >= 2
        assert (trials[0]["verdict"], trials[0]["culprits"]) == ("crash", [1]), trials[0]["cause"]
        assert "the batch is empty" in trials[0]["cause"]
        assert len(list((nodes.folder / "shared").iterdir())) == len(trials)
        for start in (nodes.folder / "shared").iterdir():
            assert len(list(start.iterdir())) == 2


@pytest.mark.wide
@pytest.mark.parametrize(("victim", "ranks"), [("clean", (1, 1)), ("slow", (2, 2))])
def test_a_healthy_job_is_clean(victim: str, ranks: tuple[int, ...], nodes: Nodes) -> None:
    nodes.options = ("--on-hang", "abort", "--quiescence", "1", "--patience", "1")
    nodes.agents(victim, ranks=ranks)
    for number in range(2):
        code, trial = nodes.result(number)
        assert (code, trial["verdict"]) == (0, "clean"), trial["cause"]


@pytest.mark.wide
@pytest.mark.parametrize("agents", [True, False])
def test_without_a_shared_folder_watchers_meet_at_the_store(agents: bool, nodes: Nodes) -> None:
    """The store of torch's agent, or of rank 0 without an agent."""
    nodes.shared = False
    if agents:
        nodes.agents("skips", ranks=(1, 2))
    else:
        nodes.tasks("data_loader", world=2)
    for number in range(2):
        code, trial = nodes.result(number)
        assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", [1]), trial["cause"]
        assert "Rank 1 runs on node 1" in trial["cause"]


@pytest.mark.wide
def test_a_store_lost_with_its_node_leaves_no_culprit(nodes: Nodes, tmp_path: Path) -> None:
    """Node 1 receives nothing and cannot distinguish a lost node from a lost store."""
    nodes.shared = False
    nodes.options = ("--on-hang", "abort", "--quiescence", "1", "--patience", "1", "--silence", "3")
    nodes.agents("goes_on", str(tmp_path / "trains"), ranks=(1, 1))
    wait_for(tmp_path / "trains")
    wait_for_peers(nodes.run(1) / "attempt-0" / "carried")
    nodes.hit(0, signal.SIGSTOP)
    code, trial = nodes.result(1)
    assert (code, trial["verdict"], trial["culprits"]) == (1, "hang", []), trial["cause"]
    assert any("the job's store" in text for text in trial["not_seen"])


def wait_for_peers(carried: Path) -> None:
    """Waits until both nodes have written there."""
    deadline = time.monotonic() + LIMIT
    while len(list(carried.glob("*/*/pulse.json"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
