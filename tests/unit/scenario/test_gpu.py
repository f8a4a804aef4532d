"""Launches on GPUs, as far as a machine without a GPU can test them."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch

from moediag import hardware
from moediag.cli import app
from moediag.errors import ExitCode, MachineError, UsageError
from moediag.lab import machine_checks
from moediag.lab.campaign.nightly.jobs import Asked
from moediag.lab.cli import options as o
from moediag.lab.scenario import catalogue, load, plan
from moediag.lab.stacks import interpreter, releases
from moediag.lab.step import gpu as rank_side
from moediag.protocol import Trial
from moediag.report import junit
from moediag.report.page import page_of
from moediag.report.terminal import as_text
from moediag.result import devices, read_result

DAY = datetime(2025, 6, 1, tzinfo=timezone.utc)
LISTED = [releases.Release(v, DAY) for v in ("4.52.4", "4.53.2")]
GOLDEN = read_result(Path(__file__).parent.parent.parent / "golden" / "results" / "hang.json")
WATCHED = {
    "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_DESYNC_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
}  # fmt: skip


def planned(device: str) -> plan.Plan:
    return plan.plan(load.load(catalogue.find("expert-starvation")), 4, device, timeout=90)


def have(monkeypatch: pytest.MonkeyPatch, gpus: int, torch_version: str = "2.13.0+cu130") -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        machine_checks, "gpus", lambda: [machine_checks.Gpu("H200", "1", "1")] * gpus
    )
    monkeypatch.setattr(machine_checks, "driver_gpus", list)
    monkeypatch.setattr(interpreter, "identity", lambda: {"torch": torch_version})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


# ------------------------------------------------------------------------ planned


@pytest.mark.parametrize(
    ("device", "backend", "launcher", "shared", "variables"),
    [
        ("cpu", "gloo", "fork", False, set()),
        ("gpu", "nccl", "torchrun", False, WATCHED),
        (devices.SHARED, "gloo", "torchrun", True, set()),
        (devices.SHARED_NCCL, "nccl", "torchrun", True, WATCHED | {"NCCL_MULTI_RANK_GPU_ENABLE"}),
    ],
)
def test_each_device_has_a_backend_and_settings(
    device: str, backend: str, launcher: str, shared: bool, variables: set[str]
) -> None:
    made = planned(device)
    for one in made.trials:
        trial = one.trial
        assert (trial.backend, trial.launcher, trial.shared_gpu) == (backend, launcher, shared)
        assert trial.on_gpu == (device != "cpu")
        assert set(trial.environment) == variables
    assert ("--share-gpu" in made.overrides) == shared


def test_torchs_watchdog_waits_longer_than_the_launch() -> None:
    trial = planned("gpu").trials[0].trial
    assert int(trial.environment["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > trial.timeout == 90


def test_environment_of_a_rank_round_trips_through_its_file(tmp_path: Path) -> None:
    trial = planned(devices.SHARED_NCCL).trials[0].trial
    assert Trial.read(trial.write(tmp_path)) == trial


@pytest.mark.parametrize(
    ("nccl", "device"),
    [
        (None, devices.SHARED),
        ("2.29.7", devices.SHARED),
        ("2.30", devices.SHARED_NCCL),
        ("2.30.1", devices.SHARED_NCCL),
    ],
)
def test_nccl_shares_gpus_from_its_first_supporting_release(nccl: str | None, device: str) -> None:
    assert o.shared("gpu", True, nccl) == device
    assert o.shared("gpu", False, nccl) == "gpu"


# ------------------------------------------------------------------------ refused


def test_fewer_gpus_than_ranks_are_refused_with_alternatives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have(monkeypatch, 1)
    assert app.main(["run", "expert-starvation", "--gpus", "4"]) == ExitCode.CANNOT_RUN_HERE
    said = capsys.readouterr().err
    assert "4 GPUs requested, 1 found" in said
    assert "--gpus 4 --share-gpu" in said and "--cpu 4" in said
    machine_checks.require_gpus(4, shared=True)


def test_sharing_is_not_suggested_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 0)
    with pytest.raises(MachineError, match="1 GPU requested, 0 found"):
        machine_checks.require_gpus(4, shared=True)
    with pytest.raises(MachineError) as caught:
        machine_checks.require_gpus(4)
    assert "--share-gpu" not in caught.value.help_text


@pytest.mark.parametrize("words", [["--cpu", "2"], []])
def test_sharing_needs_gpus(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["run", "expert-starvation", "--share-gpu", *words]) == ExitCode.USAGE
    assert "Add --gpus N" in capsys.readouterr().err
    with pytest.raises(UsageError):
        o.shared("cpu", True, None)


# ------------------------------------------------------------------------ the other commands


@pytest.mark.parametrize("command", ["run", "bisect", "matrix", "nightly"])
def test_every_launching_command_accepts_share_gpu(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a GPU they exit with the error for a shared GPU; without --gpus it is wrong usage."""
    monkeypatch.setattr(machine_checks, "gpus", list)
    monkeypatch.setattr(machine_checks, "driver_gpus", list)
    names = [] if command == "nightly" else ["expert-starvation"]
    more = {
        "bisect": ["--good", "4.52.4", "--bad", "4.53.2"],
        "matrix": ["--releases", "4.53.2"],
        "nightly": ["--track", "pinned", "--scenario", "expert-starvation",
                    "--history", str(tmp_path)],
    }.get(command, [])  # fmt: skip
    monkeypatch.setattr(releases, "releases", lambda *_, **__: LISTED)
    words = [command, *names, *more, "--share-gpu"]
    assert app.main([*words, "--cpu", "2"]) == ExitCode.USAGE
    assert "--share-gpu needs --gpus" in capsys.readouterr().err
    assert app.main([*words, "--gpus", "2"]) == ExitCode.CANNOT_RUN_HERE
    assert "1 GPU requested, 0 found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cpu", ["--cpu", "2"]),
        ("gpu", ["--gpus", "2"]),
        (devices.SHARED, ["--gpus", "2", "--share-gpu"]),
        (devices.SHARED_NCCL, ["--gpus", "2", "--share-gpu"]),
    ],
)
def test_each_device_has_command_line_options(device: str, words: list[str]) -> None:
    assert devices.options(device, 2) == words


