"""Whether a step fits on a card."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from moediag.errors import UsageError
from moediag.lab.pipeline import check_fit, check_page, check_result
from moediag.lab.pipeline.check_cost import Memory
from moediag.lab.pipeline.check_fit import GIB, Fit, FitWord
from moediag.lab.pipeline.check_options import CheckOptions
from moediag.lab.pipeline.check_result import CheckResult
from moediag.protocol import Checked, CheckFinding, MemoryPhase, MemoryTimeline
from moediag.report import answer_views
from moediag.report.text_layout import plain
from tests.unit.pipeline.test_check import CHECKED, page, result

MEMORY = Memory(
    parameters=2 * GIB, gradients=2 * GIB, optimizer=4 * GIB, largest_gather=0, largest_unit=""
)
LOSS = MemoryPhase("head and loss", parameters=2 * GIB, gathered=GIB, activations=20 * GIB)
BACKWARD = MemoryPhase("backward of layer 0", gradients=2 * GIB, temporary=3 * GIB)
OPTIONS = CheckOptions("c", {"dp_shard": 8}, batch=4, length=4096)


def fit(card: str = "", *phases: MemoryPhase, worst: tuple[MemoryPhase, ...] = ()) -> Fit:
    timeline = MemoryTimeline(list(phases), list(worst), 2)
    return check_fit.of(timeline, MEMORY, dataclasses.replace(OPTIONS, card=card))


def test_a_card_is_a_number_of_gib_or_a_name() -> None:
    assert check_fit.capacity("80") == 80 * GIB
    assert check_fit.capacity("h100") == round(79.1 * GIB)
    for wrong in ("", "0", "-1", "nan", "inf", "H101"):
        with pytest.raises(UsageError, match="--card"):
            check_fit.capacity(wrong)


def test_the_peak_is_the_largest_moment_with_states_that_are_always_there() -> None:
    found = fit("", LOSS, BACKWARD)
    assert (found.peak.at, found.peak.state, found.peak.total) == (LOSS.name, 6 * GIB, 27 * GIB)
    assert found.word is None and found.worst is None
    assert fit("", BACKWARD).peak.total == (2 + 4 + 2 + 3) * GIB
    small = dataclasses.replace(BACKWARD, gradients=0, temporary=0)
    assert fit("", small).peak.at == check_fit.OPTIMIZER_STEP
    assert fit("", BACKWARD, worst=(LOSS,)).worst == found.peak


def test_the_step_of_an_optimizer_and_earlier_micro_batches_are_counted() -> None:
    timeline = MemoryTimeline([BACKWARD], [], 2)
    stepping = dataclasses.replace(MEMORY, step=4 * GIB)
    found = check_fit.of(timeline, stepping, OPTIONS)
    assert (found.peak.at, found.peak.temporary) == (check_fit.OPTIMIZER_STEP, 4 * GIB)
    several = dataclasses.replace(OPTIONS, accumulate=True)
    loss = MemoryTimeline([LOSS], [], 2)
    assert check_fit.of(loss, MEMORY, several).peak.total == fit("", LOSS).peak.total + 2 * GIB


def test_more_data_parallel_ranks_hold_less_and_compute_the_same() -> None:
    half = dataclasses.replace(MEMORY, parameters=GIB, gradients=GIB)
    timeline = MemoryTimeline([LOSS, BACKWARD], [], 2)
    loss, backward = check_fit.resharded(timeline, MEMORY, half).phases
    assert loss == replace(LOSS, parameters=GIB)
    assert backward == replace(BACKWARD, gradients=GIB)


@pytest.mark.parametrize(
    ("card", "word"),
    [("31", FitWord.FITS), ("29", FitWord.TIGHT), ("27", FitWord.TIGHT), ("26.9", FitWord.NO)],
)
def test_a_tenth_of_the_card_is_left_for_what_is_not_modelled(card: str, word: FitWord) -> None:
    assert fit(card, LOSS, BACKWARD).word is word


def test_without_activations_only_what_cannot_fit_is_decided() -> None:
    assert fit("7").word is FitWord.NO and not fit("7").measured
    assert fit("80").word is None


def test_changes_begin_with_the_smallest() -> None:
    words = [words for words, _ in check_fit.changes(OPTIONS, fit("26", LOSS), 8)]
    assert words == [
        "--recompute selective", "--recompute layers", "--batch 2 --recompute layers",
        "--batch 1 --recompute layers", "dp_shard=16 (16 ranks) --recompute layers",
        "dp_shard=32 (32 ranks) --recompute layers", "dp_shard=64 (64 ranks) --recompute layers",
        "dp_shard=128 (128 ranks) --recompute layers",
    ]  # fmt: skip
    # States alone are 6 GiB: no recomputation helps, nor twice the ranks.
    few = [words for words, _ in check_fit.changes(OPTIONS, fit("2", LOSS), 8)]
    assert few == ["dp_shard=32 (32 ranks) --recompute layers", *words[-2:]][:1] + words[-2:]


def test_the_page_says_where_the_peak_is_and_what_would_fit() -> None:
    found = dataclasses.replace(fit("26", LOSS), change="--recompute layers: 20.0 GiB, FITS")
    text = page(result(CHECKED, fit=found))
    assert "head and loss: 27.0 GiB: 20.0 activations, 6.0 state, 1.0 gathered" in text
    assert "DOES NOT FIT" in text and "it fits with --recompute layers" in text
    assert result(CHECKED, fit=found).state.exit_code == 1
    tight = page(result(CHECKED, fit=fit("29", LOSS)))
    assert "TIGHT" in tight and "only 2.0 GiB are left for fragmentation" in tight
    unknown = result(CHECKED, fit=fit("80"))
    assert "FITS" not in page(unknown) and "peak" not in page(unknown)
    assert unknown.state.exit_code == 3 and "activations were not measured" in unknown.undecided
    most = replace(LOSS, gathered=9 * GIB)
    crowded = page(result(CHECKED, fit=fit("31", BACKWARD, worst=(most,))))
    assert "FITS" in crowded
    assert "but 35.0 GiB if its experts get all tokens that they can" in crowded


def short(found: CheckResult) -> list[str]:
    """The terminal's page of 80 columns without --details."""
    shown = check_page.answer(found, details=False)
    return [plain(line) for line in answer_views.lines(shown, 80)]


