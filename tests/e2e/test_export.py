"""Exported files under the real torchrun, in environments without moediag."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from moediag.cli import app
from moediag.lab.scenario import catalogue, load
from moediag.lab.scenario import plan as planning
from moediag.lab.stacks import environment
from tests.e2e.pipeline import need

pytestmark = [pytest.mark.e2e, pytest.mark.stack]


def ran(name: str, variant: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """torchrun of the exported file, on the variant's own stack."""
    scenario = load.load(catalogue.find(name))
    (planned,) = planning.plan(scenario, None, "cpu", variants=[variant]).trials[:1]
    need(planned.stack)
    file = folder / f"{name}.py"
    assert app.main(["export", name, "--variant", variant, "--file", str(file)]) == 0
    stack = environment.ensure(planned.stack)
    variables = stack.environ()
    del variables["PYTHONPATH"]  # there moediag is
    variables["OMP_NUM_THREADS"] = "1"
    ranks = str(planned.trial.world_size)
    return subprocess.run(
        [str(stack.python), "-m", "torch.distributed.run", "--standalone",
         "--nproc-per-node", ranks, str(file)],
        env=variables, cwd=folder, text=True, capture_output=True, timeout=300, check=False,
    )  # fmt: skip


def test_the_silent_failure_is_reproduced_without_moediag(tmp_path: Path) -> None:
    done = ran("expert-starvation-silent", "unfixed", tmp_path)
    assert done.returncode == 1, done.stderr
    said = done.stdout.splitlines()
    # The cause, from the reference: each rank's own expert has no gradient there.
    for rank, expert in ((0, 3), (1, 5)):
        wanted = f"rank 0: step 1: rank {rank} has no gradient for 3 parameters that another rank"
        assert any(
            line.startswith(wanted) and f"layers.1.mlp.experts.{expert}.up_proj" in line
            for line in said
        )  # fmt: skip
    for rank in (0, 1):
        wrong = [line for line in said if line.startswith(f"rank {rank}: step 1: WRONG gradient")]
        assert wrong and all("layers.1.mlp.experts." in line for line in wrong)
        assert f"rank {rank}: WRONG" in said


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("expert-starvation", "unfixed"),
        ("expert-starvation", "unused-params-flag"),
        ("expert-starvation", "touch"),
        ("expert-starvation", "upgrade"),
        ("expert-starvation", "loops-over-all"),
        ("expert-starvation-accumulate", "unused-params-flag"),
        ("expert-starvation-accumulate", "starved-everywhere"),
        ("expert-starvation-data", "unfixed"),
        ("expert-starvation-hang", "unfixed"),
        ("expert-starvation-late", "unfixed"),
        ("expert-starvation-wrappers", "ddp"),
        ("ep-overwrite", "unfixed"),
        ("ep-overwrite", "unfixed-every-rank-loads"),
        ("ep-overwrite", "fsdp2-by-hand-newer"),
        ("ep-overwrite", "newer-transformers"),
        ("ep-overwrite", "native"),
        ("ep-overwrite", "no-expert-parallelism"),
        ("ep-router-gradient", "unfixed"),
        ("ep-router-gradient", "grouped-mm"),
        ("ep-router-gradient", "upgrade"),
        ("ep-router-gradient", "no-expert-parallelism"),
    ],
)
def test_an_exported_file_ends_as_its_scenario_expects(
    name: str, variant: str, tmp_path: Path
) -> None:
    done = ran(name, variant, tmp_path)
    expected = load.load(catalogue.find(name)).variants[variant].expect.verdicts("gloo")
    said = f"{done.stdout}\n{done.stderr}"
    if expected == ("clean",):
        assert done.returncode == 0, said
        assert done.stdout.count("RIGHT: every gradient equals") == 2
        assert "WRONG" not in done.stdout
        return
    assert done.returncode != 0, said
    assert "RIGHT" not in done.stdout
    if any(verdict.startswith("wrong-") for verdict in expected):
        assert "WRONG" in done.stdout, said
    else:  # the libraries stopped it, before the file's own last word
        assert not any(re.fullmatch(r"rank \d+: (WRONG|RIGHT.*)", x) for x in said.splitlines())
    if "collective-mismatch" in expected or "hang" in expected:
        assert "has no gradient for 3 parameters that another rank has" in done.stdout
