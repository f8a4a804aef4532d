"""The law that replicas are equal, on recorded fingerprints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.laws import breach_words
from moediag.evidence.law_model import (
    LOCAL,
    PART,
    PLACED,
    PLAIN,
    REDUCED,
    ClipNorm,
    LawCheck,
    ModelInputs,
    RankLaws,
)
from moediag.evidence.model import Collective, RankEvidence
from moediag.result import Diagnosis
from tests.unit.law_evidence import NAMES, STEPS, check, job, other, with_events


def apart(rank: int, since: int, *what: str) -> object:
    """Rank ``rank`` has other values of ``what`` from step ``since`` on."""

    def change(of: int, one: LawCheck) -> LawCheck:
        if of != rank or one.step < since:
            return one
        rows: dict[str, object] = {}
        for name in what:
            if name == "state":
                rows["state"] = {k: other(v, rank) for k, v in one.state.items()}
            elif name == "lr":
                rows["hyper"] = ({**one.hyper[0], "lr": "0.02"},)
            else:
                rows[name] = other(getattr(one, name), rank)
        return replace(one, **rows)  # type: ignore[arg-type]

    return change


def both(*changes: object) -> object:
    def change(of: int, one: LawCheck) -> LawCheck:
        for each in changes:
            one = each(of, one)  # type: ignore[operator]
        return one

    return change


def drift(rank: int, since: int) -> object:
    """After the first different update everything differs."""
    return apart(rank, since, "params", "grads", "state")


def found(ranks: int, change: object, how: str = "reduced") -> Diagnosis:
    return diagnose(job(ranks, change, how))  # type: ignore[arg-type]


def test_equal_replicas_are_clean_and_the_page_says_what_held() -> None:
    of = diagnose(job(3))
    assert of.verdict == "clean"
    assert "no law was broken in 4 checked steps" in of.cause


def test_without_records_the_page_promises_nothing() -> None:
    evidence = job(2)
    ranks = {rank: replace(seen, laws=None) for rank, seen in evidence.ranks.items()}
    assert "numbers were not checked" in diagnose(replace(evidence, ranks=ranks)).cause


def test_ranks_that_hold_nothing_in_common_were_not_compared() -> None:
    of = diagnose(job(2, how="part"))
    assert (
        "no law was broken, but numbers were not checked: no two ranks hold the same parameters"
        in of.cause
    )
    assert "no two ranks" not in diagnose(job(2, how="local")).cause


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["0.010000000000000002", "0.1"], ["0.01", "0.1"]),
        (["0.010000000000000002", "0.01"], ["0.010000000000000002", "0.01"]),
        (["None", "0.1"], ["None", "0.1"]),
    ],
)
def test_numbers_are_short_if_they_still_differ(values: list[str], shown: list[str]) -> None:
    assert list(breach_words.short(values)) == shown


def test_another_learning_rate_explains_other_parameters() -> None:
    of = found(3, both(apart(1, 1, "lr"), drift(1, 2)))
    assert (of.verdict, of.culprits) == ("replica-divergence", (1,))
    assert (
        "Before AdamW.step() at train.py:9 main of step 2, 2 parameters (net.{weight,bias}) differ"
        in of.cause
    )
    assert "The learning rate differs since step 1: 0.01 on ranks 0, 2, 0.02 on rank 1." in of.cause


@pytest.mark.parametrize(
    ("part", "since", "told"),
    [("shard 0 of 1", 3, True), ("shard 0 of 2", 3, False), ("shard 0 of 1", 1, False)],
)
def test_replicas_that_fsdp1_was_told_to_shard_over_one_rank(
    part: str, since: int, told: bool
) -> None:
    def shard(_: int, one: LawCheck) -> LawCheck:
        return replace(one, pieces=tuple(replace(piece, part=part) for piece in one.pieces))

    of = found(2, both(shard, drift(1, since)))
    assert of.verdict == "replica-divergence"
    assert ("shard groups of one rank: FSDP then takes NO_SHARD" in of.cause) is told
    assert found(2, both(shard)).verdict == "clean"


@pytest.mark.parametrize(("shared", "verdict"), [(True, "replica-divergence"), (False, "clean")])
def test_replicas_of_ranks_that_also_have_parameters_of_their_own(
    shared: bool, verdict: str
) -> None:
    """Each rank has another number of experts, so that the optimizers have other keys."""

    def experts(of: int, one: LawCheck) -> LawCheck:
        own = tuple(replace(one.pieces[0], name=f"expert{n}", ranks=()) for n in range(of + 1))
        pieces = (*own, *(p if shared else replace(p, ranks=()) for p in one.pieces))
        rows = {name: (*("x" * len(own)), *getattr(one, name)) for name in ("params", "grads")}
        return replace(one, key=f"{of}.0", pieces=pieces, state={}, **rows)  # type: ignore[arg-type]

    assert found(3, both(apart(1, 2, "lr"), drift(1, 3), experts)).verdict == verdict
    assert found(3, both(experts)).verdict == "clean"


def test_two_models_with_the_same_names_are_not_compared_with_each_other() -> None:
    """A rank has experts of its own, and its two optimizers hold replicas of the same names."""

    def named(of: int, one: LawCheck) -> LawCheck:
        own = replace(one.pieces[0], name=f"expert{of}", ranks=())
        rows = {name: ("x", *getattr(one, name)) for name in ("params", "grads")}
        return replace(one, key=f"{of}.0", pieces=(own, *one.pieces), state={}, **rows)  # type: ignore[arg-type]

    evidence = job(2, named)
    ranks = {}
    for rank, seen in evidence.ranks.items():
        laws = seen.laws or RankLaws()
        second = [replace(c, key=f"{rank}.1", params=other(c.params, 9)) for c in laws.checks]
        ranks[rank] = replace(seen, laws=replace(laws, checks=(*second, *laws.checks)))
    assert diagnose(replace(evidence, ranks=ranks)).verdict == "clean"


def test_of_two_ranks_none_is_named() -> None:
    of = found(2, both(apart(1, 1, "lr"), drift(1, 2)))
    assert (of.verdict, of.culprits) == ("replica-divergence", ())
    assert "ranks 0, 1 differ" in of.cause


def test_what_only_the_first_rank_does_may_be_right() -> None:
    """``if rank == 0: scheduler.step()`` leaves the others with a wrong learning rate."""
    of = found(3, both(apart(0, 1, "lr"), drift(0, 2)))
    assert (of.verdict, of.culprits) == ("replica-divergence", ())


def test_a_difference_before_the_first_update_is_one_of_loading() -> None:
    of = found(3, drift(2, 1))
    assert (of.verdict, of.culprits) == ("replica-divergence", ())
    assert "Before the first call of AdamW.step()" in of.cause
    assert "loaded or initialised other values" in of.cause


def test_gradients_that_differ_first_are_the_reason() -> None:
    of = found(3, both(apart(1, 2, "grads"), drift(1, 3)))
    assert of.culprits == (1,)
    assert "In step 2 the gradients of net.{weight,bias} differed already" in of.cause
    assert "ranks 0, 2 agree, rank 1 differs" in of.cause


def test_an_optimizer_state_that_differs_first_is_the_reason() -> None:
    of = found(3, both(apart(1, 2, "state"), drift(1, 3)))
    assert "the optimizer's state of net.{weight,bias} differed already (ranks 0" in of.cause


def test_a_rank_that_lost_the_optimizers_state() -> None:
    def lost(of: int, one: LawCheck) -> LawCheck:
        return replace(one, state={}) if of == 1 and one.step == 3 else one

    cause = found(3, both(lost, drift(1, 6))).cause
    assert "In step 3 the optimizer's state of net.{weight,bias} differed already" in cause
    assert "(rank 1 had no exp_avg any more)" in cause
    assert found(3, lost).verdict == "clean"


def test_an_extra_step_shows_in_the_counts() -> None:
    def more(of: int, one: LawCheck) -> LawCheck:
        return replace(one, count=one.count + 1) if of == 1 and one.step > 3 else one

    of = found(3, both(more, drift(1, 6)))
    assert of.culprits == (1,)  # though no check was near
    assert "AdamW.step() at train.py:9 main was called a different number of times" in of.cause
    assert "rank 0 5 times, rank 1 6 times, rank 2 5 times" in of.cause


def test_a_difference_between_two_distant_checks_names_no_rank() -> None:
    of = found(3, drift(1, 6))
    assert (of.verdict, of.culprits) == ("replica-divergence", ())
    assert "in step 3 they were equal" in of.cause
    assert "was not recorded" in of.cause
    of = found(3, both(drift(1, 6), apart(1, 6, "lr")))
    assert "The learning rate differs at the latest since step 6" in of.cause


def test_ranks_at_different_points_of_the_program_are_not_compared() -> None:
    """DDP's ``join``: a rank whose data ended earlier counts fewer steps."""

    def later(of: int, one: LawCheck) -> LawCheck:
        return replace(one, clocks=(one.clocks[0] + 6,)) if of == 1 else one  # type: ignore[operator]

    of = found(3, both(later, drift(1, 1)))
    assert of.verdict == "clean"
    assert any("no step was recorded by all of their ranks" in text for text in of.not_seen)


