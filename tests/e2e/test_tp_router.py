"""The router under tensor parallelism: an imitation in plain torch, and torchtitan 0.2.2 itself.

Two gloo ranks on the CPU. For every case and every fix the table says which detectors saw it; a
wrong fix that one detector sees is one that the others, used alone, would have accepted.
"""

from __future__ import annotations

import pytest

from tests.e2e.pipeline import Command, Ran, need
from tests.e2e.test_scenarios import CLEAN, WRONG, holds

pytestmark = [pytest.mark.e2e, pytest.mark.stack]

PLAIN = {"transformers": "5.23.0", "accelerate": "1.15.0"}
TITAN = {"torchtitan": "0.2.2"}
DETECTORS = ("loss", "replicas", "router", "input", "others")
# Case -> its scenario, and how the variants of tp-router-torchtitan end.
CASES = {
    "after": "tp-router-divergence",
    "before": "tp-router-divergence-scores-before",
    "etp1": "tp-router-divergence-expert-tp-1",
    "etp1-b2": "tp-router-divergence-expert-tp-1-batch-2",
}
# Case -> fix -> the detectors that see it; "" where nothing is wrong.
SEEN = {
    "after": {
        "unfixed": "replicas, router, input",
        "weights-partial": "replicas, router, input, others",
        "gate-partial": "",
        "gate-mean": "router, input",
        "gate-sum": "input",
        "boundary-twice": "input",
        "merged": "input",
        "boundary": "",
    },
    "before": {
        "unfixed": "",
        "weights-partial": "others",
        "gate-partial": "router, input",
        "gate-mean": "",
        "gate-sum": "router",
        "boundary-twice": "router, input",
        "merged": "input",
        "boundary": "",
    },
    "etp1": {
        "unfixed": "replicas, router",
        "weights-partial": "replicas, router, others",
        "gate-partial": "",
        "gate-mean": "router",
        "gate-sum": "",
        "boundary-twice": "input",
        "merged": "input",
        "boundary": "",
    },
    "etp1-b2": {
        "unfixed": "replicas, router, input",
        "weights-partial": "replicas, router, input, others",
        "gate-partial": "input",
        "gate-mean": "router, input",
        "gate-sum": "input",
        "boundary-twice": "input",
        "merged": "input",
        "boundary": "",
    },
}
REAL = {("after", "unfixed"): "unfixed", ("before", "unfixed"): "before"}


def rows(ran: Ran) -> dict[str, dict[str, object]]:
    """variant -> column -> cell of the table of detectors."""
    (table,) = [t for t in ran.result["tables"] if t["title"].startswith("What each detector")]
    columns = table["columns"]
    found = [dict(zip(columns, row, strict=True)) for row in table["rows"]]
    assert len({row["variant"] for row in found}) == len(found)
    return {str(row["variant"]): row for row in found}


def agrees(row: dict[str, object], seen: str) -> None:
    """The row names exactly the detectors ``seen``, and each number says the same."""
    assert row["seen by"] == (seen or "-"), row
    assert row["judged"] == ("wrong" if seen else "right")
    for detector in DETECTORS:
        value = row[detector]
        assert isinstance(value, int | float)
        assert (value > 0) == (detector in seen.split(", ")), row


def real(case: str, fix: str) -> str:
    """The variant of tp-router-torchtitan."""
    return REAL.get((case, fix), f"{fix}-{case}")


# torchtitan covers all four; `make wide` runs the others on the look-alike.
ASKED = [pytest.param(c, marks=() if c == "etp1-b2" else pytest.mark.wide) for c in CASES]


@pytest.mark.parametrize("case", ASKED)
def test_the_look_alike_gives_the_expected_verdicts(command: Command, case: str) -> None:
    need(PLAIN)
    ran = command.run(CASES[case])
    holds(ran)
    assert ran.reproduced is (case != "before")
    found = rows(ran)
    for fix, seen in SEEN[case].items():
        agrees(found[fix], seen)
        assert ran.verdicts[fix] == (WRONG if seen else CLEAN)
        assert any("look-alike" in note for note in ran.trial(fix)["notes"])
    agrees(found["no-tensor-parallelism"], "")
    assert ran.fixes == {fix: not seen for fix, seen in SEEN[case].items() if fix != "unfixed"}


