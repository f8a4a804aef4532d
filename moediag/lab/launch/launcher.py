"""Creates launchers: ``with launcher(kind, stack, run_folder) as it: it.run(trial, folder)``.

``run`` launches the trial, follows it, collects evidence, ends it and writes ``launch.json``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from moediag.errors import MachineError, UsageError
from moediag.evidence.launch_record import LaunchRecord
from moediag.lab.launch.fork import ForkLauncher
from moediag.lab.launch.several_nodes import NodesSupervisor
from moediag.lab.launch.torchrun import TorchrunLauncher
from moediag.launch.base import Launcher, Running, StackLike
from moediag.launch.follow.supervise import Supervisor
from moediag.launch.settings import LaunchOptions, OnProgress
from moediag.protocol import Trial

KINDS: Mapping[str, type[Launcher]] = {"fork": ForkLauncher, "torchrun": TorchrunLauncher}


def launcher(
    kind: str, stack: StackLike, run_folder: Path, options: LaunchOptions | None = None
) -> Launcher:
    """Returns a launcher: "fork" (one host per stack, forked ranks, one node) or "torchrun".

    Raises UsageError for another kind, or for fork on several nodes."""
    chosen = options or LaunchOptions()
    if kind not in KINDS:
        raise UsageError(f"no launcher is called {kind!r}", "Give one of: fork, torchrun.")
    if kind == "fork" and chosen.nnodes != 1:
        raise UsageError(
            "the fork launcher runs on one node", "For several nodes: --launcher torchrun."
        )
    if chosen.nnodes == 1:
        require_loopback()
    elif chosen.shared is None:
        raise UsageError(
            f"{chosen.nnodes} nodes need a folder that all of them reach", "Add --shared DIR."
        )
    return KINDS[kind](stack, run_folder, chosen, follow)


def follow(
    running: Running,
    trial: Trial,
    folder: Path,
    ranks: int,
    options: LaunchOptions,
    kind: str,
    on_progress: OnProgress | None,
) -> LaunchRecord:
    """Follows a launched trial until all its processes are gone. ``ranks`` is the number of its
    ranks on this node."""
    supervisor = NodesSupervisor if options.nnodes > 1 and not trial.alone else Supervisor
    return supervisor(running, trial, folder, ranks, options, on_progress).run(kind)


def require_loopback() -> None:
    """Raises MachineError if the ranks of one node cannot connect to each other. In a network
    namespace without a loopback interface (some sandboxes) they would wait forever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("127.0.0.1", 9))  # connecting a datagram socket sends nothing
        except OSError as error:
            raise MachineError(
                f"the loopback interface cannot be used ({error.strerror}), so ranks cannot meet",
                "Type: ip link set lo up (in a sandbox: allow its own loopback).",
            ) from error