def test_a_rank_without_records_is_not_compared() -> None:
    evidence = job(3, drift(1, 2))  # type: ignore[arg-type]
    ranks = {**evidence.ranks, 1: replace(evidence.ranks[1], laws=None)}
    assert diagnose(replace(evidence, ranks=ranks)).verdict == "clean"


def test_a_fingerprint_that_could_not_be_read_differs_from_nothing() -> None:
    def unread(of: int, one: LawCheck) -> LawCheck:
        return replace(one, params=(None, None), grads=(None, None)) if of == 1 else one

    assert found(3, unread).verdict == "clean"


@pytest.mark.parametrize("how", [LOCAL, PART, PLAIN])
def test_parameters_that_nothing_keeps_equal_may_differ(how: str) -> None:
    assert found(3, drift(1, 1), how).verdict == "clean"


def test_local_steps_are_told_as_not_checked() -> None:
    assert any("no_sync" in text for text in found(2, None, LOCAL).not_seen)


@pytest.mark.parametrize("how", [LOCAL, REDUCED])  # of the first step
@pytest.mark.parametrize("phase", ["", "forward", "backward", "other"])
def test_a_wrapper_that_does_not_reduce_every_update(how: str, phase: str) -> None:
    """Local SGD averages parameters outside the model. Activations, and the gradients of some
    updates, keep no parameters equal."""

    def own(rank: int, one: LawCheck) -> LawCheck:
        pieces = tuple(replace(p, how=how if one.step == 1 else LOCAL) for p in one.pieces)
        params = other(one.params, rank) if one.step > 1 else one.params
        return replace(one, pieces=pieces, params=params)

    evidence = job(2, own, LOCAL)
    call = Collective(0, "world", 0, "all_reduce", 64, 64, "float32", phase, step=3)
    calls = (call,) if phase else ()
    ranks = {r: replace(seen, collectives=calls) for r, seen in evidence.ranks.items()}
    evidence = replace(evidence, ranks=ranks)
    events = ({"step": 1, "line": "train.py:9 main"},)
    of = diagnose(with_events(evidence, unreduced=events))
    assert of.verdict == ("clean" if phase == "other" else "replica-divergence")
    told = "not to reduce gradients in every update at train.py:9" in of.cause
    assert told == (phase != "other")


def test_placed_replicas_must_start_equal() -> None:
    of = found(2, drift(1, 1), PLACED)
    assert of.verdict == "replica-divergence"
    assert "placement Replicate" in of.cause


def test_placed_replicas_may_differ_later_by_rounding() -> None:
    of = found(2, drift(1, 2), PLACED)
    assert of.verdict == "clean"
    assert any("rounding may differ" in text for text in of.not_seen)


def test_placed_replicas_that_were_updated_before_the_first_record_may_differ() -> None:
    """The recording began in the middle of training: what differs may be rounding."""

    def later(of: int, one: LawCheck) -> LawCheck:
        return replace(one, count=one.count + 100)

    assert found(2, both(drift(1, 1), later), PLACED).verdict == "clean"


