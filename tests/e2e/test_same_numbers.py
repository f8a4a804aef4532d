"""A job computes the same to the last bit with and without `moediag watch --laws`."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from moediag.evidence.law_records import read_laws
from tests.e2e.launchers import TORCHRUN
from tests.e2e.test_watch import watch

SCRIPT = Path(__file__).parents[1] / "victims" / "same_numbers.py"
NEEDS_TRAINER = pytest.mark.skipif(
    not (find_spec("transformers") and find_spec("accelerate")),
    reason="needs transformers and accelerate",
)

pytestmark = [pytest.mark.e2e, pytest.mark.wide]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", pytest.param("trainer", marks=NEEDS_TRAINER)])
def test_losses_weights_and_random_states(kind: str, tmp_path: Path) -> None:
    command = [*TORCHRUN, "2", str(SCRIPT), kind]
    alone, watched = tmp_path / "alone", tmp_path / "watched"
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    subprocess.run([*command, str(alone)], env=environment, timeout=180, check=True)
    done = watch(tmp_path, ("--laws-every", "1"), *command, str(watched))
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        laws, _ = read_laws(tmp_path / "run" / "attempt-0", rank)
        assert laws is not None
        assert len(laws.checks) > 6
        assert (watched / str(rank)).read_text() == (alone / str(rank)).read_text()
