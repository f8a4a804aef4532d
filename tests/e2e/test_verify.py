"""`moediag verify` on real jobs under a real torchrun; each test starts torch seven times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launchers import TORCHRUN

pytestmark = pytest.mark.e2e

JOB = str(Path(__file__).parents[1] / "victims" / "measured_job.py")


def verify(tmp_path: Path, reference: list[str], *job: str, ranks: int = 2) -> tuple[int, Any]:
    """The exit code and the trial; with 0 ranks the job is one process without a launcher."""
    alone = " ".join([sys.executable, JOB, "alone", *reference])
    launcher = (*TORCHRUN, str(ranks)) if ranks else (sys.executable,)
    done = subprocess.run(
        [
            sys.executable, "-m", "moediag", "verify", "--json", "--out", str(tmp_path / "run"),
            "--reference", alone, "--", *launcher, JOB, *job,
        ],
        env=dict(os.environ, OMP_NUM_THREADS="1"), text=True, timeout=500, check=False,
        capture_output=True,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["trials"][-1]


@pytest.mark.wide
def test_gradients_divided_twice_by_accumulation_are_found(tmp_path: Path) -> None:
    job = ("alone", "--micro", "4", "--fault", "divided-twice")
    code, found = verify(tmp_path, [], *job, ranks=0)
    assert (code, found["verdict"]) == (1, "wrong-gradients"), found["cause"]
    assert "The gradients of all parameters are 0.500 times the reference" in found["cause"]


@pytest.mark.wide
def test_a_fault_of_a_sharded_job_is_found(tmp_path: Path) -> None:
    code, found = verify(tmp_path, [], "fsdp2", "--micro", "2", "--fault", "divided-twice")
    assert (code, found["verdict"]) == (1, "wrong-gradients"), found["cause"]
    assert "0.500 times the reference" in found["cause"]


@pytest.mark.wide
@pytest.mark.parametrize("way", ["ddp", "fsdp2", "tp", "fsdp1", "fsdp1-flat"])
def test_a_healthy_job_is_clean_however_it_is_sharded(tmp_path: Path, way: str) -> None:
    both = ["--train-all"] if way == "fsdp1-flat" else []
    code, found = verify(tmp_path, both, way, "--micro", "2", *both)
    assert (code, found["verdict"]) == (0, "clean"), found["cause"]
    assert found["parameters_compared"] == 10 + len(both)


@pytest.mark.wide
def test_mixed_precision_of_a_healthy_job_is_rounding(tmp_path: Path) -> None:
    code, found = verify(tmp_path, [], "fsdp2", "--low")
    assert (code, found["verdict"]) == (0, "clean"), found["cause"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("fault", "code", "verdict", "words"),
    [
        ("rate", 1, "wrong-weights", "learning rate is 0.02 on rank 1"),
        ("sampler", 1, "wrong-gradients", "and saw the same 4 samples in step 1"),
        ("frozen", 1, "wrong-gradients", "layers.1.up.weight does not require a gradient"),
        ("left-out", 1, "wrong-weights", "No optimizer that stepped has layers.0.down.weight"),
        ("dropout", 0, "clean", ""),
    ],
)
def test_a_fault_is_named(tmp_path: Path, fault: str, code: int, verdict: str, words: str) -> None:
    given = ["--fault", fault] if fault == "dropout" else []
    got, found = verify(tmp_path, given, "ddp", "--fault", fault)
    assert (got, found["verdict"]) == (code, verdict)
    assert words in found["cause"]


@pytest.mark.wide
@pytest.mark.parametrize("fault", ["", "forgets"])
def test_a_resume_that_forgets_the_optimizer_is_found(tmp_path: Path, fault: str) -> None:
    both = ["--resume", "--train-all"]
    code, found = verify(tmp_path, both, "ddp", *both, "--fault", fault)
    verdict = "wrong-weights" if fault else "clean"
    assert (code, found["verdict"]) == (1 if fault else 0, verdict), found["cause"]
    assert ("has counted 1 update by then, 4 in one process" in found["cause"]) == bool(fault)


@pytest.mark.wide
@pytest.mark.parametrize("fault", ["", "untied"])
def test_a_shared_embedding_of_pipeline_stages(tmp_path: Path, fault: str) -> None:
    """Healthy if both stages add up their gradients of it."""
    code, found = verify(tmp_path, [], "pp", "--fault", fault)
    verdict = "wrong-gradients" if fault else "clean"
    assert (code, found["verdict"]) == (1 if fault else 0, verdict), found["cause"]
    assert set(found["wrong_parameters"]) == ({"embed.weight", "head.weight"} if fault else set())


@pytest.mark.wide
def test_a_reference_that_does_not_start_is_inconclusive(tmp_path: Path) -> None:
    code, found = verify(tmp_path, ["--no-such-option"], "ddp")
    assert (code, found["verdict"]) == (3, "inconclusive")
    assert "the reference ended with exit code 2" in found["cause"].lower()
