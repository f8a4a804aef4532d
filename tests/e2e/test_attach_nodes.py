"""`moediag attach` on a job over three nodes is one page: by ssh and by a stand-in for kubectl
(nodes are namespaces of network, processes and host name), and by Slurm (each slurmd has processes
of its own)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import cluster
from tests.e2e.test_attach import PROGRAM

pytestmark = [pytest.mark.e2e, pytest.mark.wide]

NODES = (1, 2, 3)
MASTER = "10.77.0.1"
SSHD = """\
ListenAddress 10.77.0.{node}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
"""
SSH = """\
#!/bin/sh
exec {ssh} -F none -i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null \
-o LogLevel=ERROR "$@"
"""
KUBECTL = """\
#!/bin/sh
if [ "$1" = get ]; then echo pod-1; echo pod-2; echo pod-3; exit; fi
while [ "$1" != -- ]; do pod=$1; shift; done; shift
exec nsenter --all --target "$(cat {folder}/$pod.pid)" "$@"
"""
SLURMD = '#!/bin/sh\nexec unshare --pid --fork --mount-proc --kill-child {slurmd} "$@"\n'


def lacking() -> str:
    if os.geteuid() != 0:
        return "namespaces with a network of their own need root"
    no = [name for name in ("ip", "unshare", "nsenter", "ssh", "sshd") if not shutil.which(name)]
    if no:
        return f"no {', '.join(no)}"
    link = ["unshare", "--net", "ip", "link", "add", "moediag", "type", "bridge"]
    return (
        "" if subprocess.run(link, check=False, capture_output=True).returncode == 0 else "no net"
    )


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


@contextmanager
def started(*words: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, **more)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def namespaces(folder: Path) -> Iterator[None]:
    """Three nodes at 10.77.0.1 to 3, each with sshd; the pid of each is in ``pod-N.pid``."""
    with ExitStack() as running:
        ip("link add moediag0 type bridge")
        running.callback(ip, "link delete moediag0")
        ip("address add 10.77.0.254/24 dev moediag0")
        ip("link set moediag0 up")
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", folder / "key"], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        for node in NODES:
            pid = folder / f"pod-{node}.pid"
            own = ("--net", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child")
            holder = running.enter_context(started("unshare", *own, "sleep", "infinity"))
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
            until(lambda: bool(children.read_text().strip()))  # noqa: B023 - called at once
            pid.write_text(children.read_text().strip())
            inside = ("nsenter", "--all", "--target", pid.read_text())
            ip(f"link add moediag{node} type veth peer name eth0 netns {pid.read_text()}")
            ip(f"link set moediag{node} master moediag0 up")
            for words in (f"hostname node-{node}", f"ip address add 10.77.0.{node}/24 dev eth0",
                          "ip link set eth0 up", "ip link set lo up"):  # fmt: skip
                subprocess.run([*inside, *words.split()], check=True)
            (folder / f"sshd-{node}").write_text(SSHD.format(node=node, folder=folder))
            sshd = (shutil.which("sshd") or "", "-D", "-f", str(folder / f"sshd-{node}"))
            running.enter_context(started(*inside, *sshd))
        yield


@contextmanager
def ranks(folder: Path, command: Callable[[int], list[str]], **more: str) -> Iterator[None]:
    """A rank on each node of a job that hangs: rank 0 alone sums over all ranks."""
    env = os.environ | more | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "3", "MASTER_PORT": "29577"}
    with ExitStack() as running:
        for node in NODES:
            words = [*command(node), sys.executable, str(PROGRAM), "condition", str(folder / "end")]
            own = {"RANK": str(node - 1), "LOCAL_RANK": "0"}
            running.enter_context(started(*words, env=env | own))
        yield


def page(folder: Path, env: Mapping[str, str], *of: str) -> dict[str, Any]:
    """The page, once all ranks wait."""
    for number in range(20):
        run = folder / f"run-{number}"
        words = [sys.executable, "-m", "moediag", "attach", *of, "--json", "--patience", "3"]
        done = subprocess.run(
            [*words, "--out", str(run)], env=env, capture_output=True, text=True, check=False,
            timeout=120,
        )  # fmt: skip
        assert done.returncode in (0, 1, 2, 3), done.stderr
        if done.returncode == 1:
            trial: dict[str, Any] = json.loads(done.stdout)["trials"][0]
            return trial
        time.sleep(2)
    raise AssertionError(done.stdout + done.stderr)


def names_rank_0(trial: dict[str, Any]) -> None:
    found = (trial["verdict"], trial["culprits"], trial["world_size"], trial["not_seen"])
    assert found == ("hang", [0], 3, []), trial["cause"]
    assert "under `if rank == 0`" in trial["cause"]


@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_nodes_by_ssh_and_pods_by_kubectl(tmp_path: Path) -> None:
    tool(tmp_path, "ssh", SSH.format(ssh=shutil.which("ssh"), folder=tmp_path))
    tool(tmp_path, "kubectl", KUBECTL.format(folder=tmp_path))
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def inside(node: int) -> list[str]:
        return ["nsenter", "--all", "--target", (tmp_path / f"pod-{node}.pid").read_text()]

    with (
        namespaces(tmp_path),
        ranks(tmp_path, inside, MASTER_ADDR=MASTER, GLOO_SOCKET_IFNAME="eth0"),
    ):
        names_rank_0(page(tmp_path, env, "--hosts", "10.77.0.1,10.77.0.2,10.77.0.3"))
        (tmp_path / "pods").mkdir()
        names_rank_0(page(tmp_path / "pods", env, "--kubectl", "app=train"))


@pytest.mark.skipif(bool(cluster.no_slurm()), reason=cluster.no_slurm())
def test_nodes_by_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, "slurmd", SLURMD.format(slurmd=shutil.which("slurmd")))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "slurm").mkdir()
    with cluster.slurm(tmp_path / "slurm") as env:
        script = 'export RANK=$SLURM_PROCID LOCAL_RANK=0; exec "$@"'
        srun = ["srun", "--nodes=3", "--ntasks=3", "sh", "-c", script, "sh"]
        more = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578"}
        words = [*srun, sys.executable, str(PROGRAM), "condition", str(tmp_path / "end")]
        with started(*words, env=env | more | {"OMP_NUM_THREADS": "1"}):
            (tmp_path / "pages").mkdir()
            job = ""
            while not job:
                asked = ["squeue", "-h", "-t", "R", "-o", "%i"]
                job = subprocess.run(
                    asked, env=env, capture_output=True, text=True, check=False
                ).stdout.strip()
                time.sleep(0.5)
            names_rank_0(page(tmp_path / "pages", env, "--slurm", job))
