"""`moediag.verify.step` in real jobs: bugs of mixtures of experts that users meet, each found
without being told what to look for, and their healthy twins, which are clean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moediag import verify
from moediag.lab.stacks.environment import ensure
from moediag.pipeline import verify as pipeline
from tests.e2e.launchers import PLAIN, TORCHRUN
from tests.forked_ranks import on_ranks

pytestmark = pytest.mark.e2e

JOB = str(Path(__file__).parents[1] / "victims" / "moe_steps.py")

# case -> what the page says
WRONG = {
    "ddp:experts-times-ep": "the experts are 2.000 times the reference",
    "fsdp1:experts-times-ep": "the experts are 2.000 times the reference",
    "ddp:router-lost": "router.weight",
    "ddp:mean-per-rank": "have wrong gradients",
    "ddp:balance-times-micro": "router.weight",
    "ddp:balance-times-ranks": "router.weight",
    "ddp:divided-twice": "0.500 times the reference",
    "ddp:padding": "router.weight",
    "ddp:norm-without-experts": "norm",
}
HEALTHY = ("ddp:", "fsdp1:", "ddp:clipped")


def found(tmp_path: Path, ranks: int, *cases: str) -> dict[str, Any]:
    done = subprocess.run(
        [*PLAIN, str(ranks), JOB, str(tmp_path), *cases],
        env=dict(os.environ, OMP_NUM_THREADS="1"), text=True, timeout=550, check=False,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    content: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    return content


def run(tmp_path: Path, scenario: str, variant: str, ranks: int) -> tuple[dict[str, Any], Path]:
    """The trial of `moediag run`, and its folder."""
    folder = tmp_path / "run"
    done = subprocess.run(
        [
            sys.executable, "-m", "moediag", "run", scenario, "--variant", variant,
            "--cpu", str(ranks), "--json", "--out", str(folder),
        ],
        env=dict(os.environ, OMP_NUM_THREADS="1"), text=True, timeout=550, check=False,
        capture_output=True,
    )  # fmt: skip
    trial = json.loads(done.stdout)["trials"][-1]
    return trial, folder / trial["evidence"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("scenario", "variant", "ranks"),
    [
        ("expert-starvation-silent", "unfixed", 2),
        ("expert-starvation-silent", "iterate-all", 2),
        ("expert-starvation-wrappers", "ddp", 2),
        ("expert-starvation-wrappers", "fsdp1", 2),
        ("tp-head-norm", "unfixed", 2),
        ("tp-head-norm", "mixtral", 2),
        ("ep-router-gradient", "unfixed", 2),
        ("ep-router-gradient", "grouped-mm", 2),
        ("ep-partial-load", "newest", 4),  # FSDP2 and expert parallelism
    ],
)
def test_a_step_of_ours_has_the_verdict_that_run_gives(
    tmp_path: Path, scenario: str, variant: str, ranks: int
) -> None:
    trial, evidence = run(tmp_path, scenario, variant, ranks)
    stack = ensure({name: trial["stack"][name] for name in ("transformers", "accelerate")})
    job = str(Path(JOB).with_name("own_step.py"))
    done = subprocess.run(
        [
            str(stack.python), *TORCHRUN[1:], str(ranks), job, str(evidence / "trial.json"),
            str(tmp_path / "verify"), sysconfig.get_paths()["purelib"],
        ],
        env=dict(stack.environ(), OMP_NUM_THREADS="1"), text=True, timeout=550, check=False,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    own = json.loads((tmp_path / "verify" / "result.json").read_text())["trials"][-1]
    assert own["verdict"] == trial["verdict"], own["cause"]
    assert set(own["wrong_parameters"]) == set(trial["wrong_parameters"])


def test_expert_gradients_times_ep_are_found(tmp_path: Path) -> None:
    case = "ddp:experts-times-ep"
    one = found(tmp_path, 2, case)[case]
    assert one["verdict"] == "wrong-gradients", one
    assert WRONG[case] in one["cause"]


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def with_a_full_disk(rank: int, folder: Path) -> str:
    """Concludes nothing on rank 0; returns the error that this rank gets."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    os.chdir(folder)
    if rank == 0:
        pipeline.conclude = full  # type: ignore[assignment]
    model = torch.nn.parallel.DistributedDataParallel(build())
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 4)
    try:
        with verify.step(model, optimizer, reference=build, loss=loss, batch=batch):
            loss(model, batch).backward()
            optimizer.step()
    except OSError as error:
        return str(error.strerror)
    finally:
        dist.barrier()
    return ""


def test_every_rank_gets_the_error_of_rank_0(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, with_a_full_disk, tmp_path) == ["No space left on device"] * 2


@pytest.mark.wide
def test_bugs_are_found_and_their_healthy_twins_are_clean(tmp_path: Path) -> None:
    every = found(tmp_path, 4, *HEALTHY, *WRONG)
    for case, words in {**dict.fromkeys(HEALTHY, ""), **WRONG}.items():
        one = every[case]
        assert one["verdict"] == ("wrong-gradients" if words else "clean"), (case, one)
        assert words in one["cause"], (case, one)