def test_the_verdict_comes_with_at_most_three_reasons_and_no_table() -> None:
    safe = short(result(CHECKED, fit=fit("80", LOSS)))
    assert len(safe) < 24 and any("no failure found: SAFE" in line for line in safe)
    assert any("FITS" in line for line in safe) and not any("experts.down" in x for x in safe)
    padded = dataclasses.replace(result().costs[0], padding=result().costs[0].gathered // 2)
    wasteful = short(result(CHECKED, costs=(padded,)))
    assert any("WASTEFUL" in line for line in wasteful)
    assert any("50% of the bytes gathered on dp_shard[4] are padding" in x for x in wasteful)
    better = "--sweep dp_shard=1..4,ep=1..4,tp=1..4 --world 4 instead of --layout: every layout"
    assert better in " ".join(" ".join(safe).split())
    assert not any("--sweep" in line for line in wasteful)  # nobody asked whether it fits
    many = [CheckFinding("plan", "fails", f"reason {n}") for n in range(5)]
    failing = short(result(dataclasses.replace(CHECKED, findings=many), fit=fit("26", LOSS)))
    assert any("WILL FAIL" in line for line in failing) and any("and 3 more" in x for x in failing)
    assert any("DOES NOT FIT" in line for line in failing)
    for unseen in (
        result(Checked(problem="unknown")),
        result(not_seen=(check_result.UNSIMULATED,)),
    ):
        assert not any("SAFE" in line for line in short(unseen))
    assert result(not_seen=(check_result.UNSIMULATED,)).state.exit_code == 0
