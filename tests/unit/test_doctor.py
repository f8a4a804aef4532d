"""Every check of `moediag doctor`, with and without the fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moediag import doctor, hardware
from moediag.errors import MachineError, StackError
from moediag.lab import machine_checks
from moediag.lab.stacks import interpreter
from moediag.lab.stacks import uv as uv_module


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEDIAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in ("MOEDIAG_WHEELS", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


def named(name: str, **options: Any) -> doctor.Check:
    (found,) = [check for check in doctor.checks(**options) if check.name == name]
    return found


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_every_failed_check_gives_advice() -> None:
    found = doctor.checks(network=False)
    assert {"python", "torch", "uv", "ptrace", "gpus", "cores", "memory", "disk"} <= {
        check.name for check in found
    }
    assert all(check.advice for check in found if check.status == "fail")


def test_a_failing_check_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise RuntimeError("odd machine")

    monkeypatch.setattr(doctor, "cores", broken)
    check = named("cores", network=False)
    assert (check.status, "odd machine" in check.found) == ("warn", True)


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.13.0+cpu", "ok"), ("2.6.0", "ok"), ("2.5.1", "fail"), (None, "warn")],
)
def test_torch_is_checked(
    monkeypatch: pytest.MonkeyPatch, version: str | None, status: str
) -> None:
    monkeypatch.setattr(interpreter, "identity", lambda: {"torch": version})
    check = named("torch", network=False)
    assert check.status == status
    assert ("pip install torch" in check.advice) == (version is None)


def test_uv_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named("uv", network=False).status == "ok"

    def absent() -> Path:
        raise StackError("uv is not installed", "Type: python -m pip install uv")

    monkeypatch.setattr(uv_module, "find_uv", absent)
    check = named("uv", network=False)
    assert (check.status, check.advice) == ("fail", "Type: python -m pip install uv")
    monkeypatch.setenv("MOEDIAG_INSTALLED", "1")
    assert named("uv", network=False).status == "ok"


@pytest.mark.parametrize("name", ["py-spy", "pystack"])
def test_a_missing_tool_is_a_warning(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(doctor, "tool", lambda wanted: Path("/bin/true"))
    assert named(name, network=False).status == "ok"
    monkeypatch.setattr(doctor, "tool", lambda wanted: None)
    check = named(name, network=False)
    assert check.status == "warn" and "pip install" in check.advice


def test_ptrace_is_tested_with_a_real_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allowed = program(tmp_path, "spy-ok", "echo '[{\"frames\": []}]'")
    monkeypatch.setattr(doctor, "tool", lambda wanted: allowed)
    assert named("ptrace", network=False).status == "ok"
    refused = program(tmp_path, "spy-no", "echo 'Permission Denied' >&2; exit 1")
    monkeypatch.setattr(doctor, "tool", lambda wanted: refused)
    for scope, told in (("1", True), ("0", False), ("absent", False)):
        monkeypatch.setattr(doctor, "ptrace_scope", lambda scope=scope: scope)
        check = named("ptrace", network=False)
        assert check.status == "warn" and "SYS_PTRACE" in check.advice
        assert ("ptrace_scope=0" in check.advice) == told


def test_gpus_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine_checks.gpus() == [] and "--cpu" in named("gpus", network=False).found
    row = "NVIDIA H100 80GB HBM3, 81559, 550.54.15"
    program(tmp_path, "nvidia-smi", f"echo '{row}'; echo '{row}'")
    assert [gpu.name for gpu in machine_checks.gpus()] == ["NVIDIA H100 80GB HBM3"] * 2
    monkeypatch.setattr(interpreter, "identity", lambda: {"torch": "2.13.0+cpu"})
    check = named("gpus", network=False)
    assert check.status == "warn" and "2 x NVIDIA H100" in check.found
    monkeypatch.setattr(interpreter, "identity", lambda: {"torch": "2.13.0+cu128"})
    assert named("gpus", network=False).status == "ok"
    program(tmp_path, "nvidia-smi", "echo 'driver/library version mismatch'; exit 18")
    assert machine_checks.gpus() == []


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine_checks, "gpus", lambda: [machine_checks.Gpu("H", "1", "1")] * 2)
    monkeypatch.setattr(machine_checks, "driver_gpus", list)
    monkeypatch.setattr(interpreter, "identity", lambda: {"torch": "2.13.0+cu128"})
    machine_checks.require_gpus(2)
    with pytest.raises(MachineError, match="3 GPUs requested, 2 found") as caught:
        machine_checks.require_gpus(3)
    assert "--cpu 3" in caught.value.help_text
    with pytest.raises(MachineError, match="is a CPU build"):
        machine_checks.require_gpus(2, "2.9.0+cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(MachineError, match="CUDA_VISIBLE_DEVICES=1"):
        machine_checks.require_gpus(2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(machine_checks, "gpus", list)  # a container without nvidia-smi
    monkeypatch.setattr(machine_checks, "driver_gpus", lambda: ["0000:01:00.0", "0000:02:00.0"])
    machine_checks.require_gpus(2)


@pytest.mark.parametrize(
    ("count", "free", "status"), [(1, 1, "warn"), (2, 3, "ok"), (64, 500, "ok")]
)
def test_cores_and_memory_are_checked(
    monkeypatch: pytest.MonkeyPatch, count: int, free: int, status: str
) -> None:
    monkeypatch.setattr(doctor, "cores", lambda: count)
    monkeypatch.setattr(doctor, "memory", lambda: (1000 * doctor.GB, free * doctor.GB))
    assert named("cores", network=False).status == status
    assert named("memory", network=False).status == status


def test_container_limits_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {
        "/sys/fs/cgroup/cpu.max": "150000 100000",
        "/sys/fs/cgroup/memory.max": str(3 * 10**9),
        "/sys/fs/cgroup/memory.current": str(2 * 10**9),
    }
    monkeypatch.setattr(hardware, "read_text", lambda path: limits.get(path, ""))
    assert doctor.cores() == 1
    total, free = doctor.memory()
    assert total == 3 * 10**9 and free <= 10**9
    limits.update({"/sys/fs/cgroup/cpu.max": "max 100000", "/sys/fs/cgroup/memory.max": "max"})
    assert doctor.cores() == len(os.sched_getaffinity(0))


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("free", "status"), [(100 * 10**9, "ok"), (10**9, "warn"), (10**8, "fail")]
)
def test_disk_space_is_checked(monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, free))
    check = named("disk", network=False)
    assert check.status == status
    assert ("stacks clean" in check.advice) == (status != "ok")


@pytest.mark.parametrize(("size", "status"), [(10**9, "ok"), (64 * 2**20, "warn")])
def test_shared_memory_is_checked(monkeypatch: pytest.MonkeyPatch, size: int, status: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(size, 0, 10**12))
    assert named("shared memory", network=False).status == status


def test_the_host_name_must_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    assert doctor._host_name().status == "ok"
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    check = doctor._host_name()
    assert check.status == "warn" and "torchrun --standalone" in check.found
    assert "no-such-host.invalid' >> /etc/hosts" in check.advice


def test_cache_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert named("cache", network=False).status == "ok"
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEDIAG_CACHE", str(tmp_path / "file"))
    check = named("cache", network=False)
    assert check.status == "fail" and "MOEDIAG_CACHE" in check.advice


def test_index_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "simple" / "accelerate").mkdir(parents=True)
    (tmp_path / "simple" / "accelerate" / "accelerate-1.0.tar.gz").touch()
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    assert named("package index").status == "ok"
    monkeypatch.setenv("PIP_INDEX_URL", "http://u:secret@127.0.0.1:9/simple")
    check = named("package index")
    assert check.status == "warn" and check.advice and "secret" not in check.found


def test_machine_describes_cores_memory_and_gpus() -> None:
    facts = hardware.machine()
    assert facts["cores"] >= 1 and facts["memory_gb"] > 0 and isinstance(facts["gpus"], list)


def test_the_checks_never_import_torch() -> None:
    text = (
        "import sys; from moediag import doctor, hardware\n"
        "doctor.checks(network=False); hardware.machine()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