def sketched(of: int, one: LawCheck, difference: float, norms: tuple[float, float]) -> LawCheck:
    """Gradients that differ on rank 1; ``norms`` of the two parameters."""
    if of != 1 or one.step > 1:
        extra = {} if one.step == 1 else {"params": other(one.params, of)} if of == 1 else {}
        return replace(one, sketches={0: (1.0, norms[0]), 1: (1.0, norms[1])}, **extra)  # type: ignore[arg-type]
    sketches = {0: (1.0 + difference, norms[0]), 1: (1.0, norms[1])}
    return replace(one, grads=other(one.grads, of), sketches=sketches)


def test_gradients_of_placed_replicas_that_differ_by_their_size_are_a_failure() -> None:
    of = found(2, lambda r, one: sketched(r, one, 3.0, (4.0, 4.0)), PLACED)
    assert (of.verdict, of.culprits) == ("replica-divergence", ())
    assert "In step 1 the gradients of net.weight differed by up to 75 %" in of.cause


def test_gradients_of_placed_replicas_may_differ_by_rounding() -> None:
    assert found(2, lambda r, one: sketched(r, one, 0.1, (4.0, 4.0)), PLACED).verdict == "clean"


def test_a_gradient_that_is_only_rounding_may_differ() -> None:
    """The bias of attention's keys has no effect on the loss."""
    change = lambda r, one: sketched(r, one, 1e-6, (1e-6, 4.0))  # noqa: E731
    assert found(2, change, PLACED).verdict == "clean"


def test_parts_of_one_parameter_have_one_learning_rate() -> None:
    of = found(3, apart(1, 2, "lr"), PART)
    assert (of.verdict, of.culprits) == ("replica-divergence", (1,))
    assert "In step 2 the learning rate of AdamW.step() at train.py:9 main differs" in of.cause
    assert "between ranks that hold parts of the same parameters" in of.cause


def test_learning_rates_of_different_calls_are_not_compared() -> None:
    """A rank that counts steps differently is at another point of the schedule."""

    def change(of: int, one: LawCheck) -> LawCheck:
        later = {"count": one.count + 1, "hyper": ({"lr": "0.02"},)}
        return replace(one, **later) if of == 1 else one  # type: ignore[arg-type]

    assert found(3, change, PART).verdict == "clean"


def test_a_learning_rate_that_has_no_effect_is_no_failure() -> None:
    """It differs for a while, and parameters stay equal."""

    def change(of: int, one: LawCheck) -> LawCheck:
        lr = "0.02" if of == 1 and one.step < 6 else "0.01"
        return replace(one, hyper=({"lr": lr},))

    assert found(3, change).verdict == "clean"


def test_an_optimizer_that_one_rank_made_anew_is_the_same_one() -> None:
    def change(of: int, one: LawCheck) -> LawCheck:
        own = both(apart(1, 3, "state"), drift(1, 6))(of, one)  # type: ignore[operator]
        return replace(own, key="a.1", count=0) if of == 1 and one.step > 2 else own

    of = diagnose(job(2, change))
    assert of.verdict == "replica-divergence" and "different number of times" not in of.cause
    assert "In step 3 the optimizer's state of net.{weight,bias} differed already" in of.cause


def test_parameters_of_a_wrapper_that_the_program_writes_are_suspicious() -> None:
    """A memory of each rank's own samples; one that never changes was loaded on a rank only."""

    def change(moves: bool, rank: int, one: LawCheck) -> LawCheck:
        own = f"of {rank}" + f"@{one.step}" * moves
        return replace(one, params=(*one.params[:-1], own), grads=(*one.grads[:-1], None))

    of = diagnose(job(2, partial(change, True)))
    assert (
        of.verdict == "clean"
        and "1 parameter (net.bias) of a wrapper without gradients" in of.suspicious[0]
    )
    assert diagnose(job(2, partial(change, False))).verdict == "replica-divergence"


@pytest.mark.parametrize(
    ("name", "since", "still", "broken"),
    [("teacher.0.weight", 2, False, True), ("memory", 2, False, False),
     ("teacher.0.weight", 1, False, False), ("teacher.0.weight", 2, True, False)],
    ids=["an average", "a memory", "copies that adapt to samples", "an average of one rank"],
)  # fmt: skip
def test_averages_that_each_rank_updates_otherwise(
    name: str, since: int, still: bool, broken: bool
) -> None:
    def change(rank: int, one: LawCheck) -> LawCheck:
        value = f"average@{1 if rank and still else one.step}"
        value += " of 1" * (rank and one.step >= since and not still)
        return replace(one, params=(one.params[0], value), grads=(one.grads[0], None))

    of = diagnose(job(2, change, names=("student.0.weight", name)))
    assert (of.verdict == "replica-divergence") is broken
    assert f"1 parameter ({name})" in (of.cause if broken else of.suspicious[0])


def test_an_inner_optimizer_moves_each_rank_for_itself() -> None:
    """First-order MAML: before the updates of the outer optimizer all ranks are equal again."""

    def found(outer: bool) -> Diagnosis:
        def change(rank: int, one: LawCheck) -> LawCheck:
            return replace(one, params=other(one.params, rank)) if one.step > 1 else one

        evidence = job(2, change)
        ranks = {}
        for rank, seen in evidence.ranks.items():
            assert seen.laws is not None
            more = tuple(check(step, (0, 1)) for step in (3, 6))
            more = tuple(replace(one, key="b.0", optimizer="SGD") for one in more) * outer
            laws = replace(seen.laws, checks=(*seen.laws.checks, *more))
            ranks[rank] = replace(seen, laws=laws)
        return diagnose(replace(evidence, ranks=ranks))

    assert found(True).verdict == "clean" and "another optimizer" in found(True).suspicious[0]
    assert found(False).verdict == "replica-divergence"


