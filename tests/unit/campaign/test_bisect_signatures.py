"""What counts as the failure that is looked for, on signatures that moediag writes."""

from __future__ import annotations

import pytest

from moediag.lab.campaign.bisect.probe_verdict import Kind
from moediag.lab.campaign.bisect.signature_match import CannotLearn, Match, Target, judge, learn
from moediag.result import TrialResult
from tests.unit.trial_results import trial_result

STARVED = "collective-mismatch:size reduce_scatter:dp_shard:backward:starved-expert:one-rank"
LOST = "wrong-weights:one-slice-sharded-again:no-rank"


def trial(signature: str, role: str = "unfixed", variant: str = "", cause: str = "") -> TrialResult:
    verdict = signature.partition(":")[0]
    return trial_result(
        variant or role, role, verdict=verdict, expected="", met=False, signature=signature,
        cause=cause,
    )  # fmt: skip


CONTROL = trial("clean", "control", "identical-batches")


def target(match: str = "exact", *signatures: str, declared: str = "") -> Target:
    names = signatures or (STARVED,)
    verdicts = declared.split() or [names[0].partition(":")[0]]
    return learn([*map(trial, names), CONTROL], "unfixed", verdicts, Match(match))


@pytest.mark.parametrize(
    ("signature", "modes"),
    [
        (STARVED, {"exact", "class", "any"}),
        (STARVED.replace("backward", "recompute"), {"class", "any"}),
        (STARVED.replace("one-rank", "several-ranks"), {"class", "any"}),
        (STARVED.replace("dp_shard", "dp_replicate"), {"class", "any"}),
        (STARVED.replace("reduce_scatter", "all_gather"), {"any"}),
        (STARVED.replace("size ", "parameters "), {"any"}),
        ("collective-mismatch:one-rank", {"any"}),
        ("crash:KeyError:modeling.py forward:one-rank", set()),
        ("hang:size reduce_scatter:dp_shard:backward:starved-expert:one-rank", set()),
    ],
)
def test_match_mode_sets_what_must_agree(signature: str, modes: set[str]) -> None:
    for mode in Match:
        verdict = judge([trial(signature), CONTROL], target(mode))
        assert verdict.kind == (Kind.BAD if mode in modes else Kind.OTHER), mode
        assert verdict.text == signature


def test_a_crash_instead_of_a_silent_failure_is_another_failure() -> None:
    """ep-overwrite: prepare raises from 5.16 on. Not repaired, and not what was looked for."""
    crash = "crash:TypeError:fsdp_utils.py fsdp2_prepare_model:several-ranks"
    for mode in Match:
        assert judge([trial(crash), CONTROL], target(mode, LOST)).kind == Kind.OTHER


def test_match_any_accepts_only_declared_verdicts() -> None:
    wanted = target("any", "wrong-gradients:replicas differ:no-rank",
                    declared="wrong-gradients replica-divergence")  # fmt: skip
    assert judge([trial("replica-divergence:gradient norm:no-rank"), CONTROL], wanted).kind == "bad"
    assert judge([trial("nonfinite:no-rank"), CONTROL], wanted).kind == "other"


def test_a_clean_trial_is_good_only_with_a_clean_control() -> None:
    clean = trial("clean")
    assert judge([clean, CONTROL], target()).kind == Kind.GOOD
    assert "no control was run" in judge([clean], target()).text
    for control in ("not-applicable", "inconclusive"):
        verdict = judge([clean, trial(control, "control", cause="no reference")], target())
        assert verdict.kind == Kind.SKIP
        assert "control" in verdict.text and "no reference" in verdict.text
        assert judge([clean, trial(control, "control"), CONTROL], target()).kind == Kind.GOOD


@pytest.mark.parametrize("unfixed", ["clean", STARVED, "crash:KeyError:x.py f:one-rank"])
def test_a_failing_control_skips_the_release(unfixed: str) -> None:
    failing = trial("wrong-gradients:no-rank", "control", "identical-batches")
    verdict = judge([trial(unfixed), CONTROL, failing], target())
    assert verdict.kind == Kind.SKIP
    assert "identical-batches" in verdict.text and "wrong-gradients:no-rank" in verdict.text


def test_a_failure_needs_no_control() -> None:
    """So that a probe may run the control only where the failure does not show."""
    assert judge([trial(STARVED)], target()).kind == Kind.BAD


@pytest.mark.parametrize(
    "seen",
    [
        trial("not-applicable", cause="this release has no such family"),
        trial("inconclusive", cause="The ranks did not start"),
        trial("crash:ImportError:__init__.py <module>:several-ranks", cause="no module named x"),
        trial("crash:ModuleNotFoundError:several-ranks", cause="no module named x"),
    ],
)
def test_an_untested_release_is_skipped_with_its_reason(seen: TrialResult) -> None:
    verdict = judge([seen, CONTROL], target())
    assert verdict.kind == Kind.SKIP and seen.cause in verdict.text


def test_a_failing_import_may_be_the_expected_failure() -> None:
    name = "crash:ImportError:__init__.py <module>:several-ranks"
    assert judge([trial(name), CONTROL], target("exact", name)).kind == Kind.BAD


def test_only_the_probed_variant_is_judged() -> None:
    others = [trial(LOST, "unfixed", "unfixed-newest"), trial("clean", "fix", "upgrade")]
    assert judge([trial("clean"), *others, CONTROL], target("exact", LOST)).kind == Kind.GOOD
    assert judge([*others, CONTROL], target()).kind == Kind.SKIP


def test_the_failure_is_learned_with_its_rate() -> None:
    other = STARVED.replace("one-rank", "several-ranks")
    trials = [trial(s) for s in (other, STARVED, STARVED, "clean", "inconclusive")]
    wanted = learn([*trials, CONTROL], "unfixed", ["collective-mismatch", "clean"])
    assert wanted.signatures == (STARVED, other)
    assert (wanted.rate.shown, wanted.rate.trials) == (3, 4) and not wanted.rate.steady
    assert wanted.failures == {"collective-mismatch"}
    # It shows at times: one clean trial proves nothing.
    assert judge([trial("clean"), CONTROL], wanted).kind == Kind.SKIP
    assert judge([trial("clean")] * 4 + [CONTROL], wanted).kind == Kind.GOOD
    assert judge([trial("clean"), trial(other), CONTROL], wanted).kind == Kind.BAD


def test_another_failure_is_not_learned() -> None:
    crash = trial("crash:KeyError:x.py f:one-rank")
    with pytest.raises(CannotLearn, match=r"does not show wrong-weights.*KeyError"):
        learn([crash, CONTROL], "unfixed", ["wrong-weights"])
    assert learn([crash, trial(LOST), CONTROL], "unfixed", ["wrong-weights"]).signatures == (LOST,)
    with pytest.raises(CannotLearn, match="clean"):
        learn([trial("clean"), CONTROL], "unfixed", ["wrong-weights"])
    with pytest.raises(CannotLearn, match="no reference"):
        learn([trial("inconclusive", cause="no reference")], "unfixed", ["wrong-weights"])
    with pytest.raises(CannotLearn, match="it has no trial"):
        learn([CONTROL], "unfixed", ["wrong-weights"])
    with pytest.raises(CannotLearn, match=r"proves nothing.*control"):
        learn([trial(LOST), trial(LOST, "control")], "unfixed", ["wrong-weights"])
