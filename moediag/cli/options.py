"""The command line's options: one definition each, shared by the commands that take them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from moediag.errors import UsageError


class LauncherKind(str, Enum):
    auto = "auto"
    torchrun = "torchrun"
    fork = "fork"


Name = Annotated[
    str, typer.Argument(metavar="NAME|FILE.yaml", help="A scenario of the catalogue, or a file.")
]
NameOrNone = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME|FILE.yaml", help="A scenario of the catalogue, or a file.", show_default=False
    ),
]
All = Annotated[
    bool, typer.Option("--all", help="Every scenario of the catalogue, and one summary.")
]
Variants = Annotated[
    list[str],
    typer.Option("--variant", "-v", metavar="NAME", help="Only this variant; repeat for several."),
]
Gpus = Annotated[
    int | None, typer.Option("--gpus", min=1, metavar="N", help="World size, on GPUs with NCCL.")
]
ShareGpu = Annotated[
    bool,
    typer.Option(
        "--share-gpu", help="With --gpus: ranks share what GPUs there are, on gloo or new NCCL."
    ),
]
Cpu = Annotated[
    int | None,
    typer.Option(
        "--cpu",
        min=1,
        metavar="N",
        help="World size, on the CPU with gloo.",
    ),
]
StackPairs = Annotated[
    list[str],
    typer.Option("--stack", metavar="PACKAGE=VERSION", help="Run on this release; repeatable."),
]
SetPairs = Annotated[
    list[str],
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field; repeatable."),
]
LauncherOption = Annotated[
    LauncherKind, typer.Option("--launcher", help="auto: fork on one node's CPU, else torchrun.")
]
Nnodes = Annotated[
    int, typer.Option("--nnodes", min=1, metavar="N", help="Nodes of a torchrun launch.")
]
Rendezvous = Annotated[
    str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="As for torchrun.")
]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", min=0, metavar="N", help="As for torchrun.")
]
Shared = Annotated[
    Path | None,
    typer.Option(
        "--shared",
        metavar="DIR",
        help="On several nodes: a folder that all of them reach, where they meet.",
    ),
]
Silence = Annotated[
    float,
    typer.Option(
        "--silence",
        min=2.0,
        metavar="S",
        help="Seconds without a word after which a node is silent.",
    ),
]
Repeat = Annotated[
    int, typer.Option("--repeat", min=1, metavar="N", help="Run every trial this often.")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", min=1.0, help="Bound on one launch in seconds; not the hang detector."
    ),
]
Quiescence = Annotated[
    float,
    typer.Option(
        "--quiescence", min=0.5, metavar="S", help="Seconds without progress or CPU use: a hang."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Run directory.  [default: a new one in moediag-runs]"
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume what an interrupted command left in --out DIR.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="One page, without scripts.")
]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="All ranks, for Perfetto.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="As NO_COLOR=1.")]


def views(as_json: bool = False, **targets: Path | None) -> dict[str, Path]:
    """The formats that were asked for. Raises UsageError where two would go to stdout."""
    chosen = {kind: target for kind, target in targets.items() if target is not None}
    if as_json and Path("-") in chosen.values():
        raise UsageError("stdout holds one format", "Give files for the others beside --json.")
    return chosen


def pairs(texts: list[str], option: str) -> dict[str, str]:
    """``["transformers=4.53.2"]`` to a mapping. Raises UsageError."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.replace("==", "=").partition("=")
        name, value = name.strip(), value.strip()
        if not (name and equals and value):
            raise UsageError(
                f"{option} {text!r} is not of the form PACKAGE=VERSION",
                f"For example: {option} transformers=4.53.2",
            )
        if found.get(name, value) != value:
            raise UsageError(f"{option} names {name} twice: {found[name]} and {value}")
        found[name] = value
    return found


def world(gpus: int | None, cpu: int | None) -> tuple[int | None, str]:
    """(world size, ``cpu`` or ``gpu``); the size is None, the scenario's own, when neither is
    given."""
    if gpus is not None and cpu is not None:
        raise UsageError("--gpus and --cpu exclude each other", "Each of them sets the world size.")
    return (gpus, "gpu") if gpus is not None else (cpu, "cpu")


def shared(device: str, share_gpu: bool, nccl: str | None) -> str:
    """``device``, where ranks share GPUs the way that they do it. ``nccl``: its version, as far as
    it is known. Raises UsageError without --gpus."""
    if not share_gpu:
        return device
    if device != "gpu":
        raise UsageError("--share-gpu is about GPUs", "Add --gpus N, the number of ranks.")

    from packaging.version import Version

    from moediag.scenario import devices

    allows = nccl is not None and Version(nccl).release >= devices.NCCL_SHARES_FROM
    return devices.SHARED_NCCL if allows else devices.SHARED


def where(gpus: int | None, cpu: int | None, share_gpu: bool) -> tuple[int | None, str]:
    """(world size or None, device), sharing included; see :func:`world` and :func:`shared`."""
    from moediag import hardware

    world_size, device = world(gpus, cpu)
    return world_size, shared(device, share_gpu, hardware.nccl() if share_gpu else None)


def require_gpus(device: str, ranks: int, torch: str | None = None) -> None:
    """Raises MachineError where ``ranks`` of this node cannot compute on ``device``."""
    from moediag import doctor

    if device != "cpu":
        doctor.require_gpus(ranks, torch, shared=device != "gpu")


def command(context: typer.Context) -> tuple[str, ...]:
    """The command line as typed."""
    return ("moediag", *(context.obj or ()))


def launcher_for(chosen: LauncherKind, nnodes: int) -> str:
    """Only torchrun starts ranks on several nodes, whatever they compute on."""
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
    """Raises UsageError for a multi-node launch that cannot work. ``folder``: of --shared."""
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