class TestPlainParameters:
    """Parameters that no wrapper keeps equal; each rank holds all of them."""

    NAMES = ("up.weight", "down.weight", "norm.bias")

    def found(
        self,
        *apart: str,
        since: int = 2,
        events: dict[str, Any] | None = None,
        allowed: tuple[str, ...] = (),
        calls: Sequence[Collective] = (),
        ranks: tuple[int, ...] = (),
        part: str = "",
        frozen: str = "",
        inputs: bool = False,
        told: tuple[int, ...] = (0, 1),
        rates: tuple[str, str] = ("0.1", "0.1"),
    ) -> Diagnosis:
        def change(of: int, one: LawCheck) -> LawCheck:
            rows = [
                "first"
                if name == frozen
                else f"{value} of {of}"
                if of and name in apart and one.step >= since
                else value
                for name, value in zip(self.NAMES, one.params, strict=True)
            ]
            part_of = part.format(of)
            own = tuple(replace(p, ranks=ranks and (of,), part=part_of) for p in one.pieces)
            numbers = ({"lr": rates[of]},)
            return replace(one, params=tuple(rows), pieces=own, clocks=(), hyper=numbers)

        evidence = job(2, change, REDUCED if ranks else PLAIN, names=self.NAMES)

        def add(rank: int, seen: RankEvidence) -> RankEvidence:
            own = (events or {}) if rank in told else {}
            own = {k: ({"file": str(rank)},) if of == "ranks" else of for k, of in own.items()}
            laws = replace(seen.laws or RankLaws(), others=own, allowed=allowed)
            if inputs:
                one = ModelInputs(2, 0, str(rank), (), "DistributedSampler", 2, rank, "train.py:4")
                laws = replace(laws, inputs=(one,))
            return replace(seen, laws=laws, collectives=(*seen.collectives, *calls))

        every = {rank: add(rank, seen) for rank, seen in evidence.ranks.items()}
        return diagnose(replace(evidence, ranks=every))

    def test_a_whole_model_that_drifts_is_suspicious(self) -> None:
        of = self.found(*self.NAMES)
        assert of.verdict == "clean"
        assert "nothing keeps them equal" in of.suspicious[0]
        assert of.suspicious[0].endswith("--allow replicas-apart")

    def test_what_differed_first_is_told(self) -> None:
        of = self.found(*self.NAMES, rates=("0.1", "0.2"))
        assert "learning rate differs since step 1: 0.1 on rank 0, 0.2 on" in of.suspicious[0]
        assert "learning rate" not in self.found(*self.NAMES).suspicious[0]

    def test_equal_parameters_with_other_numbers_are_suspicious(self) -> None:
        """Each rank updates a slice of every parameter, and all gather them."""
        of = self.found(rates=("0.1", "0.2"))
        assert of.verdict == "clean" and "something is suspicious" in of.cause
        assert "In step 1 the learning rate of AdamW.step()" in of.suspicious[0]
        assert not self.found().suspicious

    def test_those_that_stay_equal_while_they_train_were_checked(self) -> None:
        of = self.found()
        assert "no law was broken in 4 checked steps" in of.cause and not of.not_seen

    @pytest.mark.parametrize("apart", [NAMES, NAMES[:1]])
    def test_whether_other_ones_must_be_equal_is_not_known(self, apart: tuple[str, ...]) -> None:
        of = self.found(*apart, since=1)
        assert any("plain parameters must be equal" in text for text in of.not_seen)
        assert ("not checked" in of.cause) is (apart == self.NAMES)

    @pytest.mark.parametrize(
        ("told", "size", "meant"), [((0, 1), 64, True), ((0,), 64, False), ((0, 1), 8, False)]
    )
    def test_copies_that_all_ranks_discarded_may_drift(
        self, told: tuple[int, ...], size: int, meant: bool
    ) -> None:
        """MAML. Without a call that carries gradients nothing keeps the model equal either."""
        calls = [Collective(8, "world", 8, "all_reduce", size, size, "float32", step=4)]
        events = {"discarded": ({"model": "a"},)}
        of = self.found(*self.NAMES, events=events, told=told, calls=calls)
        assert of.verdict == "clean" and bool(of.suspicious) is not meant

    @pytest.mark.parametrize(
        ("phase", "may"), [("forward", True), ("backward", True), ("other", False)]
    )
    def test_experts_may_begin_equal(self, phase: str, may: bool) -> None:
        """Ranks that send each other samples in the forward may drift: it is only a note."""
        calls = [Collective(8, "world", 8, "all_to_all", 64, 64, "float32", step=4, phase=phase)]
        for names in (self.NAMES, self.NAMES[:1]):
            of = self.found(*names, calls=calls)
            assert bool(of.suspicious) is not may
            assert any("experts or tables of its own" in note for note in of.notes) is may

    @pytest.mark.parametrize(
        ("apart", "held"), [((1, 2), "(moe.router.weight)"), ((2,), ""), ((0, 1, 2), "embed")]
    )
    def test_only_experts_may_differ(self, apart: tuple[int, ...], held: str) -> None:
        """Names tell which parameters are those of experts. Their gradients differ."""
        names = ("embed.weight", "moe.router.weight", "moe.experts.0.weight")

        def change(of: int, one: LawCheck) -> LawCheck:
            rows = [
                f"{v} of {of}" if at in apart and one.step > 1 else v
                for at, v in enumerate(one.params)
            ]
            pieces = tuple(replace(p, ranks=()) for p in one.pieces)
            grads = (*one.grads[:2], f"of {of}")
            return replace(one, params=tuple(rows), grads=grads, pieces=pieces, clocks=())

        call = Collective(8, "world", 8, "all_to_all", 64, 64, "float32", step=4, phase="forward")
        evidence = job(2, change, PLAIN, names=names)
        ranks = {
            r: replace(s, collectives=(*s.collectives, call)) for r, s in evidence.ranks.items()
        }
        of = diagnose(replace(evidence, ranks=ranks))
        assert bool(of.suspicious) is bool(held)
        assert not held or ("layers outside the experts" in of.suspicious[0])
        assert not held or held in of.suspicious[0]

    @pytest.mark.parametrize(
        ("names", "first", "op", "told"),
        [
            (("moe.wg.weight", "moe.experts.0.weight"), "equal", "all_to_all", True),
            (("moe.wg.weight", "moe.w1.weight"), "equal", "all_to_all", True),
            (("moe.wg.weight", "moe.experts.0.weight"), "equal", "all_gather", False),
            (("experts.0.b.weight", "experts.0.a.weight"), "equal", "all_to_all", False),
            (("moe.b.weight", "moe.a.weight"), f"{64:x}", "all_to_all", False),  # only zeros
            (("moe.norm.bias", "moe.w1.weight"), "equal", "all_to_all", False),
            (("moe.wg.weight", "moe.experts.0.weight"), "equal again", "all_to_all", False),
        ],
    )
    def test_what_a_wrapper_ignores_beside_experts_of_each_rank(
        self, names: tuple[str, str], first: str, op: str, told: bool
    ) -> None:
        """The first one begins equal and drifts; the second is an expert of the rank's own."""

        def change(of: int, one: LawCheck) -> LawCheck:
            own = [replace(p, ranks=(), how=PLAIN) for p in one.pieces[:2]]
            equal = one.step == 1 or (first == "equal again" and one.step != 2)
            later = first if equal else f"{of} @{one.step}"
            params = (later, f"expert {of} @{one.step}", *one.params[2:])
            grads = (*other(one.grads[:2], of), *one.grads[2:])
            return replace(one, params=params, grads=grads, pieces=(*own, *one.pieces[2:]))

        evidence = job(2, change, REDUCED, names=(*names, "embed.weight"))
        calls = [
            Collective(8, "world", 8, op, 64, 64, "float32", step=4, phase=phase)
            for phase in ("forward", "backward")
        ]
        ranks = {
            r: replace(s, collectives=(*s.collectives, *calls)) for r, s in evidence.ranks.items()
        }
        of = diagnose(replace(evidence, ranks=ranks))
        assert of.verdict == "clean" and bool(of.suspicious) is told
        assert not told or (
            f"layers outside the experts ({names[0]}): nothing keeps these equal, as the wrapper "
            "reduces gradients of other parameters only" in of.suspicious[0]
        )

    def test_other_models_or_slices_are_not(self) -> None:
        assert not self.found(*self.NAMES, since=1).suspicious

    def test_a_part_that_drifts_while_others_train_alike_is_suspicious(self) -> None:
        of = self.found("down.weight")
        assert "1 parameter (down.weight) differs between" in of.suspicious[0]
        assert self.found("norm.bias").suspicious

    @pytest.mark.parametrize(
        ("phase", "ops", "told"),
        [("forward", ("all_gather", "all_reduce"), False), ("forward", ("all_gather",), True),
         ("other", ("all_gather", "all_reduce"), True)],
    )  # fmt: skip
    def test_a_head_that_ranks_divide_beside_a_wrapper(
        self, phase: str, ops: tuple[str, ...], told: bool
    ) -> None:
        """Its parts begin equal if all ranks have one seed."""

        def change(of: int, one: LawCheck) -> LawCheck:
            rows = (f"{one.params[0]} of {of}" if one.step > 1 else "equal", *one.params[1:])
            pieces = (replace(one.pieces[0], ranks=(), how=PLAIN), *one.pieces[1:])
            grads = (*other(one.grads[:1], of), *one.grads[1:])
            return replace(one, params=rows, pieces=pieces, grads=grads)

        calls = tuple(
            Collective(8, "world", 8, op, 128, 128, "float32", step=step, phase=phase)
            for op in ops for step in (2, 3)
        )  # fmt: skip
        evidence = job(2, change, names=("head.weight", "a.weight", "b.weight"))
        ranks = {r: replace(s, collectives=calls) for r, s in evidence.ranks.items()}
        of = diagnose(replace(evidence, ranks=ranks))
        assert bool(of.suspicious) == told
        assert told or any("may have its part of a layer" in note for note in of.notes)

    def test_numbers_that_begin_equal_by_chance_say_nothing(self) -> None:
        """Slices of tensor parallelism, whose biases begin with zeros."""

        def change(of: int, one: LawCheck) -> LawCheck:
            rows = [
                f"{v} of {of}" if i < 2 or one.step > 1 else v for i, v in enumerate(one.params)
            ]
            own = tuple(replace(p, ranks=()) for p in one.pieces)
            return replace(one, params=tuple(rows), pieces=own, clocks=())

        assert not diagnose(job(2, change, PLAIN, names=self.NAMES)).suspicious
        # The same beside a matrix that all ranks hold and keep equal.
        names = ("up.weight", "down.weight", "up.bias", "norm.weight")

        def beside(of: int, one: LawCheck) -> LawCheck:
            changed = change(of, one)
            return replace(changed, params=(*changed.params[:3], f"n {one.step}"))

        assert not diagnose(job(2, beside, PLAIN, names=names)).suspicious
        (text,) = diagnose(
            job(2, beside, PLAIN, names=(*names[:2], "ln.bias", "wte.weight"))
        ).suspicious
        assert "1 parameter (ln.bias) differ" in text

    @pytest.mark.parametrize("norms", [(3.0, 2.0), (3.0, 3.0)])
    def test_what_ranks_that_add_activations_share_must_stay_equal(
        self, norms: tuple[float, float]
    ) -> None:
        """Tensor parallelism: up.weight is a slice. Norms of slices explain what they scale."""
        names = ("up.weight", "wte.weight")

        def change(of: int, one: LawCheck) -> LawCheck:
            later = f"wte of {of}" if one.step > 1 else "wte"
            own = tuple(replace(p, ranks=()) for p in one.pieces)
            values = (f"slice {of} @{one.step}", later)
            return replace(one, params=values, grads=values, pieces=own, clocks=())

        def found(phase: str) -> Diagnosis:
            def add(rank: int, seen: RankEvidence) -> RankEvidence:
                norm = ClipNorm(1, names, norms[rank], 1.0, "train.py:7 main")
                used = {"names": names, "made": [[6.0, 9.0]] * 2, "step": 1,
                        "used": [[rank + 1.0, 9.0], [1.0, 9.0 / norms[rank]]]}  # fmt: skip
                laws = replace(seen.laws, norms=(norm,), others={"own_gradients": (used,)})
                calls = tuple(
                    Collective(8, "world", 8, "all_reduce", 64, 64, "float32", step=s, phase=phase)
                    for s in (1, 2)
                )
                return replace(seen, laws=laws, collectives=(*seen.collectives, *calls))

            evidence = job(2, change, PLAIN, names=names)
            every = {rank: add(rank, seen) for rank, seen in evidence.ranks.items()}
            return diagnose(replace(evidence, ranks=every))

        (text,) = found("forward").suspicious
        assert "1 parameter (wte.weight) was equal on all ranks at first" in text
        told = "clip_grad_norm_ at train.py:7 main returned a different norm on each rank" in text
        assert told is (norms[0] != norms[1])
        assert found("backward").suspicious
        assert not found("other").suspicious

    def sent(self, still: int = 1, grads: str = "g", kept: bool = True) -> Diagnosis:
        """Rank 0 keeps the first value of down.weight, as far as it is ``still``."""

        def change(of: int, one: LawCheck) -> LawCheck:
            rows = list(one.params)
            if of == 0:
                rows[1] = "first" if still else f"other@{one.step}"
            if one.step == 1:
                rows[1] = "first"
            elif not kept and of:
                rows[0] = f"{rows[0]} of {of}"
            own = tuple(replace(p, ranks=()) for p in one.pieces)
            row = (grads, grads, grads)
            return replace(one, params=tuple(rows), grads=row, pieces=own, clocks=())

        return diagnose(job(2, change, PLAIN, names=self.NAMES))

    def test_an_update_that_one_rank_made_alone_is_a_failure(self) -> None:
        of = self.sent()
        assert (of.verdict, of.culprits) == ("replica-divergence", ())
        assert "down.weight) kept its first value on rank 0" in of.cause

    @pytest.mark.parametrize("change", [{"still": 0}, {"grads": ""}, {"kept": False}])
    def test_one_that_moves_without_gradient_or_in_another_model_is_suspicious(
        self, change: dict[str, Any]
    ) -> None:
        of = self.sent(**change)
        assert of.verdict == "clean" and of.suspicious

    @pytest.mark.parametrize(
        ("hows", "shapes", "told"),
        [
            ((PLACED, PLAIN), ("8x8", "8"), True),
            ((PLAIN, PLAIN), ("8x8", "8"), False),  # the matrices are slices, cut by hand
            ((PART, PLAIN), ("8x8", "8"), False),  # experts may have biases of their own
        ],
    )
    def test_a_norm_that_a_plan_of_tensor_parallelism_leaves_out(
        self, hows: tuple[str, str], shapes: tuple[str, str], told: bool
    ) -> None:
        def change(of: int, one: LawCheck) -> LawCheck:
            pieces = tuple(
                replace(p, how=how, shape=shape, ranks=() if how == PLAIN else (0, 1))
                for p, how, shape in zip(one.pieces, hows, shapes, strict=True)
            )
            first = one.params[0] if hows[0] == PLACED else f"slice {of} @{one.step}"
            norm = "ones" if one.step == 1 else f"norm {of} @{one.step}"
            return replace(one, pieces=pieces, params=(first, norm))

        of = diagnose(job(2, change, PLAIN, names=("up.weight", "norm.weight")))
        assert of.verdict == "clean"
        assert ("parameters outside the plan" in str(of.suspicious)) is told

    @pytest.mark.parametrize(
        ("names", "far", "told"),
        [
            (("up.weight", "norm.weight"), 0.5, "broken"),
            (("up.weight", "norm.weight"), 1e-6, "suspicious"),  # rounding
            (("up.weight", "norm.weight"), None, "suspicious"),  # sizes of another recorder
            (("up.weight", "up.bias"), 0.5, ""),  # a part of the same layer
            (("experts.up.weight", "norm.weight"), 0.5, ""),  # experts of each rank
        ],
    )
    def test_what_is_beside_parts_that_are_dtensors(
        self, names: tuple[str, str], far: float | None, told: str
    ) -> None:
        """FSDP2 was told to ignore it, or a plan leaves it out."""

        def change(of: int, one: LawCheck, equal: bool = False) -> LawCheck:
            up, norm = one.pieces
            up = replace(up, part=f"S(0)={of}/2", how=PART, shape="8x8")
            pieces = (up, replace(norm, part="", how=PLAIN, ranks=(), shape="8"))
            later = f"norm {0 if equal else of} @{one.step}" if one.step > 1 else "ones"
            grads = (f"g {of}", f"{0 if equal else of} @{one.step}")
            sketches = {} if far is None else {1: (1.0 + far * of, 1.0)}
            return replace(
                one, pieces=pieces, params=(f"{of} @{one.step}", later), grads=grads,
                sketches=sketches,
            )  # fmt: skip

        of = diagnose(job(2, change, PLAIN, names=names))
        assert (of.verdict == "replica-divergence") is (told == "broken")
        text = of.cause + str(of.suspicious)
        assert ("1 parameter (norm.weight" in text and "all matrices are DTensors" in text) is (
            told != ""
        )
        healthy = lambda of, one: change(of, one, equal=True)  # noqa: E731
        assert not diagnose(job(2, healthy, PLAIN, names=names)).suspicious

    def test_equal_gradients_of_other_matrices_show_one_loss(self) -> None:
        """Tensor parallelism: up.weight is a slice, and norm.weight has no complete gradient."""

        def change(of: int, one: LawCheck, apart: int = 1) -> LawCheck:
            own = tuple(replace(p, ranks=()) for p in one.pieces)
            later = other(one.params, of) if one.step > 1 else one.params
            params = (f"slice {of} @{one.step}", *later[1:])
            grads = (f"slice {of}", *(other(one.grads, of)[1 : apart + 1]), *one.grads[apart + 1 :])
            return replace(one, params=params, grads=grads, pieces=own, clocks=())

        names = ("up.weight", "norm.weight", "head.weight")
        of = diagnose(job(2, change, PLAIN, names=names))
        assert "1 parameter (norm.weight) differ" in of.suspicious[0]
        alone = lambda of, one: change(of, one, 2)  # noqa: E731
        assert not diagnose(job(2, alone, PLAIN, names=names)).suspicious

    @pytest.mark.parametrize(
        ("sizes", "phase", "steps", "fails"),
        [((136,), "backward", STEPS, True), ((64, 64, 8), "backward", STEPS, True),
         ((64, 64), "backward", STEPS, False), ((136,), "forward", STEPS, False),
         ((136,), "backward", STEPS[:3], False), ((), "backward", STEPS, False)],
    )  # fmt: skip
    def test_gradients_that_are_reduced_and_change_again(
        self, sizes: tuple[int, ...], phase: str, steps: Sequence[int], fails: bool
    ) -> None:
        """All gradients in each backward; activations, and some updates, show no one model."""
        calls = [
            Collective(n, "world", n, "all_reduce", size, size, "float32", step=step, phase=phase)
            for step in steps for n, size in enumerate(sizes, 8)
        ]  # fmt: skip
        of = self.found(*self.NAMES, calls=calls)
        assert ("their gradients, and something changes" in of.cause) is fails
        assert (of.verdict == "replica-divergence") is fails and (fails or of.suspicious)
        assert self.found(*self.NAMES, calls=calls, rates=("0.1", "0.2")).verdict == "clean"

    def test_a_model_that_accelerate_did_not_wrap_is_a_failure(self) -> None:
        events = {"unwrapped": ({"model": "Net", "line": "train.py:7 main"},)}
        of = self.found(*self.NAMES, events=events)
        assert of.verdict == "replica-divergence"
        assert "prepare at train.py:7 main returned Net without DistributedDataParallel" in of.cause

    @pytest.mark.parametrize(("told", "averages"), [((0, 1), False), ((0,), False), ((0, 1), True)])
    def test_a_wrapper_that_was_thrown_away_is_a_failure(
        self, told: tuple[int, ...], averages: bool
    ) -> None:
        events = {"bare": ({"line": "train.py:9 main"},)}
        calls = [Collective(8, "world", 8, "all_reduce", 64, 64, "float32", step=2)] * averages
        of = self.found(*self.NAMES, events=events, told=told, calls=calls)
        fails = told == (0, 1) and not averages
        assert (of.verdict == "replica-divergence") is fails
        assert ("called without it at train.py:9 main" in of.cause) is fails

    def test_a_wrapper_over_one_rank_is_a_failure(self) -> None:
        """Beside sequence parallelism, whose ranks meet in the forward; those of a cross-validation
        do not."""
        calls = [Collective(8, "world", 8, "all_gather", 64, 64, "float32", "forward", step=1)]
        of = self.found(*self.NAMES, ranks=(0,), calls=calls)
        assert of.verdict == "replica-divergence" and "a process group of one rank" in of.cause
        assert self.found("down.weight", ranks=(0,), calls=calls).verdict == "clean"
        alone = self.found(*self.NAMES, ranks=(0,))
        assert alone.verdict == "clean" and alone.suspicious

    @pytest.mark.parametrize(
        ("parts", "op", "broken"),
        [(2, "", True), (1, "", False), (2, "all_gather", False)],
        ids=["samples are divided", "parts of one rank", "ranks meet in the forward"],
    )
    def test_a_group_of_one_rank_beside_one_of_all(self, parts: int, op: str, broken: bool) -> None:
        def change(of: int, one: LawCheck) -> LawCheck:
            value = one.params[0] + f" of {of}" * (one.step > 2)
            pieces = (replace(one.pieces[0], ranks=(of,)), *one.pieces[1:])
            return replace(one, params=(value, *one.params[1:]), pieces=pieces, clocks=())

        calls = [Collective(8, "world", 8, op, 64, 64, "float32", "forward", step=1)] * bool(op)
        calls += [Collective(9, "world", 9, "all_reduce", 64, 64, "float32", "backward", step=2)]
        evidence, ranks = job(2, change, names=self.NAMES), {}
        for rank, seen in evidence.ranks.items():
            one = ModelInputs(2, 0, "", (), "DistributedSampler", parts, rank, "train.py:4")
            laws = replace(seen.laws or RankLaws(), inputs=(one,))
            ranks[rank] = replace(seen, laws=laws, collectives=(*seen.collectives, *calls))
        of = diagnose(replace(evidence, ranks=ranks))
        assert (of.verdict == "replica-divergence") is broken
        assert broken is ("a process group of one rank" in of.cause)
        assert broken or "(up.weight)" in of.suspicious[0]

    def test_adapters_that_nothing_wraps_are_a_failure(self) -> None:
        """Frozen matrices of the same optimizer stay equal."""
        events = {"bare": ({"line": "train.py:9 main"},)}
        _, *names = self.NAMES
        of = self.found(*names, frozen=self.NAMES[0], events=events)
        assert of.verdict == "replica-divergence" and "train.py:9 main" in of.cause

    def test_shards_that_began_equal_are_no_replicas(self) -> None:
        """Of FSDP2 over a mesh with one replica: random numbers of a CPU are equal on all ranks."""
        assert self.found(*self.NAMES, ranks=(0,), part="S(0)={}/2").verdict == "clean"

    def test_samples_that_are_divided_among_ranks_are_a_failure(self) -> None:
        of = self.found(*self.NAMES, inputs=True)
        assert of.verdict == "replica-divergence"
        assert "divides the samples among 2 ranks" in of.cause

    def test_models_that_began_different_and_share_the_samples_are_a_failure(self) -> None:
        """Without a seed, the first values differ too."""
        of = self.found(*self.NAMES, since=1, inputs=True)
        assert (of.verdict, of.culprits) == ("replica-divergence", ())
        assert "with other values from the beginning" in of.cause and of.next_step
        call = Collective(8, "world", 8, "all_reduce", 64, 64, "float32", "backward", step=4)
        for healthy in ({"inputs": False}, {"calls": [call]}, {"rates": ("0.1", "0.2")}):
            kwargs: dict[str, Any] = {"inputs": True, **healthy}
            assert self.found(*self.NAMES, since=1, **kwargs).verdict == "clean"
        assert self.found(self.NAMES[0], since=1, inputs=True).verdict == "clean"

    def test_samples_that_are_divided_and_gradients_that_are_reduced_are_not(self) -> None:
        call = Collective(8, "world", 8, "all_reduce", 64, 64, "float32", "backward", step=4)
        of = self.found(*self.NAMES, inputs=True, calls=[call])
        assert of.verdict == "clean" and of.suspicious

    @pytest.mark.parametrize(
        ("op", "size", "verdict"),
        [
            ("all_reduce", 64, "clean"),
            ("reduce", 64, "clean"),
            ("all_gather", 64, "clean"),  # may average the models, or compare them
            ("broadcast", 64, "replica-divergence"),
            ("all_reduce", 8, "replica-divergence"),
        ],
    )
    def test_models_that_are_added_up_after_the_last_update(
        self, op: str, size: int, verdict: str
    ) -> None:
        calls = [Collective(n, "world", n, op, size, size, "float32", step=6) for n in (8, 9)]
        of = self.found(*self.NAMES, inputs=True, calls=calls)
        assert of.verdict == verdict and bool(of.suspicious) is (verdict == "clean")

    def test_objects_may_carry_models(self) -> None:
        """Pickles of as many bytes as the matrices have elements."""
        for size, verdict in ((128, "clean"), (100, "replica-divergence")):
            calls = [Collective(8, "world", 8, "all_gather", size, size, "uint8", step=4)]
            assert self.found(*self.NAMES, inputs=True, calls=calls).verdict == verdict

    @pytest.mark.parametrize("since", [1, 2])
    def test_ranks_with_files_of_their_own_may_train_models_of_their_own(self, since: int) -> None:
        more: dict[str, Any] = {"inputs": True, "since": since}
        one = {"saved": ({"file": "a"},)}
        assert self.found(*self.NAMES, events=one, **more).verdict == "replica-divergence"
        assert self.found(*self.NAMES, events={"saved": "ranks"}, **more).verdict == "clean"

    @pytest.mark.parametrize("more", [{"inputs": True}, {"ranks": (0,)}])
    def test_a_search_trains_a_model_on_each_rank(self, more: dict[str, Any]) -> None:
        """Ranks began with other learning rates."""
        of = self.found(*self.NAMES, rates=("0.1", "0.2"), **more)
        assert of.verdict == "clean" and of.suspicious

    def test_one_rank_that_accelerate_told_of_is_not_enough(self) -> None:
        events = {"unwrapped": ({"model": "Net", "line": ""},) * 2}
        assert self.found(*self.NAMES, events=events, told=(0,)).verdict == "clean"

    def test_a_program_that_averages_its_parameters_is_not(self) -> None:
        averaged = [
            Collective(n, "world", n, "all_reduce", 64, 64, "float32", step=4) for n in (8, 9)
        ]
        of = self.found(*self.NAMES, inputs=True, calls=averaged)
        assert of.verdict == "clean" and of.suspicious

    @pytest.mark.parametrize(
        ("allowed", "silent"),
        [
            ("replicas-apart", True),
            ("replicas-apart:down.*", True),
            ("replicas-apart:up.*", False),
            ("same-part", False),
        ],
    )
    def test_what_is_allowed_is_not_told(self, allowed: str, silent: bool) -> None:
        assert bool(self.found("down.weight", allowed=(allowed,)).suspicious) is not silent


