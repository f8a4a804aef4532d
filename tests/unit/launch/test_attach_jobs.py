"""Which processes are one job, from recorded snapshots of /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from moediag.launch.attach import found_jobs
from moediag.launch.attach.proc import Proc

ME, OTHER = 1000, 1001
TORCH = "7f00-7f10 r-xp 0 00:00 1 /venv/torch/lib/libtorch_cpu.so\n"
SCRIPT = ("python", "-u", "train.py")


class Machine:
    """A /proc with the given processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = Proc(root)

    def add(
        self, pid: int, ppid: int, command: tuple[str, ...] = SCRIPT, maps: str = TORCH,
        env: Mapping[str, object] = {}, uid: int = ME, state: str = "S",
    ) -> None:  # fmt: skip
        folder = self.root / str(pid)
        folder.mkdir()
        fields = [state, ppid, pid, pid, *[0] * 7, 100, 50, *[0] * 6, 10_000 + pid, 0]
        (folder / "stat").write_text(f"{pid} (a (b) c) {' '.join(map(str, fields))}\n")
        (folder / "status").write_text(f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        (folder / "cmdline").write_text("\0".join(command) + "\0")
        (folder / "environ").write_text("".join(f"{k}={v}\0" for k, v in env.items()))
        (folder / "maps").write_text(maps)

    def found(self) -> list[tuple[str, int, list[int | None]]]:
        return [
            (job.launcher, job.world_size, [one.rank for one in job.ranks])
            for job in found_jobs.of_user(self.proc, ME)
        ]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def of_torch(rank: int, size: int = 2, port: int = 29500, here: int = 2) -> dict[str, object]:
    place = {"LOCAL_RANK": rank % here, "LOCAL_WORLD_SIZE": here}
    return {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port, **place}


def torchrun(machine: Machine, pid: int, port: int = 29500, size: int = 2, first: int = 0) -> None:
    machine.add(pid, 1, ("python", "/venv/bin/torchrun", "--nproc-per-node", "2", "train.py"))
    for place in (0, 1):
        machine.add(pid + 1 + place, pid, env=of_torch(first + place, size, port))


def test_ranks_of_torchrun_without_what_they_started(machine: Machine) -> None:
    torchrun(machine, 10)
    machine.add(20, 11, env=of_torch(0))  # a worker of a data loader
    machine.add(21, 20, ("nvcc",), "", of_torch(0))
    [job] = found_jobs.of_user(machine.proc, ME)
    assert [one.pid for one in job.ranks] == [11, 12]
    assert (job.launcher, job.root, job.name, job.missing) == ("torchrun", 10, "train.py", ())


def test_jobs_at_the_same_time_are_told_apart(machine: Machine) -> None:
    torchrun(machine, 10, port=29500)
    torchrun(machine, 20, port=29501)
    torchrun(machine, 30, port=29500)  # in a network namespace of its own
    assert machine.found() == [("torchrun", 2, [0, 1])] * 3


def test_two_agents_of_one_job(machine: Machine) -> None:
    torchrun(machine, 10, size=4)
    torchrun(machine, 20, size=4, first=2)
    assert machine.found() == [("torchrun", 4, [0, 1, 2, 3])]


def test_a_job_of_several_machines(machine: Machine) -> None:
    torchrun(machine, 10, size=16, first=8)
    assert machine.found() == [("torchrun", 16, [8, 9])]


def test_a_rank_that_is_gone(machine: Machine) -> None:
    torchrun(machine, 10)
    (machine.root / "11" / "stat").write_text("")
    [job] = found_jobs.of_user(machine.proc, ME)
    assert job.missing == (0,)


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        (("mpirun", "-n", "2"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
        (("/usr/bin/srun", "-n2"), ("SLURM_PROCID", "SLURM_NTASKS")),
        (("mpiexec.hydra", "-n", "2"), ("PMI_RANK", "PMI_SIZE")),
    ],
)
def test_launchers_that_are_no_python(
    machine: Machine, launcher: tuple[str, ...], variables: tuple[str, str]
) -> None:
    machine.add(10, 1, launcher, "")
    for rank in (0, 1):
        own = dict(zip(variables, (rank, 2), strict=True))
        machine.add(20 + rank, 10, ("bash", "run.sh"), "", own)
        machine.add(30 + rank, 20 + rank, env=own)
    machine.add(40, 10, ("python", "serve.py"), "", dict(zip(variables, (0, 2), strict=True)))
    name = Path(launcher[0]).name
    assert machine.found() == [(name, 2, [0, 1])]


def test_a_launcher_under_slurm_is_no_rank(machine: Machine) -> None:
    slurm = {"SLURM_PROCID": 0, "SLURM_NTASKS": 1, "SLURM_JOB_ID": 7}
    machine.add(10, 1, ("srun", "launch.py"), "")
    machine.add(11, 10, ("python", "my_launcher.py"), env=slurm)
    for rank in (0, 1):
        machine.add(12 + rank, 11, env={**slurm, **of_torch(rank)})
    assert machine.found() == [("srun", 2, [0, 1])]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("python", "/venv/bin/accelerate", "launch", "train.py"), "accelerate"),
        (("python", "-u", "-m", "deepspeed.launcher.launch", "train.py"), "deepspeed"),
        (("python", "-m", "torch.distributed.run", "train.py"), "torchrun"),
    ],
)
def test_launchers_in_python(machine: Machine, command: tuple[str, ...], name: str) -> None:
    machine.add(10, 1, command, env={"RANK": 0, "WORLD_SIZE": 1})  # as Kubernetes sets them
    for rank in (0, 1):
        machine.add(11 + rank, 10, env=of_torch(rank))
    assert machine.found() == [(name, 2, [0, 1])]