@pytest.mark.wide
class TestTorchtitan:
    @pytest.fixture
    def ran(self, command: Command) -> Ran:
        need(TITAN)
        return command.run("tp-router-torchtitan")

    def test_the_release_and_every_fix_end_as_expected(self, ran: Ran) -> None:
        holds(ran)
        assert ran.reproduced is True
        found = rows(ran)
        expected = {real(case, fix): s for case, own in SEEN.items() for fix, s in own.items()}
        assert set(found) == set(expected)
        for variant, seen in expected.items():
            agrees(found[variant], seen)
        assert ran.trial("unfixed")["stack"]["torchtitan"] == "0.2.2"
        assert ran.trial("unfixed")["signature"] == "wrong-gradients:replicas differ:no-rank"

    def test_the_wrong_part_is_reported(self, ran: Ran) -> None:
        gate = "layers.0.moe.router.gate.weight"
        trial = ran.trial("unfixed")
        assert trial["wrong_parameters"] == [gate]
        assert "The loss of that step is correct to five digits" in trial["cause"]
        assert "1 MoE block passes a wrong gradient" in trial["cause"]
        assert f"differ between ranks that hold the same slice ({gate})" in trial["cause"]
        broken = ran.trial("weights-partial-before")
        assert broken["wrong_parameters"] == [f"layers.0.moe.experts.w{i}" for i in (1, 2, 3)]
        assert any(
            "layers.0.moe.experts.w1 has a gradient of 8x16x32 where 8x32x32 belongs" in note
            for note in broken["notes"]
        )

    def test_each_error_has_the_expected_size(self, ran: Ran) -> None:
        """The factors follow from the number of ranks, 2, and not from the data."""
        found = rows(ran)
        assert found["gate-partial-before"]["router"] == pytest.approx(1, abs=0.01)  # twice
        assert found["gate-sum-before"]["router"] == pytest.approx(1, abs=0.01)
        assert found["gate-mean-after"]["router"] == pytest.approx(0.5, abs=0.01)
        # Gradients from the gate count twice with either, everything else once: with the
        # scores before, that part is the whole error of both.
        assert found["merged-before"]["input"] == found["gate-partial-before"]["input"]


@pytest.mark.wide
class TestOneDetectorAlone:
    """Each wrong fix, and a detector that alone would have accepted it."""

    @pytest.fixture
    def found(self, command: Command) -> dict[tuple[str, str], dict[str, object]]:
        need(TITAN)
        table = rows(command.run("tp-router-torchtitan"))
        return {(case, fix): table[real(case, fix)] for case in CASES for fix in SEEN[case]}

    @pytest.mark.parametrize(
        ("case", "fix"),
        [(c, f) for c, own in SEEN.items() for f, seen in own.items() if seen and f != "unfixed"],
    )
    def test_each_detector_alone_accepts_wrong_fixes(
        self, found: dict[tuple[str, str], dict[str, object]], case: str, fix: str
    ) -> None:
        row = found[case, fix]
        assert row["judged"] == "wrong"
        accepting = [d for d in DETECTORS if row[d] == 0]
        assert "loss" in accepting  # of the step itself; it is exact whatever the backward does
        if fix != "weights-partial":
            # A check of the replicas or of the loss accepts all the others.
            assert {"replicas", "others"} <= set(accepting)
            assert {"router", "input"} - set(accepting), "nobody sees it"

    def test_all_three_detectors_are_needed(
        self, found: dict[tuple[str, str], dict[str, object]]
    ) -> None:
        """Each of the three accepts some wrong fix and is the only one to see another."""
        wrong = {key: row for key, row in found.items() if row["judged"] == "wrong"}
        for detector in ("replicas", "router", "input"):
            assert any(row[detector] == 0 for row in wrong.values())
        assert [key for key, row in wrong.items() if row["seen by"] == "router"] == [
            ("before", "gate-sum"),
            ("etp1", "gate-mean"),
        ]
        assert {fix for (_, fix), row in wrong.items() if row["seen by"] == "input"} == {
            "gate-partial", "gate-sum", "boundary-twice", "merged",
        }  # fmt: skip