class TestCalledWithoutTheWrapper:
    def found(self, *calls: Collective, event: str = "bare", shape: str = "") -> Diagnosis:
        def change(rank: int, one: LawCheck) -> LawCheck:
            changed: LawCheck = drift(1, 2)(rank, one)  # type: ignore[operator]
            wide = replace(one.pieces[0], shape=shape or one.pieces[0].shape)
            return replace(changed, pieces=(wide, *one.pieces[1:]))

        evidence = job(2, change, names=(*NAMES, *["small.weight"] * bool(shape)))
        events = {event: ({"line": "train.py:6 main", "step": 1},)}
        every = {}
        for rank, seen in evidence.ranks.items():
            laws = replace(seen.laws or RankLaws(), others=events)
            every[rank] = replace(seen, laws=laws, collectives=(*seen.collectives, *calls))
        return diagnose(replace(evidence, ranks=every))

    def test_the_line_is_the_cause(self) -> None:
        of = self.found()
        assert of.verdict == "replica-divergence"
        assert "was called without it, at train.py:6 main" in of.cause
        assert of.next_step.startswith("Call the wrapper")

    def test_ranks_that_average_now_and_then_are_suspicious(self) -> None:
        call = Collective(9, "world", 9, "all_reduce", 64, 64, "float32", step=4)
        of = self.found(call)
        assert of.verdict == "clean" and "averages or sends" in of.suspicious[0]

    def test_a_call_that_has_a_smaller_matrix_only_averages_nothing(self) -> None:
        """A metric of many samples, beside a model with a small matrix."""
        call = Collective(9, "world", 9, "all_gather", 32, 64, "float32", step=4)
        assert self.found(call, shape="8x8").verdict == "clean"
        assert self.found(call, shape="64x8").verdict == "replica-divergence"

    def test_without_such_a_call_averaging_explains_nothing(self) -> None:
        call = Collective(9, "world", 9, "all_reduce", 64, 64, "float32", step=4)
        assert self.found(call, event="").verdict == "replica-divergence"

    def test_another_reason_is_not_blamed_on_such_a_call(self) -> None:
        """A gradient penalty may call the model inside its wrapper; the learning rate differs."""
        change = both(apart(1, 1, "lr"), drift(1, 2))
        evidence = job(2, change)  # type: ignore[arg-type]
        events = {"bare": ({"line": "train.py:6 main", "step": 1},)}
        ranks = {
            rank: replace(seen, laws=replace(seen.laws or RankLaws(), others=events))
            for rank, seen in evidence.ranks.items()
        }
        of = diagnose(replace(evidence, ranks=ranks))
        assert "The learning rate differs" in of.cause and "without it" not in of.cause
        assert of.next_step.startswith("Give the learning rate")

    def test_no_sync_that_is_never_left_is_the_cause(self) -> None:
        of = self.found(event="unreduced")
        assert "was inside no_sync" in of.cause and of.next_step.startswith("Leave no_sync")
        call = Collective(9, "world", 9, "all_reduce", 64, 64, "float32", step=4)
        assert self.found(call, event="unreduced").suspicious  # local SGD


def test_an_update_that_was_not_sent_is_that_of_its_owner() -> None:
    def change(of: int, one: LawCheck) -> LawCheck:
        owned = ("net.bias",) if of == 1 else ("net.weight",)
        late = (one.params[0], f"{one.params[1]} of {of}") if one.step > 1 else one.params
        return replace(one, optimizer="", params=late, owned=owned, grads=(None, None), hyper=())

    of = diagnose(job(2, change))
    assert of.verdict == "replica-divergence"
    assert "Only the optimizer of rank 1 has net.bias" in of.cause
    assert "Before the update" in of.cause and "Send every updated" in of.next_step


def test_a_law_beside_another_failure_is_a_note() -> None:
    evidence = job(3, drift(1, 2))  # type: ignore[arg-type]
    of = diagnose(replace(evidence, interrupted=True))
    assert of.verdict == "inconclusive"
    assert any("differ between replicas" in note for note in of.notes)
