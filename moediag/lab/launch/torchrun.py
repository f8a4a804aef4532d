"""The torchrun launcher: starts one ``torch.distributed.run`` per trial."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from moediag.errors import LaunchError, UsageError
from moediag.launch.base import Launcher, Running
from moediag.launch.processes import Family
from moediag.launch.settings import LaunchOptions
from moediag.protocol import LAUNCHER_LOG, TRIAL_FILE, Trial


class TorchrunTrial(Running):
    """Holds the write end of the launcher's standard input. When that closes, the launcher ends."""

    def __init__(self, process: subprocess.Popen[bytes], token: str) -> None:
        self._process = process
        self.root = process.pid
        self.family = Family(process.pid, token)

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        return code


class TorchrunLauncher(Launcher):
    kind = "torchrun"

    def _start(self, trial: Trial, folder: Path) -> Running:
        command = [
            str(self.stack.python), "-m", "moediag.lab.ranks.torchrun",
            str(folder / TRIAL_FILE), str(self.local_ranks(trial)),
            *rendezvous(self.options, trial.name, trial.alone),
        ]  # fmt: skip
        with (folder / LAUNCHER_LOG).open("ab") as log:
            try:
                process = subprocess.Popen(
                    command,
                    env=self.environment(),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchError(f"{command[0]}: {error.strerror}") from error
        return TorchrunTrial(process, self.token)


def rendezvous(options: LaunchOptions, name: str, alone: bool) -> list[str]:
    """Returns torchrun's rendezvous options. On one node, ranks use the loopback interface."""
    if options.nnodes == 1 or alone:
        return ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
                f"--rdzv-id={name}-{os.getpid()}", "--local-addr=127.0.0.1"]  # fmt: skip
    if options.rdzv_endpoint is None or options.node_rank is None:
        raise UsageError(
            f"{options.nnodes} nodes need --rdzv-endpoint and --node-rank",
            "The same --rdzv-endpoint HOST:PORT on every node, --node-rank 0, 1, …",
        )
    # Not c10d, where agents order themselves by address and ignore --node-rank.
    return [
        f"--nnodes={options.nnodes}", "--rdzv-backend=static",
        f"--rdzv-endpoint={options.rdzv_endpoint}", f"--node-rank={options.node_rank}",
        f"--rdzv-id={name}",
    ]  # fmt: skip
