"""The real step on real releases: FSDP2 with expert parallelism in bf16, with each kernel."""

from __future__ import annotations

import pytest

from tests.e2e.pipeline import Command, need
from tests.e2e.test_scenarios import CLEAN, MISMATCH, WRONG, holds

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

STACK = {"transformers": "5.17.0", "accelerate": "1.15.0", "triton": "3.6.0"}
LATER = {"transformers": "5.18.0", "accelerate": "1.15.0", "triton": "3.6.0"}


def test_the_wrong_kernel_is_found_and_ours_is_right(command: Command) -> None:
    """The interpreter runs the Triton kernels; one environment for all of them."""
    need(STACK)
    ran = command.run(
        "ep-step", "--stack", "triton=3.6.0", "--variant", "batched", "--variant", "triton",
        "--variant", "no-expert-parallelism",
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
def test_every_kernel_with_every_routing(command: Command, routing: str, ranks: str) -> None:
    need(STACK)
    need(LATER)
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
        "no-expert-parallelism": CLEAN,
    }
