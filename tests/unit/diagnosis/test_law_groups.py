"""Laws of what an optimizer has and of what feeds it, on recorded data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.law_model import (
    PLAIN,
    REDUCED,
    Cleared,
    LawCheck,
    ModelInputs,
    ModelState,
    RankLaws,
)
from moediag.result import Diagnosis
from tests.unit.diagnosis.test_law_steps import with_laws
from tests.unit.law_evidence import NAMES, STEPS, job, other


def told(of: Diagnosis, law: str) -> list[str]:
    return [text for text in of.suspicious if f"--allow {law}" in text]


MOVING, STILL = ("0.003", "0.006", "0.01", "0.008"), ("0.01",) * 4


@pytest.mark.parametrize(
    ("rates", "options", "found"),
    [
        ((MOVING, STILL), {}, True),
        ((MOVING, MOVING), {}, False),
        ((STILL, STILL), {}, False),
        ((MOVING, ("0.1",) * 4), {}, False),  # a rate of its own from the beginning
        ((MOVING, ("0.0",) * 4), {}, False),
        ((MOVING, STILL), {"name": "'scale'"}, False),
        ((MOVING, ("None",) * 4), {}, False),
        ((MOVING[:1], STILL[:1]), {}, False),
    ],
)
def test_a_schedule_of_some_groups_only(
    rates: Sequence[Sequence[str]], options: dict[str, str], found: bool
) -> None:
    def change(_: int, one: LawCheck) -> LawCheck:
        at = STEPS.index(one.step)
        hyper = tuple({"lr": own[at], "weight_decay": f"0.{n}"} for n, own in enumerate(rates))
        pieces = tuple(replace(piece, group=1) for piece in one.pieces)
        return replace(one, pieces=pieces, hyper=(hyper[0], {**hyper[1], **options}))

    steps = STEPS[: len(rates[0])]
    texts = told(diagnose(job(2, change, steps=steps)), "learning-rate-zero")
    assert bool(texts) == found
    if found:
        assert (
            "changes in group 0 over the checked steps, and stays the same in group 1" in texts[0]
        )


@pytest.mark.parametrize("group", [{"initial_lr": "0.01"}, {"lr": "0.01"}])
def test_a_scheduler_of_torch_leaves_a_group_alone_on_request(group: dict[str, str]) -> None:
    def change(_: int, one: LawCheck) -> LawCheck:
        at = STEPS.index(one.step)
        hyper = ({**group, "lr": MOVING[at]}, {**group, "lr": STILL[at]})
        pieces = tuple(replace(piece, group=1) for piece in one.pieces)
        return replace(one, pieces=pieces, hyper=hyper)

    assert bool(told(diagnose(job(2, change)), "learning-rate-zero")) == ("lr" in group)


@pytest.mark.parametrize(
    ("shape", "grad", "found"),
    [("8x8", "zero", True), ("8x8", "g", False), ("4x4", "zero", False), ("", "zero", False)],
    ids=["both zeros", "a gradient", "random factors", "unknown shape"],
)
def test_adapters_whose_factors_are_both_zeros_at_first(shape: str, grad: str, found: bool) -> None:
    """A later reset draws one of them."""
    names = ("q.lora_A.weight", "q.lora_B.weight", "norm.weight")

    def change(_: int, one: LawCheck) -> LawCheck:
        pieces = tuple(replace(piece, shape=shape) for piece in one.pieces)
        if one.step > 3:
            return replace(one, pieces=pieces)
        return replace(
            one, pieces=pieces, params=("40", "40", "w"), grads=("zero", grad, f"{one.step}")
        )

    of = diagnose(job(2, change, names=names))
    assert (of.verdict == "wrong-gradients") == found
    assert not found or "both factors of each adapter begin with zeros" in of.cause


@pytest.mark.parametrize(
    ("frozen", "since", "value", "found"),
    [("bert.weight", 3, "1", True), ("", 3, "1", False), ("bert.weight", 6, "1", False),
     ("bert.weight", 3, "", False)],
    ids=["thawed", "not known to have been frozen", "one step", "it changes"],
)  # fmt: skip
def test_parameters_that_thaw_outside_of_the_optimizer(
    frozen: str, since: int, value: str, found: bool
) -> None:
    def add(_: int, laws: RankLaws) -> RankLaws:
        states = (
            ModelState(step, left_out={"bert.weight": value or str(step)})
            if step >= since
            else ModelState(step, (((0, 1), {frozen: "1"}),))
            for step in STEPS
        )
        return replace(laws, models=tuple(states))

    texts = told(diagnose(with_laws(job(2), add)), "parameters-left-out")
    assert bool(texts) == found
    assert not found or "They were frozen in the first steps" in texts[0]


@pytest.mark.parametrize(
    ("micro_batches", "found"),
    [((1, 2, 2, 2), True), ((2, 2, 2, 2), False), ((1, 1, 1, 1), False), ((1, 2, 3, 2), False),
     ((1, 2), False), ((), False)],
)  # fmt: skip
def test_updates_after_the_first_micro_batch(micro_batches: Sequence[int], found: bool) -> None:
    def add(_: int, laws: RankLaws) -> RankLaws:
        many = dict(zip(STEPS, micro_batches, strict=False))
        inputs = (ModelInputs(s, at, f"{s} {at}", (0, 1)) for s in many for at in range(many[s]))
        rows = tuple({"step": step, "backwards": [{}] * many[step]} for step in many)
        return replace(laws, inputs=tuple(inputs), others={"losses": rows})

    texts = told(diagnose(with_laws(job(2), add)), "accumulation-not-entered")
    assert bool(texts) == found
    assert not found or "The first update at train.py:9 main came after one micro-batch" in texts[0]


@pytest.mark.parametrize(
    ("crossed", "followed", "found"),
    [
        ((True, True), 2, True),
        ((True, False), 2, False),
        ((True, True), 1, False),
        ((True, None), 2, False),
    ],
    ids=["both keep them", "one accumulates", "one was not followed", "no other update between"],
)
def test_optimizers_that_keep_each_other_s_gradients(
    crossed: Sequence[bool | None], followed: int, found: bool
) -> None:
    def add(_: int, laws: RankLaws) -> RankLaws:
        checks = tuple(
            replace(one, key=name, pieces=(replace(one.pieces[0], name=f"{name}.w"),))
            for one in laws.checks
            for name in "dg"
        )
        cleared = tuple(
            Cleared(step, "Adam", (f"{name}.w",), False, "gan.py:9 f", crossed=own)
            for name, own in list(zip("dg", crossed, strict=True))[:followed]
            for step in STEPS
        )
        return replace(laws, checks=checks, cleared=cleared)

    evidence = with_laws(job(2), add)
    assert len(told(diagnose(evidence), "gradients-mixed")) == 2 * found


@pytest.mark.parametrize(
    ("began", "given", "samples", "found"),
    [((0, 1, 2, 5), 96, "a", True), ((0, 0, 0, 0), 96, "a", False), ((0, 1, 2, 5), 8, "a", False),
     ((-1,) * 4, 96, "a", False), ((0, 1, 2, 5), 96, "", False)],
    ids=["anew", "one pass", "one batch", "not recorded", "other samples"],
)  # fmt: skip
def test_a_loader_that_gives_its_first_batch_in_each_step(
    began: Sequence[int], given: int, samples: str, found: bool
) -> None:
    inputs = tuple(
        ModelInputs(
            step, 0, samples or str(step), (0, 1), "Sampler", 2, given=given, batch=4, divided=2,
            line="t.py:3 f", began=at,
        )
        for step, at in zip(STEPS, began, strict=True)
    )  # fmt: skip
    of = diagnose(with_laws(job(2), lambda _, laws: replace(laws, inputs=inputs)))
    texts = told(of, "constant-samples")
    assert bool(texts) == found
    assert not found or "asks its data loader for the first batch again at t.py:3 f" in texts[0]


@pytest.mark.parametrize(
    ("name", "how", "whole", "found"),
    [("experts.{}.weight", REDUCED, False, True), ("experts.{}.weight", PLAIN, False, False),
     ("layers.{}.weight", REDUCED, False, False), ("experts.0.weight", REDUCED, False, False),
     ("experts.{}.weight", REDUCED, True, False)],
    ids=["experts", "ignored by the wrapper", "layers", "the same", "optimizers with a part each"],
)  # fmt: skip
def test_a_wrapper_that_averages_experts_of_different_numbers(
    name: str, how: str, whole: bool, found: bool
) -> None:
    def change(rank: int, one: LawCheck) -> LawCheck:
        pieces = (one.pieces[0], replace(one.pieces[1], name=name.format(rank), how=how))
        return replace(one, pieces=pieces, key=f"{name.format(rank)}.0")

    def add(_: int, laws: RankLaws) -> RankLaws:
        model = (replace(laws.checks[0].pieces[1], name=name.format(n)) for n in (0, 1))
        one = LawCheck("m.0", "", 1, 0, tuple(model), params=("v", "v"), grads=("v", "v"))
        return replace(laws, checks=(*laws.checks, *[one] * whole))

    texts = told(diagnose(with_laws(job(2, change), add)), "starts-apart")
    assert bool(texts) == found
    assert not found or "(experts.0.weight on rank 0 and experts.1.weight on rank 1)" in texts[0]


def test_a_parameter_of_a_module_without_a_name_has_the_line_of_its_update() -> None:
    def change(rank: int, one: LawCheck) -> LawCheck:
        pieces = tuple(replace(p, how=PLAIN, ranks=()) for p in one.pieces)
        params = one.params if one.step < 3 else other(one.params, rank)
        return replace(one, pieces=pieces, params=params, clocks=())

    for names, found in (NAMES, False), (("weight", "bias"), True):
        (text,) = told(diagnose(job(2, change, names=names)), "replicas-apart")
        assert (", updated by AdamW.step() at train.py:9 main)" in text) == found
    of_model = job(2, lambda rank, one: replace(change(rank, one), optimizer=""), names=names)
    assert not any("updated by" in text for text in told(diagnose(of_model), "replicas-apart"))


@pytest.mark.parametrize(
    ("since", "how", "found"),
    [(3, PLAIN, True), (9, PLAIN, False), (3, REDUCED, False), (1, PLAIN, False)],
    ids=["apart", "equal", "of the wrapper", "apart from the beginning"],
)
def test_a_scalar_beside_what_a_wrapper_has(since: int, how: str, found: bool) -> None:
    names = ("net.weight", "AdamW's parameter 1")

    def change(rank: int, one: LawCheck) -> LawCheck:
        ranks = () if how == PLAIN else one.pieces[1].ranks
        scalar = replace(one.pieces[1], how=how, ranks=ranks, shape="")
        own = one.params if one.step < since else (one.params[0], f"{rank}@{one.step}")
        return replace(one, pieces=(one.pieces[0], scalar), params=own, clocks=())

    of = diagnose(job(2, change, names=names))
    texts = told(of, "replicas-apart")
    assert bool(texts) == found
    assert (
        not found or "all matrices are kept equal by a wrapper: parameters outside it" in texts[0]
    )
