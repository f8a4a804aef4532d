"""`ep-resume` on real releases, changed: which experts every rank has after a save and a load."""

from __future__ import annotations

import pytest

from tests.e2e.pipeline import Command, need

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

DRIFT = "resume-drift"
EXPERTS = "Experts of each rank at the save and after loading, by their bytes"


@pytest.mark.wide
def test_without_fsdp_the_copies_differ_before_the_save(command: Command) -> None:
    """5.16.1 keeps the experts; routers and embeddings differ between ranks from the start."""
    need({"transformers": "5.16.1", "accelerate": "1.15.0"})
    ran = command.run(
        "ep-resume", "--variant", "unfixed", "--set", "wrapper.kind=transformers",
        "--stack", "transformers=5.16.1",
    )  # fmt: skip
    trial = ran.trial("unfixed")
    assert trial["verdict"] == DRIFT
    assert trial["signature"] == "resume-drift:copies-were-apart:no-rank"
    assert "Before anything was saved" in trial["cause"]
    assert all(row[2] == row[3] for row in ran.rows("unfixed", EXPERTS))


def test_experts_lost_before_the_save_are_not_blamed_on_it(command: Command) -> None:
    need({"transformers": "5.15.1", "accelerate": "1.15.0"})
    trial = command.run(
        "ep-resume", "--variant", "accelerate-sharded",
        "--set", "variants.accelerate-sharded.wrapper.ignore_experts=false",
    ).trial("accelerate-sharded")  # fmt: skip
    assert trial["verdict"] == "wrong-weights"
    assert any(note.startswith("After saving and loading, 100 tensors") for note in trial["notes"])