def test_ranks_that_number_themselves(machine: Machine) -> None:
    machine.add(10, 1, ("python", "train.py"))
    machine.add(5, 1, ("raylet",), "")
    for place in (0, 1):
        words = ("python", "-c", "from multiprocessing.spawn import spawn_main")
        machine.add(11 + place, 10, words)
        machine.add(21 + place, 5, ("ray::RayTrainWorker",))
    machine.add(30, 10, words, maps="")  # the resource tracker
    assert machine.found() == [("ray", 2, [None, None]), ("python", 2, [None, None])]


def test_no_process_of_another_user(machine: Machine) -> None:
    torchrun(machine, 10)
    machine.add(40, 1, env=of_torch(0, 1), uid=OTHER)
    assert len(found_jobs.of_user(machine.proc, ME)) == 1
    assert found_jobs.of_user(machine.proc, 0) == []


@pytest.mark.parametrize("pid", [10, 11, 12, 20])
def test_a_job_by_any_of_its_processes(machine: Machine, pid: int) -> None:
    torchrun(machine, 10)
    torchrun(machine, 50, port=2)
    machine.add(20, 11, ("nvcc",), "", of_torch(0))
    assert [job.root for job in found_jobs.of_process(machine.proc, pid)] == [10]


def test_several_jobs_below_one_process(machine: Machine) -> None:
    machine.add(1, 0, ("bash",), "")
    torchrun(machine, 10)
    torchrun(machine, 50, port=2)
    assert [job.root for job in found_jobs.of_process(machine.proc, 1)] == [10, 50]


def test_a_process_without_ranks(machine: Machine) -> None:
    machine.add(10, 1, ("python", "train.py"))
    machine.add(11, 1, ("bash",), "")
    (alone,) = found_jobs.of_process(machine.proc, 10)
    assert (alone.world_size, alone.ranks[0].rank) == (1, None)
    assert found_jobs.of_process(machine.proc, 11) == []
    machine.add(12, 1, ("python", "/venv/bin/torchrun", "train.py"))  # its ranks come later
    assert found_jobs.of_process(machine.proc, 12) == []
    assert found_jobs.of_process(machine.proc, 99) == []


def test_the_real_proc(tmp_path: Path) -> None:
    seen = Proc().seen(os.getpid())
    assert seen is not None
    assert (seen.ppid, Proc().owner(seen.pid)) == (os.getppid(), os.getuid())
    assert Proc(tmp_path).seen(1) is None


