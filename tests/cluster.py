"""A Slurm of four nodes or a Ray of two, on this machine: for tests of executors. The last node of
each may lack moediag.

Type ``python -m tests.cluster slurm COMMAND…`` to run a command beside one. Slurm is Debian's
(slurm-wlm, munge) and needs root; each node is a ``slurmd -N``. Nothing is left running.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import moediag

NODES = (1, 2, 3, 4)
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}  # else a token is needed
STARTING = 240.0  # seconds
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "munged")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
MpiDefault=none
MinJobAge=300
SlurmdTimeout=20
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=debug Nodes=n1,n2,n3 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=one Nodes=n1 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL
PartitionName=short Nodes=n2 MaxTime=2 State=UP PriorityTier=1
PartitionName=mixed Nodes=n1,n4 MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=prod Nodes=n1 MaxTime=INFINITE State=UP PriorityTier=10
"""
NODE = "NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"


def no_slurm() -> str:
    """Returns why no Slurm can be started here, "" if one can."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)} (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "starting a Slurm needs root"


def no_ray() -> str:
    return "" if importlib.util.find_spec("ray") else "ray is not installed: 'moediag[ray]'"


@contextlib.contextmanager
def slurm(folder: Path, cpus: int = 2, again: float | None = None) -> Iterator[Mapping[str, str]]:
    """Starts a controller and four nodes of ``cpus``; yields the environment of its commands. Node
    n4 is in the partition "mixed" only, and does not see moediag. ``again``: seconds after which a
    node that was killed comes back."""
    host = os.uname().nodename
    ports = _free_ports(1 + len(NODES))
    nodes = [NODE.format(number=n, host=host, port=ports[n], cpus=cpus) for n in NODES]
    for name in ("state", "empty", *(f"spooln{n}" for n in NODES)):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=host, port=ports[0], folder=folder, nodes="\n".join(nodes)),
        encoding="utf-8",
    )
    environ = {**os.environ, "SLURM_CONF": str(configuration)}
    with contextlib.ExitStack() as running:
        running.enter_context(_munge(folder))
        running.enter_context(_daemon(["slurmctld", "-D"], environ))
        for n in NODES:
            command = ["slurmd", "-N", f"n{n}", "-D"]
            if n == NODES[-1]:
                hidden = f"mount --bind {folder}/empty {Path(moediag.__file__).parent} && exec "
                command = ["unshare", "--mount", "sh", "-c", hidden + shlex.join(command)]
            running.enter_context(_daemon(command, environ, again))
        _until(lambda: _output(["sinfo", "-hN", "-p", "debug", "-o%T"], environ).count("idle") == 3)
        try:
            yield environ
        finally:
            names = ",".join(f"n{n}" for n in NODES)
            subprocess.run(["scancel", "--nodelist", names], env=environ, check=False)


@contextlib.contextmanager
def ray(
    folder: Path, second: Mapping[str, str] | None = None, again: float | None = None
) -> Iterator[Mapping[str, str]]:
    """Starts a head and a second node of one CPU each; yields the environment of its commands.
    ``second``: the environment of the second one, its Python in ``PYTHON``; ``again``: seconds
    after which it comes back if it was killed."""
    (port,) = _free_ports(1)
    address = f"127.0.0.1:{port}"
    common = ["--num-cpus=1", "--object-store-memory=100000000", "--block"]
    head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
    environ = {**os.environ, **RAY, "RAY_ADDRESS": address}
    other = {**environ, **(second or {})}
    with contextlib.ExitStack() as running:
        # A raylet gives up when its agents take 15 s to start, as on a busy machine.
        running.enter_context(_daemon(_start(environ, *head, *common), environ, again=1.0))
        _until(lambda: _listens(port))
        joins = _start(other, f"--address={address}", *common)
        running.enter_context(_daemon(joins, other, again or 1.0))
        waits = (
            f"import ray, time; ray.init(address={address!r})\n"
            "while sum(node['Alive'] for node in ray.nodes()) < 2: time.sleep(0.5)"
        )
        _until(lambda: _ended_well([sys.executable, "-c", waits], environ))
        yield environ


def _start(environ: Mapping[str, str], *words: str) -> list[str]:
    return [environ.get("PYTHON", sys.executable), "-m", "ray.scripts.scripts", "start", *words]


@contextlib.contextmanager
def _munge(folder: Path) -> Iterator[None]:
    """A munged of our own: its key and its socket are in ``folder``."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    command = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files]
    with _daemon(command, os.environ):
        _until(lambda: (folder / "munge.socket").exists())
        yield


@contextlib.contextmanager
def _daemon(
    command: list[str], environ: Mapping[str, str], again: float | None = None
) -> Iterator[None]:
    """``again``: seconds after which it is started again if it ended."""
    over = threading.Event()

    def start() -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            command, env=environ, stdout=quiet, stderr=quiet, stdin=quiet, cwd="/"
        )

    def revive() -> None:
        nonlocal process
        while again is not None and not over.wait(0.2):
            if process.poll() is not None and not over.wait(again):
                process = start()

    process = start()
    revived = threading.Thread(target=revive)
    revived.start()
    try:
        yield
    finally:
        over.set()
        revived.join()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _output(command: list[str], environ: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    return done.stdout


def _ended_well(command: list[str], environ: Mapping[str, str]) -> bool:
    quiet = subprocess.DEVNULL
    done = subprocess.run(
        command, env=environ, stdout=quiet, stderr=quiet, check=False, timeout=STARTING
    )
    return done.returncode == 0


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + STARTING
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("the cluster did not start")
        time.sleep(0.5)


def main(kind: str, *command: str) -> int:
    with TemporaryDirectory() as name:
        if kind == "slurm":
            with slurm(Path(name)) as environ:
                return subprocess.run(command, env=environ, check=False).returncode
        with ray(Path(name)) as environ:
            return subprocess.run(command, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