def test_nights_on_a_shared_gpu_have_a_separate_lane() -> None:
    assert Asked(world_size=2, device=devices.SHARED).lane == "shared-gpu-2"


# ------------------------------------------------------------------------ on a rank


@pytest.mark.parametrize(
    ("device", "gpus", "wanted"),
    [
        ("cpu", 8, ["cpu"] * 4),
        ("gpu", 4, [f"cuda:{n}" for n in range(4)]),
        (devices.SHARED, 1, ["cuda:0"] * 4),
        (devices.SHARED_NCCL, 2, ["cuda:0", "cuda:1"] * 2),
    ],
)
def test_ranks_are_distributed_over_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, wanted: list[str]
) -> None:
    have(monkeypatch, gpus)
    trial = planned(device).trials[0].trial
    found = []
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        found.append(str(rank_side.device(trial)))
    assert found == wanted


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})


def test_user_settings_take_precedence_and_are_noted(
    monkeypatch: pytest.MonkeyPatch, environ: None, tmp_path: Path
) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "77"
    (said,) = rank_side.settle(planned("gpu").trials[0].trial, tmp_path)
    assert "TORCH_FR_BUFFER_SIZE=77, " in said
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE=20000" in said
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "77"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert Path(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]).parent == tmp_path


def test_shared_gpus_are_noted_and_accelerate_uses_an_existing_one(
    monkeypatch: pytest.MonkeyPatch, environ: None, tmp_path: Path
) -> None:
    have(monkeypatch, 1)
    said = rank_side.settle(planned(devices.SHARED).trials[0].trial, tmp_path)
    assert said == ["4 ranks share 1 GPU (--share-gpu), gloo on CUDA tensors"]
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cuda:0"


def test_nothing_is_set_on_the_cpu(environ: None, tmp_path: Path) -> None:
    before = dict(os.environ)
    assert rank_side.settle(planned("cpu").trials[0].trial, tmp_path) == []
    assert os.environ == before


def test_a_local_rank_selects_a_gpu_that_exists(
    environ: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """transformers calls torch.cuda.set_device(LOCAL_RANK)."""
    selected: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    rank_side.settle(planned(devices.SHARED).trials[0].trial, tmp_path)
    torch.cuda.set_device(3)
    torch.cuda.set_device(torch.device("cuda", 1))
    assert selected == [1, torch.device("cuda", 1)]


# ------------------------------------------------------------------------ reports


def test_a_shared_gpu_is_mentioned_in_every_view() -> None:
    trials = tuple(dataclasses.replace(t, shared_gpu=True) for t in GOLDEN.trials)
    shared = dataclasses.replace(GOLDEN, trials=trials, overrides=("--share-gpu",))
    text = as_text(page_of(shared))
    assert "gloo on a shared GPU" in text and "--share-gpu" in text
    assert "gloo on a shared GPU" in junit.render([shared])
    assert "shared GPU" not in as_text(page_of(GOLDEN))


def test_the_nccl_version_comes_from_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"nvidia-nccl-cu12": "2.27.5"}

    def version(name: str) -> str:
        if name in installed:
            return installed[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert hardware.nccl() == "2.27.5"
    installed.clear()
    assert hardware.nccl() is None
