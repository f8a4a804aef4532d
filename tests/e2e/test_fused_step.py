"""The real step on real releases: FSDP2 with expert parallelism in bf16, with each kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moediag.lab.stacks import environment
from tests.e2e.pipeline import Command, need
from tests.e2e.test_scenarios import CLEAN, MISMATCH, WRONG, holds

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

ROOT = Path(__file__).parent.parent.parent
STACK = {"transformers": "5.17.0", "accelerate": "1.15.0", "triton": "3.6.0"}
LATER = {"transformers": "5.18.0", "accelerate": "1.15.0", "triton": "3.6.0"}


@pytest.mark.wide
def test_the_wrong_kernel_is_found_and_our_kernel_is_correct(command: Command) -> None:
    """The interpreter runs the Triton kernels; one environment for all of them."""
    need(STACK)
    ran = command.run(
        "ep-step", "--stack", "triton=3.6.0", "--variant", "batched", "--variant", "triton",
        "--variant", "no-expert-parallelism", "--set", "step.steps=1",
    )  # fmt: skip
    holds(ran)
    assert ran.verdicts == {"batched": WRONG, "triton": CLEAN, "no-expert-parallelism": CLEAN}
    wrong, right = ran.trial("batched"), ran.trial("triton")
    assert "mlp.gate.weight" in " ".join(wrong["wrong_parameters"])
    assert right["stack"]["triton"] == "3.6.0"
    assert any("cast to bfloat16" in note for note in right["notes"])


@pytest.mark.wide
@pytest.mark.parametrize("ranks", ["2", "4"])
@pytest.mark.parametrize("routing", ["zero-token", "one-hot", "balanced"])
def test_every_kernel_is_correct_with_every_routing(
    command: Command, routing: str, ranks: str
) -> None:
    need(STACK)
    need(LATER)
    need({"transformers": "5.20.0", "accelerate": "1.15.0"})
    ran = command.run("ep-step", "--cpu", ranks, "--set", f"skew.routing={routing}")
    # With one-hot routing the eager loop of 5.18 hangs on the ranks without a token, and a token
    # whose experts are all elsewhere gives batched_mm nothing to mix up.
    one_hot = routing == "one-hot"
    assert ran.verdicts == {
        "batched": CLEAN if one_hot else WRONG,
        "eager-one-hot-5-18": MISMATCH,
        "grouped": CLEAN,
        "triton": CLEAN,
        "batched-5-18": CLEAN,
        "eager-5-18": MISMATCH if one_hot else CLEAN,
        "grouped-one-hot": CLEAN,
        "triton-one-hot": CLEAN,
        "eager-one-hot-5-20": CLEAN,
        "no-expert-parallelism": CLEAN,
    }


def measured(*line: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "bench.speed", "--device", "cpu", *line],
        cwd=ROOT, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.wide
def test_the_speed_benchmark_runs_on_a_cpu() -> None:
    need(STACK)
    page = measured()
    assert "2 ranks (gloo); 2 layers, 39,616 parameters, 32 tokens per step" in page
    assert re.search(r"\| triton \| one-hot \| [\d.]+ ms \([\d.]+ to [\d.]+\) \|", page)
    assert page.count("against the loop") == 2
    for name in ("dense-experts", "touch", "zero-fill", "iterate-all", "grouped_mm", "triton"):
        assert len(re.findall(rf"\| {name} \| zero-token \| [\d.]+ ms", page)) >= 2
    # Only impossible rows are missing: the eager loop on two ranks, and rows that need a GPU.
    missing = page[page.index("### Speed not measured") :]
    assert len(re.findall(r"^\| `", missing, re.MULTILINE)) == 1 + 6


@pytest.mark.wide
def test_every_family_layout_has_the_same_gradients() -> None:
    """Transposed weights, biases and interleaved gates (gpt_oss) among them."""
    stack = environment.ensure(STACK)
    paths = os.pathsep.join(map(str, stack.pythonpath))
    variables = {**stack.environ(), "PYTHONPATH": paths, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [str(stack.python), str(ROOT / "tests" / "victims" / "kernel_families.py")],
        env=variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert max(f["apart"] for f in found.values()) < 1e-4
    # Llama 4 ignores the experts implementation.
    assert {name for name, f in found.items() if f["calls"] == 0} == {"llama4"}
