"""Mistakes of a training loop that are the same on all ranks, on recorded data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.law_model import (
    Cleared,
    ClipNorm,
    Mode,
    ModeChange,
    ModelInputs,
    ModelState,
    RankLaws,
)
from moediag.result import Diagnosis
from tests.unit.law_evidence import STEPS, check, job


def found(laws: RankLaws, other: RankLaws | None = None, ranks: int = 2) -> Diagnosis:
    """Of a healthy job whose ranks recorded ``laws`` as well; the last one ``other``."""
    evidence = job(ranks)
    own = {}
    for rank, seen in evidence.ranks.items():
        more = other if other is not None and rank == ranks - 1 else laws
        assert seen.laws is not None
        checks = seen.laws.checks
        if any(state.idle for of in (laws, other) if of for state in of.models):
            checks = tuple(replace(one, params=("first",) * 2) for one in checks)
        own[rank] = replace(seen, laws=replace(more, checks=more.checks or checks))
    return diagnose(replace(evidence, ranks=own))


class TestClearedGradients:
    def laws(self, *kept: bool) -> RankLaws:
        records = [
            Cleared(step, "SGD", ("net.bias",), one, "train.py:9 main")
            for step, one in zip(STEPS, kept, strict=False)
        ]
        return RankLaws(cleared=tuple(records))

    def test_gradients_that_nothing_cleared(self) -> None:
        of = found(self.laws(True, True, True))
        assert (of.verdict, of.culprits) == ("wrong-gradients", ())
        assert "After the checked steps (1, 2, 3) nothing cleared" in of.cause
        assert "net.bias before SGD.step() at train.py:9 main" in of.cause

    @pytest.mark.parametrize("kept", [(False, False, False), (True, False), (True,), ()])
    def test_cleared_once_or_hardly_seen_is_no_finding(self, kept: Sequence[bool]) -> None:
        assert found(self.laws(*kept)).verdict == "clean"

    def test_gradients_that_were_cleared_at_times(self) -> None:
        of = found(self.laws(True, True, False))
        assert of.verdict == "clean" and "(1, 2) nothing cleared" in of.suspicious[0]

    def test_a_rank_that_never_clears_them_while_another_always_does(self) -> None:
        of = found(self.laws(False, False), self.laws(True, True))
        assert of.verdict == "wrong-gradients" and "On rank 1, after the checked" in of.cause

    def test_a_rank_that_cleared_them_at_times_says_that_the_program_does(self) -> None:
        assert found(self.laws(True, True), self.laws(True, False)).verdict == "clean"

    def mixed(self, *mixed: bool) -> tuple[str, ...]:
        rows = zip(STEPS, mixed, strict=False)
        records = (Cleared(s, "Adam", ("d.bias",), False, "t.py:9 f", mixed=m) for s, m in rows)
        return found(RankLaws(cleared=tuple(records))).suspicious

    def test_gradients_of_another_optimizers_loss_are_suspicious(self) -> None:
        (text,) = self.mixed(True, True)
        assert "Adam.step() at t.py:9 f used gradients of d.bias from two backwards" in text
        assert not self.mixed(True, False) and not self.mixed(True) and not self.mixed()

    def again(self, *again: bool) -> tuple[str, ...]:
        rows = zip(STEPS, again, strict=False)
        records = (Cleared(s, "Adam", ("d.bias",), False, "t.py:9 f", again=a) for s, a in rows)
        return found(RankLaws(cleared=tuple(records))).suspicious

    def test_two_updates_with_one_gradient_are_suspicious(self) -> None:
        (text,) = self.again(True, False, True)
        assert "Adam.step() at t.py:9 f was called again before any backward" in text
        assert not self.again(True, False) and not self.again(False, False) and not self.again()


class TestModes:
    def laws(self, modes: str, kinds: tuple[str, ...] = ("Dropout",)) -> RankLaws:
        """One letter a step: t(raining), e(valuation), b(oth, evaluation first)."""
        ran = [
            (step, training)
            for step, letter in enumerate(modes, 1)
            for training in {"t": (True,), "e": (False,), "b": (False, True)}[letter]
        ]
        changes = [
            ModeChange(step, 0, training)
            for at, (step, training) in enumerate(ran)
            if at == 0 or ran[at - 1][1] != training
        ]
        told = [Mode(step, 0, "Net", training, kinds) for step, training in ran if step in STEPS]
        return RankLaws(modes=tuple(told), mode_changes=tuple(changes))

    def test_a_model_that_stays_in_evaluation_mode(self) -> None:
        of = found(self.laws("tteeee"))
        assert of.verdict == "wrong-gradients"
        assert "Net was trained in training mode at first and only in evaluation mode" in of.cause
        assert "since step 3, so its Dropout modules were" in of.cause

    @pytest.mark.parametrize(
        "modes",
        [
            "tttttt",
            "bbbbbb",
            "tetete",
            "ttttte",
            "ttteee",
            "tteete",
            "eettee",
            "eetttt",
            "tbbbbb",
            "",
        ],
    )
    def test_no_finding(self, modes: str) -> None:
        of = found(self.laws(modes))
        assert (of.verdict, of.notes) == ("clean", ())

    @pytest.mark.parametrize(("last", "models", "broken"), [(8, 1, 1), (7, 1, 0), (8, 2, 0)])
    def test_updates_after_the_last_checked_step(self, last: int, models: int, broken: int) -> None:
        """Another model may be what trains then."""
        laws = self.laws("ttteee")
        laws = replace(laws, modes=laws.modes + (Mode(6, 1, "Other", True, ()),) * (models - 1))
        evidence = job(2)
        calls = {r: (replace(s.collectives[-1], step=last),) for r, s in evidence.ranks.items()}
        own = {
            rank: replace(seen, collectives=calls[rank], laws=laws)
            for rank, seen in evidence.ranks.items()
        }
        of = diagnose(replace(evidence, ranks=own))
        assert ("in evaluation mode since step 4" in of.cause) == bool(broken), of.cause

    def test_from_the_first_step_on_it_may_be_meant(self) -> None:
        of = found(self.laws("eeeeee"))
        assert of.verdict == "clean"
        assert "Net was trained in evaluation mode in all checked steps" in of.notes[0]

    def test_a_model_that_computes_the_same_in_both_modes(self) -> None:
        assert found(self.laws("tteeee", kinds=())).verdict == "clean"

    def test_changes_that_were_not_recorded(self) -> None:
        assert found(replace(self.laws("tteeee"), mode_changes=())).verdict == "clean"

    def test_another_optimizer_may_train_in_evaluation_mode(self) -> None:
        """A phase that compares probabilities with those of its own samples."""
        (first, second, *later) = (check(step, (0, 1)) for step in STEPS)
        phases = (first, second, *(replace(one, key="b.0") for one in later))
        of = found(replace(self.laws("tteeee"), checks=phases))
        assert of.verdict == "clean" and "by another optimizer" in of.suspicious[0]

    def test_a_rank_in_evaluation_mode_that_averages_gradients_with_others(self) -> None:
        train, left = self.laws("tttttt"), self.laws("tteeee")
        assert found(train, left).verdict == "clean"  # of models of their own
        inputs = (ModelInputs(1, 0, "a", (0, 1)),)
        of = found(replace(train, inputs=inputs), replace(left, inputs=inputs))
        assert of.verdict == "wrong-gradients"
        assert "On rank 1, and not on rank 0, Net was trained in training mode" in of.cause


class TestScaledNorms:
    def laws(self, scale: float, norm: float = 9e4, bound: float = 1.0, steps: int = 3) -> RankLaws:
        of = [
            ClipNorm(step, ("net.bias",), norm, bound, "train.py:8 main", scale)
            for step in STEPS[:steps]
        ]
        return RankLaws(norms=tuple(of))

    def test_gradients_that_still_have_the_loss_scale(self) -> None:
        of = found(self.laws(65536.0))
        assert of.verdict == "wrong-gradients"
        assert "clip_grad_norm_ at train.py:8 main clipped to a norm of 1 gradients" in of.cause
        assert "65536 times smaller than intended" in of.cause

    @pytest.mark.parametrize(
        "laws",
        [
            {"scale": 0.0},
            {"scale": 1.0},
            {"scale": 65536.0, "norm": 0.5},  # the bound was not reached
            {"scale": 65536.0, "norm": float("inf")},  # the scaler skips the step
            {"scale": 65536.0, "bound": 65536.0},  # scaled, too
            {"scale": 65536.0, "bound": 6553.6},
            {"scale": 1024.0, "bound": 512.0},
            {"scale": 65536.0, "steps": 1},
        ],
    )
    def test_no_finding(self, laws: dict[str, float]) -> None:
        assert found(self.laws(**laws)).verdict == "clean"  # type: ignore[arg-type]

    def test_bounds_that_change_may_follow_scaled_norms(self) -> None:
        laws = self.laws(1024.0)
        norms = (replace(one, max_norm=one.step / 7) for one in laws.norms)
        of = found(replace(laws, norms=tuple(norms)))
        assert of.verdict == "clean" and "The norm changes" in of.suspicious[0]


class TestReplaced:
    def laws(self, *replaced: tuple[str, ...], values: str = "aaaa") -> RankLaws:
        states = zip(STEPS, replaced, values, strict=False)
        return RankLaws(
            models=tuple(
                ModelState(s, left_out={"head.weight": value}, replaced=r) for s, r, value in states
            )
        )

    def test_an_optimizer_with_copies_of_its_own_may_write_them_back(self) -> None:
        of = found(self.laws(*[("head.weight",)] * 4, values="abcd"))
        assert of.verdict == "clean"

    def test_what_replaced_parameters_of_an_optimizer_does_not_train(self) -> None:
        of = found(self.laws(*[("head.weight",)] * 4))
        assert of.verdict == "wrong-weights"
        assert "1 parameter (head.weight) had gradients and no optimizer has them" in of.cause

    def test_replaced_after_the_first_update(self) -> None:
        laws = self.laws(*[("head.weight",)] * 4)
        first = replace(laws.models[0], left_out={}, replaced=())
        of = found(replace(laws, models=(first, *laws.models[1:])))
        assert of.verdict == "wrong-weights" and "since step 2 1 parameter" in of.cause
        never = replace(laws, models=(first, *laws.models[2:]))
        assert found(never).verdict == "clean"

    def test_left_out_in_some_steps_or_on_some_ranks_only(self) -> None:
        every = self.laws(*[("head.weight",)] * 4)
        assert found(self.laws(*[("head.weight",)] * 3, ())).verdict == "clean"
        assert found(every, self.laws((), (), (), ())).verdict == "clean"
        assert found(self.laws(("head.weight",))).verdict == "clean"


class TestUntrained:
    def laws(self, idle: bool = True, values: Sequence[str | None] = ("a",) * 4) -> RankLaws:
        states = [
            ModelState(step, left_out={"head.weight": value}, idle=idle)
            for step, value in zip(STEPS, values, strict=False)
        ]
        return RankLaws(models=tuple(states))

    def test_an_optimizer_of_other_parameters(self) -> None:
        of = found(self.laws())
        assert of.verdict == "wrong-weights"
        assert "1 parameter of the model (head.weight) had some and never changed" in of.cause

    def test_no_gradient_anywhere(self) -> None:
        of = found(RankLaws(models=tuple(ModelState(step, idle=True) for step in STEPS)))
        assert of.verdict == "wrong-gradients"
        assert "In all 4 checked steps no parameter of any optimizer had a gradient" in of.cause

    def test_parameters_that_change_without_gradients_train(self) -> None:
        """Evolution strategies, and updates in the backward."""
        checks = tuple(check(step, (0, 1)) for step in STEPS)
        models = tuple(ModelState(step, idle=True) for step in STEPS)
        assert found(RankLaws(checks=checks, models=models)).verdict == "clean"

    def test_another_rank_has_gradients(self) -> None:
        """FSDP1 leaves ranks without a piece of a small parameter."""
        idle, busy = (
            RankLaws(models=tuple(ModelState(step, idle=one) for step in STEPS))
            for one in (True, False)
        )
        assert found(idle, busy).verdict == "clean"

    def test_another_optimizer_trains(self) -> None:
        """A loss through a network that nobody trains adds to its gradients."""
        of = found(self.laws(idle=False))
        assert of.verdict == "clean"
        assert "no optimizer that stepped has it" in of.suspicious[0]

    @pytest.mark.parametrize("values", ["abcd", ("a", None, "a", "a"), "aa"])
    def test_parameters_that_change_or_are_hardly_seen(self, values: Sequence[str]) -> None:
        assert found(self.laws(values=values)).verdict == "clean"


def test_old_records_have_none_of_it() -> None:
    assert found(RankLaws()).verdict == "clean"
