"""The probe that is sent to the machines of a job, and what comes back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moediag.errors import MachineError, UsageError
from moediag.launch.attach import machines, remote_probe
from moediag.launch.attach.machines import Machine
from tests.unit.launch.test_attach_jobs import ME, of_torch
from tests.unit.launch.test_attach_jobs import Machine as Processes


def shell(name: str, script: str) -> Machine:
    """A machine that runs ``script`` in place of the probe."""
    return Machine(name, ("sh", "-c", script))


def asked(tmp_path: Path, *of: Machine) -> dict[str, str]:
    """Why each machine sent nothing; its archive's content."""
    found = machines.ask(of, {}, 0.0, tmp_path, lambda _: None)
    assert [one.machine for one in found] == [one.name for one in of]
    return {one.machine: one.archive.read_text() if one.archive else one.lost for one in found}


def test_answers_of_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_END", 1.0)
    of = (
        shell("a", "printf archive"),
        shell("b", "echo 'b: Permission denied (publickey).' >&2; exit 255"),
        shell("c", "exit 7"),
        shell("d", "cat >/dev/null; exec sleep 60"),
        shell("e", "echo refused: https://me:secret@x/ >&2; exit 1"),
    )
    assert asked(tmp_path, *of) == {
        "a": "archive", "b": "b: Permission denied (publickey).", "c": "exit code 7",
        "d": "did not answer in 2 s", "e": "refused: https://***@x/",
    }  # fmt: skip


def test_an_answer_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(machines, "_END", 20.0)
    (told,) = asked(tmp_path, shell("a", "exec yes")).values()
    assert told == "sent more than 1 MiB"


def test_at_most_so_many_machines_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "AT_ONCE", 2)
    monkeypatch.setattr(machines, "_END", 20.0)
    folder = tmp_path / "now"
    folder.mkdir()
    work = f"mkdir {folder}/$$; ls {folder} | wc -l; rmdir {folder}/$$"
    found = asked(tmp_path, *(shell(str(n), work) for n in range(6)))
    assert {int(text) for text in found.values()} <= {1, 2}


def test_the_probe_needs_only_the_standard_library(tmp_path: Path) -> None:
    machines.payload(tmp_path / "probe.zip")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from moediag.launch.attach import "
        "remote_probe; print(remote_probe.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "probe.zip")],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.startswith(str(tmp_path)), done.stderr


@pytest.mark.parametrize("joins", [False, True])
def test_the_command_for_any_shell(
    tmp_path: Path, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe runs below a folder that it removes; here it finds no job of Slurm's number 0."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    wanted = {"patience": 1.0, "local_values": True, "slurm": "0"}
    command = ("sh", "-c", 'eval "$0"') if joins else ("sh", "-c")
    (found,) = machines.ask([Machine("a", command, joins)], wanted, 60.0, tmp_path, lambda _: None)
    assert found.lost == "no training job of this user runs here"
    assert not list(tmp_path.glob("moediag-*"))


def test_ranks_of_a_slurm_job_on_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: ME)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    here = Processes(tmp_path)
    for pid, rank, more in (
        (10, 0, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}),
        (11, 1, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n2"}),  # Slurm of several daemons
        (12, 2, {"SLURM_JOB_ID": "7"}),
        (20, 0, {"SLURM_JOB_ID": "8"}),
    ):
        here.add(pid, 1, env=of_torch(rank, 4) | more)
    found = [[one.pid for one in job.ranks] for job in remote_probe.jobs(here.proc, "7")]
    assert found == [[10, 12]]
    assert remote_probe.jobs(here.proc, "9") == []
    assert sum(len(job.ranks) for job in remote_probe.jobs(here.proc, "")) == 4


# ------------------------------------------------------------------------ which machines


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins, the only one of PATH beside the system's."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_the_nodes_of_a_slurm_job(tools: Path) -> None:
    tool(tools, "squeue", "echo 'n[1-2]'")
    tool(tools, "scontrol", "test $3 = 'n[1-2]' && echo n1 && echo n2")
    one, other = machines.of_slurm("123_4")
    assert (one.name, other.name) == ("n1", "n2")
    assert {"--jobid", "123_4", "--overlap", "--nodelist=n1"} <= {*one.command}
    tool(tools, "squeue", "true")
    with pytest.raises(UsageError, match="the job does not run"):
        machines.of_slurm("123")
    tool(tools, "squeue", "echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1")
    with pytest.raises(UsageError, match="--slurm 123: slurm_load_jobs error: Invalid job id"):
        machines.of_slurm("123")
    with pytest.raises(UsageError, match="not the number of a job"):
        machines.of_slurm("--help")


def test_hosts() -> None:
    found = machines.of_hosts("a, me@b,a")
    assert [(one.name, one.command[-1]) for one in found] == [("a", "a"), ("me@b", "me@b")]
    for text in ("", ",", "-oProxyCommand=x", "a b"):
        with pytest.raises(UsageError, match="not a list of hosts"):
            machines.of_hosts(text)


def test_pods(tools: Path) -> None:
    tool(tools, "kubectl", 'echo "$@" >&2; test "$4" = app=x && printf \'p-0\\np-1\\n\'')
    found = machines.of_pods("app=x -n ml -c main")
    assert [one.name for one in found] == ["p-0", "p-1"]
    assert found[0].command == (
        "kubectl", "exec", "-i", "-n", "ml", "-c", "main", "p-0", "--", "sh", "-c"
    )  # fmt: skip
    tool(tools, "kubectl", "true")
    with pytest.raises(UsageError, match="no running pod"):
        machines.of_pods("app=y")
    with pytest.raises(UsageError, match="not a selector"):
        machines.of_pods("'")
    (tools / "kubectl").unlink()


def test_a_missing_tool(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(MachineError, match="--kubectl app=x: kubectl was not found"):
        machines.of_pods("app=x")
