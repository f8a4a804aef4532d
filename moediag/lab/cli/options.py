"""The options of the laboratory's commands, beside those that all commands share."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from moediag.cli.options import *  # noqa: F403
from moediag.errors import UsageError
from moediag.lab.cli import completions
from moediag.masking import masked_command


class LauncherKind(str, Enum):
    auto = "auto"
    torchrun = "torchrun"
    fork = "fork"


class ExecutorKind(str, Enum):
    local = "local"
    slurm = "slurm"
    ray = "ray"


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE.yaml",
        help="A scenario of the catalogue, or a scenario file.",
        autocompletion=completions.scenarios,
    ),
]
NameOrNone = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME|FILE.yaml",
        help="A scenario of the catalogue, or a scenario file.",
        show_default=False,
        autocompletion=completions.scenarios,
    ),
]
All = Annotated[
    bool, typer.Option("--all", help="Run every scenario of the catalogue and write one summary.")
]
Variants = Annotated[
    list[str],
    typer.Option(
        "--variant",
        "-v",
        metavar="NAME",
        help="Run only this variant; repeatable.",
        autocompletion=completions.variants,
    ),
]
Variant = Annotated[
    str,
    typer.Option(
        "--variant",
        "-v",
        metavar="NAME",
        help="Use this variant.  [default: the first unfixed]",
        autocompletion=completions.variants,
    ),
]
Package = Annotated[str, typer.Option(metavar="NAME", help="Use the releases of this package.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run, and run nothing.")]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", min=1, metavar="N", help="Run on N GPUs, one rank each, with NCCL."),
]
ShareGpu = Annotated[
    bool,
    typer.Option(
        "--share-gpu",
        help="With --gpus: let ranks share the available GPUs, on gloo or a recent NCCL.",
    ),
]
Cpu = Annotated[
    int | None,
    typer.Option(
        "--cpu",
        min=1,
        metavar="N",
        help="Run N ranks on the CPU, with gloo.",
    ),
]
SetPairs = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Override a field of the scenario; repeatable.",
        autocompletion=completions.settings,
    ),
]
Families = Annotated[
    list[str],
    typer.Option(
        "--family",
        metavar="F",
        autocompletion=completions.families,
        help="Check these model types, or the kind moe, dense, multimodal or all: names with "
        "commas, repeatable.  [default: moe]",
    ),
]
LauncherOption = Annotated[
    LauncherKind,
    typer.Option(
        "--launcher",
        metavar="auto|torchrun|fork",
        help="How to start ranks; auto: fork on the CPU of one node, else torchrun.",
    ),
]
ExecutorOption = Annotated[
    ExecutorKind,
    typer.Option(
        "--executor",
        metavar="local|slurm|ray",
        help="Run the items on this machine, as Slurm jobs or as Ray tasks.",
    ),
]
ExecutorArgs = Annotated[
    list[str],
    typer.Option(
        "--executor-arg",
        metavar="KEY=VALUE",
        help="Pass this to the executor: jobs= (items at once), limit= (seconds for an item from "
        "its start), queue= (seconds before it), partition=, time= and others for Slurm, address=, "
        "num_cpus= and others for Ray; repeatable.",
    ),
]
Nnodes = Annotated[
    int, typer.Option("--nnodes", min=1, metavar="N", help="Number of nodes of a torchrun launch.")
]
Rendezvous = Annotated[
    str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Passed to torchrun.")
]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", min=0, metavar="N", help="Passed to torchrun.")
]
Shared = Annotated[
    Path | None,
    typer.Option(
        "--shared",
        metavar="DIR",
        help="On several nodes: a new folder that all of them can reach.",
    ),
]
Repeat = Annotated[
    int, typer.Option("--repeat", min=1, metavar="N", help="Run every trial N times.")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=1.0,
        metavar="S",
        help="End a launch after this many seconds. This is not the hang detector.",
    ),
]
Hold = Annotated[
    list[str],
    typer.Option(
        metavar="PACKAGE=VERSION",
        help="Keep this dependency on one release; repeatable. Otherwise each release runs "
        "with those of its own day.",
    ),
]
Python = Annotated[str, typer.Option(metavar="X.Y", help="Use another Python, for old releases.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume the interrupted command in --out DIR.")
]


def print_definitions(rows: Mapping[str, str]) -> None:
    """Prints names and texts, wrapped in a terminal, one line each in a pipe."""
    from moediag.report import stdout
    from moediag.report.text_layout import definitions

    in_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if in_terminal else sys.maxsize
    for line in definitions(rows, width):
        stdout.line(line)


def names(texts: list[str]) -> tuple[str, ...]:
    """Splits values of a repeatable option at commas: ``["a,b", "c"]`` has three names."""
    parts = (part.strip() for text in texts for part in text.split(","))
    return tuple(dict.fromkeys(filter(None, parts)))


def world(gpus: int | None, cpu: int | None) -> tuple[int | None, str]:
    """Returns (world size, ``cpu`` or ``gpu``). The size is None, the scenario's own, if neither is
    given."""
    if gpus is not None and cpu is not None:
        raise UsageError("--gpus and --cpu exclude each other", "Each of them sets the world size.")
    return (gpus, "gpu") if gpus is not None else (cpu, "cpu")


def shared(device: str, share_gpu: bool, nccl: str | None) -> str:
    """Returns the device and how ranks share GPUs. ``nccl``: its version, None if unknown. Raises
    UsageError without --gpus."""
    if not share_gpu:
        return device
    if device != "gpu":
        raise UsageError("--share-gpu needs --gpus", "Add --gpus N, the number of ranks.")

    from moediag.result import devices

    return devices.shared(nccl)


def where(gpus: int | None, cpu: int | None, share_gpu: bool) -> tuple[int | None, str]:
    """Returns (world size or None, device); see :func:`world` and :func:`shared`."""
    from moediag import hardware

    world_size, device = world(gpus, cpu)
    return world_size, shared(device, share_gpu, hardware.nccl() if share_gpu else None)


def require_gpus(device: str, ranks: int, torch: str | None = None) -> None:
    """Raises MachineError if ``ranks`` of this node cannot run on ``device``."""
    from moediag.lab import machine_checks

    if device != "cpu":
        machine_checks.require_gpus(ranks, torch, shared=device != "gpu")


def command(context: typer.Context) -> tuple[str, ...]:
    """Returns the command line as typed, without secrets."""
    return masked_command(("moediag", *(context.obj or ())))


def launcher_for(chosen: LauncherKind, nnodes: int) -> str:
    """Returns the launcher. Only torchrun starts ranks on several nodes."""
    return "torchrun" if chosen is LauncherKind.auto and nnodes > 1 else chosen.value


def nodes(
    nnodes: int,
    endpoint: str | None,
    node_rank: int | None,
    launcher: str,
    folder: Path | None,
    every: bool = False,
    resume: bool = False,
) -> None:
    """Raises UsageError for inconsistent multi-node options. ``folder``: of --shared."""
    if nnodes == 1 and endpoint is None and node_rank is None and folder is None:
        return
    if launcher == "fork":
        raise UsageError("--launcher fork runs on one node", "Use --launcher torchrun.")
    if endpoint is None or node_rank is None:
        raise UsageError(
            "several nodes need --nnodes, --rdzv-endpoint and --node-rank together",
            "Type the same command on each node with its own --node-rank, 0 on the first.",
        )
    if node_rank >= nnodes:
        raise UsageError(f"--node-rank {node_rank} must be below --nnodes {nnodes}")
    if every and nnodes > 1:
        raise UsageError(
            "--all runs on one node", "Name one scenario at a time: moediag run NAME --nnodes …"
        )
    if resume and nnodes > 1:
        raise UsageError(
            "--resume is for runs on one node",
            "Type the command again on each node, with another --out and another --shared.",
        )
    if folder is None and nnodes > 1:
        raise UsageError(
            f"{nnodes} nodes without a folder where they meet: each would judge by its own ranks "
            "alone",
            "Add --shared DIR, a new folder that all nodes reach, the same on each. (A job of your "
            "own runs on several nodes under `moediag watch --shared DIR -- torchrun …`.)",
        )
