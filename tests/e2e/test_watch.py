"""`moediag watch` on real jobs under a real torchrun; what each must say is in tests/victims."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.victims.table import JOBS, VICTIMS, Victim

pytestmark = pytest.mark.e2e

# One that hangs, one that dies, one that is only slow. `make wide` runs the others.
DEFAULT = ("skips", "raises", "slow")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def watch(
    tmp_path: Path, options: tuple[str, ...], *command: str
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    line = [sys.executable, "-m", "moediag", "watch", *options, "--out", str(tmp_path / "run")]
    return subprocess.run(
        [*line, "--", *command], env=environment, timeout=180, check=False,
        capture_output=True, text=True,
    )  # fmt: skip


def under_torchrun(tmp_path: Path, victim: Victim, *options: str) -> tuple[int, dict[str, object]]:
    done = watch(
        tmp_path, ("--json", *victim.options, *options),
        *TORCHRUN, str(victim.ranks), str(JOBS), victim.name,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["trials"][-1]


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(v, id=v.name, marks=() if v.name in DEFAULT else pytest.mark.wide)
        for v in VICTIMS
    ],
)
def test_every_victim_is_told_right(victim: Victim, tmp_path: Path) -> None:
    code, trial = under_torchrun(tmp_path, victim, "--on-hang", "abort")
    assert trial["verdict"] in victim.verdicts, trial["cause"]
    assert trial["culprits"] == list(victim.culprits), trial["cause"]
    assert victim.names_the_line(str(trial["cause"])), trial["cause"]
    assert victim.says in str(trial["cause"])
    assert code == (0 if victim.healthy else 1)


def test_the_guard_raises_one_named_error_on_every_rank(tmp_path: Path) -> None:
    (victim,) = [v for v in VICTIMS if v.name == "starves"]
    code, trial = under_torchrun(tmp_path, victim, "--guard")
    assert (code, trial["verdict"], trial["culprits"]) == (1, "crash", [1]), trial["cause"]
    assert "The guard stopped ranks 0, 1 before that reduction" in str(trial["cause"])
    assert victim.says in str(trial["cause"])


def test_a_job_without_ranks_keeps_its_output_and_its_exit_code(tmp_path: Path) -> None:
    done = watch(tmp_path, (), sys.executable, "-c", "print('mine')")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "mine")


def test_no_such_command(tmp_path: Path) -> None:
    done = watch(tmp_path, (), "no-such-launcher")
    assert done.returncode == 2
    assert "there is no command 'no-such-launcher'" in done.stderr
    assert "Traceback" not in done.stderr
