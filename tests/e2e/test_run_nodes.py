"""`moediag run` on two nodes: two commands on the loopback, each with its own agent and
ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from moediag.evidence.launch_record import read_launch
from moediag.protocol import LAUNCH_FILE

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

LIMIT = 240.0  # seconds


class Nodes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands: list[subprocess.Popen[str]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def start(self, *arguments: str) -> None:
        env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for node in range(2):
            line = [
                sys.executable, "-m", "moediag", "run", *arguments, "--cpu", "2", "--nnodes", "2",
                "--node-rank", str(node), "--rdzv-endpoint", f"127.0.0.1:{self.port}",
                "--shared", str(self.folder / "shared"), "--out", str(self.run(node)), "--json",
                "--silence", "5",
            ]  # fmt: skip
            with (self.folder / f"{node}.err").open("w") as err:
                self.commands.append(
                    subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=err, text=True)
                )

    def run(self, node: int) -> Path:
        return self.folder / f"run-{node}"

    def trials(self, node: int) -> dict[str, dict[str, Any]]:
        """The trials of this node's result, by variant."""
        out, _ = self.commands[node].communicate(timeout=LIMIT)
        said = (self.folder / f"{node}.err").read_text()
        assert out, said
        return {trial["variant"]: trial for trial in json.loads(out)["trials"]}

    def everything(self, node: int) -> list[psutil.Process]:
        command = psutil.Process(self.commands[node].pid)
        return [command, *command.children(recursive=True)]

    def end(self) -> None:
        for command in self.commands:
            if command.poll() is None:
                for process in self.everything(self.commands.index(command)):
                    process.kill()
                command.wait()
            assert command.stdout is not None
            command.stdout.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    found = Nodes(tmp_path)
    try:
        yield found
    finally:
        found.end()


def test_both_nodes_judge_all_ranks(nodes: Nodes) -> None:
    nodes.start("expert-starvation", "--variant", "unfixed", "--variant", "zero-fill")
    for node in range(2):
        trials = nodes.trials(node)
        bad, good = trials["unfixed"], trials["zero-fill"]
        assert (bad["verdict"], bad["culprits"]) == ("collective-mismatch", [1]), bad["cause"]
        assert "Rank 1 runs on node 1" in bad["cause"]
        assert good["verdict"] == "clean", good["cause"]
        assert good["parameters_compared"] > 0


def test_a_hang_is_reported_on_both_nodes(nodes: Nodes) -> None:
    nodes.start("expert-starvation-hang", "--variant", "unfixed")
    for node in range(2):
        trial = nodes.trials(node)["unfixed"]
        assert (trial["verdict"], trial["met"]) == ("hang", True), trial["cause"]
        launch = read_launch(nodes.run(node) / "unfixed" / LAUNCH_FILE)
        assert launch.stall is not None
        assert sorted(launch.stall.waiting) == [0, 1]
        assert "Rank 1 runs on node 1" in trial["cause"]


def test_a_killed_node_ends_the_run(nodes: Nodes) -> None:
    nodes.start("expert-starvation", "--variant", "zero-fill", "--repeat", "3")
    deadline = time.monotonic() + LIMIT
    while not list(nodes.run(1).glob("*zero-fill*/rank-1.heartbeat")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for process in nodes.everything(1):
        process.send_signal(signal.SIGKILL)
    nodes.commands[0].communicate(timeout=LIMIT)
    assert nodes.commands[0].returncode == 3
    said = (nodes.folder / "0.err").read_text()
    assert "error: node 1 (" in said
    result = json.loads((nodes.run(0) / "result.json").read_text())
    assert "node 1" in result["incomplete"]
    assert not any(trial["verdict"] == "clean" for trial in result["trials"])
