"""How a job of the benchmark is started: the words before its script, and what must run beside."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import cluster

_UNDER_RAY = Path(__file__).with_name("scripts") / "under_ray.py"
# What scripts of users do where the launcher does not know torch's variables.
_AS_TORCH = (
    "export RANK=${OMPI_COMM_WORLD_RANK:-$SLURM_PROCID} "
    "LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK:-$SLURM_LOCALID} "
    'WORLD_SIZE=${OMPI_COMM_WORLD_SIZE:-$SLURM_NTASKS}; exec "$@"'
)
_MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np")
_SRUN = ("srun", "--overcommit", "--nodes=1", "--ntasks")
# Behind Python; the last word is followed by the number of ranks.
_OF_PYTHON: dict[str, tuple[str, ...]] = {
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
    "accelerate": ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1",
                   "--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes"),
    "deepspeed": ("-m", "deepspeed.launcher.runner", "--num_gpus"),
    "ray": (str(_UNDER_RAY),),
}  # fmt: skip
NEEDS = {"accelerate": ("accelerate",), "deepspeed": ("deepspeed",), "ray": ("ray",)}


def command(launcher: str, python: str, ranks: int) -> list[str]:
    """The words before the script. ``python``: the script starts its ranks itself."""
    if launcher in ("mpirun", "srun"):
        words = _MPIRUN if launcher == "mpirun" else _SRUN
        return [*words, str(ranks), "sh", "-c", _AS_TORCH, "sh", python]
    if launcher == "python":
        return [python]
    return [python, *_OF_PYTHON[launcher], str(ranks)]


@contextlib.contextmanager
def environment(launcher: str) -> Iterator[Mapping[str, str]]:
    """The variables that the launcher needs; for srun, a Slurm runs meanwhile."""
    if launcher not in ("mpirun", "srun"):
        # Ray gives its workers the least of a busy machine.
        own = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        yield own if launcher == "ray" else {}
        return
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(one.getsockname()[1])}
    if launcher == "mpirun":
        yield meeting
        return
    with TemporaryDirectory() as folder, cluster.slurm(Path(folder)) as variables:
        yield {**meeting, "SLURM_CONF": variables["SLURM_CONF"]}