def connect(machine: Machine, pid: int, number: int, ends: tuple[str, str], state: str = "01",
            mapped: bool = False) -> None:  # fmt: skip
    """An open socket of ``pid`` with the given ends."""
    own, other = ("0000000000000000FFFF0000" * mapped + end for end in ends)
    folder = machine.root / str(pid)
    (folder / "fd").mkdir(exist_ok=True)
    (folder / "fd" / str(number)).symlink_to(f"socket:[{number}]")
    (folder / "net").mkdir(exist_ok=True)
    with (folder / "net" / ("tcp6" if mapped else "tcp")).open("a") as file:
        line = f"   0: {own} {other} {state} 0:0 0:0 0 0 0 {number} 1\n"
        file.write(line if file.tell() else f"sl local_address\n{line}")


def test_processes_that_were_started_one_by_one(machine: Machine) -> None:
    for pid in (10, 20, 30, 40):
        machine.add(pid, 1)
    machine.add(21, 20)  # a worker of a data loader has the socket, too
    connect(machine, 10, 5, ("0100007F:7530", "0100007F:9000"), mapped=True)
    connect(machine, 20, 6, ("0100007F:9000", "0100007F:7530"))
    connect(machine, 21, 6, ("0100007F:9000", "0100007F:7530"))
    connect(machine, 30, 7, ("0100007F:9001", "0100007F:7531"))  # to nobody here
    connect(machine, 40, 8, ("0100007F:7531", "0100007F:9001"), state="08")  # closed
    assert [[one.pid for one in job.ranks] for job in found_jobs.of_user(machine.proc, ME)] == [
        [10, 20]
    ]
    for pid in (10, 20, 21):
        (job,) = found_jobs.of_process(machine.proc, pid)
        assert [one.pid for one in job.ranks] == [10, 20]
    (alone,) = found_jobs.of_process(machine.proc, 30)
    assert [one.pid for one in alone.ranks] == [30]


def test_the_ranks_of_an_srun_are_children_of_its_daemon(machine: Machine) -> None:
    machine.add(10, 1, ("srun", "-n2", "python", "train.py"), "")
    connect(machine, 10, 5, ("00000000:9C4B", "00000000:0000"), state="0A")
    machine.add(20, 1, ("slurmstepd: [7.0]",), "")
    for rank in (0, 1):
        env = {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_SRUN_COMM_PORT": 0x9C4B}
        machine.add(21 + rank, 20, env=env)
    machine.add(30, 1, ("srun", "hostname"), "")
    assert [job.world_size for job in found_jobs.of_process(machine.proc, 10)] == [2]
    assert found_jobs.of_process(machine.proc, 30) == []


def test_a_driver_of_ray_leads_to_the_actors_of_its_raylet(machine: Machine) -> None:
    for raylet, port in ((10, "1F90"), (20, "1F91")):  # of two clusters
        machine.add(raylet, 1, ("/venv/ray/raylet/raylet",), "")
        for actor in (1, 2):
            machine.add(raylet + actor, raylet, ("ray::RayTrainWorker",))
        connect(machine, raylet, raylet, (f"0100007F:{port}", "0100007F:9000"))
    machine.add(30, 1, ("python", "driver.py"))
    assert [job.root for job in found_jobs.of_process(machine.proc, 30)] == [30]
    connect(machine, 30, 9, ("0100007F:9000", "0100007F:1F91"))
    (job,) = found_jobs.of_process(machine.proc, 30)
    assert (job.root, [one.pid for one in job.ranks]) == (20, [21, 22])


def test_the_only_actor_of_a_ray_job_is_found_by_its_driver(machine: Machine) -> None:
    machine.add(10, 1, ("python", "driver.py"), "")
    machine.add(11, 10, ("/venv/ray/raylet/raylet",), "")
    machine.add(12, 11, ("ray::Trainer.fit",))
    machine.add(13, 11, ("ray::IDLE",))
    assert machine.found() == []
    (job,) = found_jobs.of_process(machine.proc, 10)
    assert [one.pid for one in job.ranks] == [12]
