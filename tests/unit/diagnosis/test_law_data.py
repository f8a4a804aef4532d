"""Laws of samples, gradients, norms and finite numbers, on recorded data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.law_model import (
    NO_GRADIENT,
    PART,
    PLAIN,
    ZERO_GRADIENT,
    ClipNorm,
    LawCheck,
    LawPiece,
    ModelInputs,
    RankLaws,
)
from moediag.evidence.model import Collective, Evidence, Group
from moediag.result import Diagnosis
from tests.unit.law_evidence import STEPS, job, with_events

Digest = Callable[[int, int], str]  # of rank and step


def with_laws(evidence: Evidence, add: Callable[[int, RankLaws], RankLaws]) -> Diagnosis:
    ranks = {
        rank: replace(seen, laws=add(rank, seen.laws or RankLaws()))
        for rank, seen in evidence.ranks.items()
    }
    return diagnose(replace(evidence, ranks=ranks))


class TestSamples:
    def found(self, digest: Digest, ranks: int = 2, **more: object) -> Diagnosis:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            inputs = tuple(
                ModelInputs(step, 0, digest(rank, step), tuple(range(ranks)), **more)  # type: ignore[arg-type]
                for step in STEPS
            )
            return replace(laws, inputs=inputs)

        return with_laws(job(ranks), add)

    def test_other_samples_on_each_rank_are_no_note(self) -> None:
        assert not self.found(lambda rank, step: f"{rank} {step}").notes

    def test_a_loader_that_gives_all_ranks_the_same_is_a_failure(self) -> None:
        of = self.found(lambda _, step: str(step), sampler="RandomSampler", line="train.py:3 main")
        assert of.verdict == "wrong-gradients"
        assert "each repeats the work of the other" in of.cause
        assert "from a RandomSampler at train.py:3 main" in of.cause
        assert of.next_step.startswith("Give the loader a DistributedSampler")
        of = self.found(lambda _, step: str(step), sampler="MyDistributedSampler")
        assert of.next_step.startswith("Find out why MyDistributedSampler gives")

    @pytest.mark.parametrize(("losses", "verdict"), [((1.0, 1.0), "wrong-gradients"),
                                                     ((1.0, 1.1), "clean")])  # fmt: skip
    def test_ranks_may_compute_different_things_from_the_same_samples(
        self, losses: tuple[float, float], verdict: str
    ) -> None:
        """Other points of the same pictures, which the forward draws."""
        inputs = tuple(ModelInputs(s, 0, str(s), (0, 1), "RandomSampler") for s in STEPS)
        evidence = with_events(
            job(2), loss=lambda rank: tuple({"step": s, "loss": losses[rank]} for s in STEPS)
        )
        ranks = {
            rank: replace(seen, laws=replace(seen.laws or RankLaws(), inputs=inputs))
            for rank, seen in evidence.ranks.items()
        }
        of = diagnose(replace(evidence, ranks=ranks))
        assert of.verdict == verdict and bool(of.suspicious) is (verdict == "clean")

    @pytest.mark.parametrize(("parts", "verdict"), [((0, 0, 1, 1), "clean"),
                                                    ((0, 0, 0, 0), "wrong-gradients")])  # fmt: skip
    def test_ranks_of_one_part_may_divide_its_samples(
        self, parts: tuple[int, ...], verdict: str
    ) -> None:
        call = Collective(9, "world", 9, "all_to_all", 64, 64, "float32", "forward", step=2)

        def add(rank: int, laws: RankLaws) -> RankLaws:
            one = ModelInputs(1, 0, "", (0, 1, 2, 3), "DistributedSampler", 2, parts[rank])
            return replace(laws, inputs=tuple(
                replace(one, step=step, digest=f"{step} {parts[rank]}") for step in STEPS
            ))  # fmt: skip

        evidence = job(4)
        ranks = {
            rank: replace(seen, collectives=(*seen.collectives, call))
            for rank, seen in evidence.ranks.items()
        }
        assert with_laws(replace(evidence, ranks=ranks), add).verdict == verdict

    def test_random_states_that_part_later_hide_no_loader(self) -> None:
        """Rank 0 alone evaluates, which draws random numbers; one step or two may be a warm-up."""
        for until, verdict in ((4, "wrong-gradients"), (3, "clean")):
            own = lambda r, step, until=until: f"{step} {r * (step >= until)}"  # noqa: E731
            of = self.found(own, sampler="RandomSampler")
            assert of.verdict == verdict and ("In the first compared" in of.cause) is (until == 4)

    def test_ranks_that_split_each_sample_in_the_forward_may_have_the_same(self) -> None:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            inputs = (ModelInputs(step, 0, str(step), (0, 1), "RandomSampler") for step in STEPS)
            return replace(laws, inputs=tuple(inputs))

        split = Collective(9, "world", 9, "all_to_all", 64, 64, "float32", "forward", step=2)
        evidence = job(2)
        ranks = {
            rank: replace(seen, collectives=(*seen.collectives, split))
            for rank, seen in evidence.ranks.items()
        }
        of = with_laws(replace(evidence, ranks=ranks), add)
        assert of.verdict == "clean" and "RandomSampler" in of.suspicious[0]

    @pytest.mark.parametrize(
        ("op", "phase"),
        [("all_reduce", "other"), ("all_reduce", "forward"), ("reduce_scatter", "optimizer")],
    )
    def test_ranks_that_add_up_gradients_themselves(self, op: str, phase: str) -> None:
        """Not ranks that communicate in the forward, as parts of one model do."""

        def add(rank: int, laws: RankLaws) -> RankLaws:
            inputs = (ModelInputs(step, 0, str(step), (), "RandomSampler") for step in STEPS)
            return replace(laws, inputs=tuple(inputs))

        calls = tuple(
            Collective(at, "world", at, op, 64, 64, "float32", phase, step=step)
            for at, step in enumerate(STEPS)
        )
        evidence = job(2, how=PLAIN)
        ranks = {r: replace(seen, collectives=calls) for r, seen in evidence.ranks.items()}
        of = with_laws(replace(evidence, ranks=ranks), add)
        assert of.verdict == ("clean" if phase == "forward" else "wrong-gradients")

    @pytest.mark.parametrize("axis", ["dp", "tp"])
    def test_ranks_of_a_group_that_does_not_communicate_in_the_forward(self, axis: str) -> None:
        """Parallelism by hand: parts of one layer have the same samples, replicas have not."""

        def add(rank: int, laws: RankLaws) -> RankLaws:
            pair = rank % 2 if axis == "dp" else rank // 2
            inputs = (ModelInputs(step, 0, f"{step} {pair}", ()) for step in STEPS)
            return replace(laws, inputs=tuple(inputs))

        def call(at: int, group: str, phase: str, step: int) -> Collective:
            return Collective(at, group, at, "all_reduce", 64, 64, "float32", phase, step=step)

        evidence, ranks = job(4, how=PLAIN), {}
        for rank, seen in evidence.ranks.items():
            calls = [call(step, "dp", "backward", step) for step in STEPS]
            calls += [call(9 + step, "tp", "forward", step) for step in STEPS]
            dp, tp = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
            groups = {"dp": Group("dp", dp), "tp": Group("tp", tp)}
            ranks[rank] = replace(seen, collectives=tuple(calls), groups=groups)
        of = with_laws(replace(evidence, ranks=ranks), add)
        found = ["the model of ranks 0, 2 was called" in text for text in of.suspicious]
        assert found == [True] * (axis == "dp") and of.verdict == "clean"

    @pytest.mark.parametrize(
        ("sizes", "apart", "quiet"),
        [((64, 64), True, True), ((64, 48), True, False), ((64, 64), False, False)],
        ids=["divided layers", "other sizes", "whole layers"],
    )
    def test_ranks_that_divide_layers_beside_a_wrapper(
        self, sizes: tuple[int, int], apart: bool, quiet: bool
    ) -> None:
        """They have to work on the same samples."""

        def divided(rank: int, one: LawCheck) -> LawCheck:
            return replace(one, params=(*one.params[:-1], f"of {rank}")) if apart else one

        def add(rank: int, laws: RankLaws) -> RankLaws:
            return replace(laws, inputs=tuple(ModelInputs(s, 0, f"{s}", (0, 1)) for s in STEPS))

        calls = tuple(
            Collective(at, "tp", at, "all_reduce", size, size, "float32", phase, step=step)
            for at, step in enumerate(STEPS)
            for phase, size in zip(("forward", "backward"), sizes, strict=True)
        )
        evidence = job(2, divided, PLAIN)
        ranks = {r: replace(seen, collectives=calls) for r, seen in evidence.ranks.items()}
        found = with_laws(replace(evidence, ranks=ranks), add).suspicious
        assert any("was called with the same values" in text for text in found) is not quiet

    def test_the_same_samples_without_a_loader_are_suspicious(self) -> None:
        of = self.found(lambda rank, step: f"{max(rank, 1)} {step}", ranks=4)
        assert of.verdict == "clean"
        assert "the model of ranks 0, 1 was called" in of.suspicious[0]

    def test_the_same_part_of_a_distributed_sampler_is_a_failure(self) -> None:
        of = self.found(
            lambda _, step: str(step), sampler="DistributedSampler", replicas=2, number=0
        )
        assert of.verdict == "wrong-gradients"
        assert "for part 0 of 2" in of.cause

    def test_made_up_samples_are_a_note_about_themselves(self) -> None:
        """A benchmark calls the model with ones."""
        of = self.found(lambda _rank, _step: "ones")
        assert of.verdict == "clean"
        assert ["the same values in all checked steps" in note for note in of.notes] == [True]

    def test_a_rank_without_records_is_not_compared(self) -> None:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            inputs = tuple(ModelInputs(step, 0, str(step), (0, 1)) for step in STEPS)
            return replace(laws, inputs=inputs if rank == 0 else ())

        assert not with_laws(job(2), add).notes

    def test_an_order_that_came_twice_is_a_note(self) -> None:
        order = {"line": "train.py:3 main", "epoch": 0, "sampler": "DistributedSampler", "step": 9}
        of = with_laws(job(2), lambda _, laws: replace(laws, others={"same_order": (order,)}))
        assert of.verdict == "clean"
        assert "train.py:3 main gave ranks 0, 1 the same shuffled order" in of.notes[0]
        assert len(of.notes) == 1


LORA = ("base.lora_A.weight", "base.lora_B.weight", "head.weight")


class TestGradients:
    def found(
        self, grads: Callable[[LawCheck], tuple[str | None, ...]], ranks: int = 2
    ) -> Diagnosis:
        def change(_: int, check: LawCheck) -> LawCheck:
            return replace(check, grads=grads(check))

        return diagnose(job(ranks, change, PLAIN, names=LORA))

    @pytest.mark.parametrize(("value", "says"), [(NO_GRADIENT, "no"), (ZERO_GRADIENT, "only")])
    def test_a_parameter_that_never_trains_is_a_note(self, value: str, says: str) -> None:
        of = self.found(lambda check: (*check.grads[:2], value))
        assert of.verdict == "clean"
        assert "1 parameter of AdamW (head.weight) had " + says in of.notes[0]

    @pytest.mark.parametrize("other", [True, False])
    def test_an_optimizer_whose_parameters_never_have_a_gradient(self, other: bool) -> None:
        """While another one trains. Alone, it is the law of jobs without gradients."""

        def change(_: int, check: LawCheck) -> LawCheck:
            return replace(check, grads=(NO_GRADIENT,) * 3)

        evidence, busy = job(2, change, PLAIN, names=("a", "b", "c")), job(2, how=PLAIN)
        ranks = {}
        for rank, seen in evidence.ranks.items():
            own, more = seen.laws or RankLaws(), busy.ranks[rank].laws or RankLaws()
            checks = own.checks + tuple(replace(c, key="b") for c in more.checks if other)
            ranks[rank] = replace(seen, laws=replace(own, checks=checks))
        texts = diagnose(replace(evidence, ranks=ranks)).suspicious
        assert any("The updates train nothing" in text for text in texts) is other

    @pytest.mark.parametrize(
        ("modules", "steps", "found"),
        [(["head"], 3, True), (["hea"], 3, False), ([], 3, False), (["head"], 1, False)],
        ids=["without gradients", "another one", "with gradients", "seen once"],
    )
    def test_a_parameter_whose_module_runs_without_gradients_is_suspicious(
        self, modules: list[str], steps: int, found: bool
    ) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            return replace(check, grads=(*check.grads[:2], NO_GRADIENT))

        rows = tuple({"step": step, "modules": modules} for step in range(1, steps + 1))

        def of_rank(rank: int) -> Any:
            return rows if rank == 0 else rows[:1]

        of = diagnose(with_events(job(2, change, PLAIN, names=LORA), no_grad=of_rank))
        assert any("run without gradients" in text for text in of.suspicious) is found
        assert any("head.weight" in text for text in of.notes) is not found

    @pytest.mark.parametrize(
        ("lines", "later", "found"),
        [(("train.py:9 main",), False, True), (("train.py:9 main",), True, False),
         ((), False, False)],
        ids=["kept", "reduced from a later step on", "not told"],
    )  # fmt: skip
    def test_gradients_that_units_of_fsdp2_keep_are_a_failure(
        self, lines: tuple[str, ...], later: bool, found: bool
    ) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            return replace(check, grads=(NO_GRADIENT, *check.grads[1:]))

        rows = tuple({"step": 3, "line": line} for line in lines)
        evidence = with_events(job(2, change), unsent=rows)
        call = Collective(9, "world", 9, "all_reduce", 8, 8, "float32", step=20)
        ranks = {
            rank: replace(seen, no_gradient={6: ("net.weight",)}, collectives=(call,))
            for rank, seen in evidence.ranks.items()
        }
        of = diagnose(replace(evidence, ranks=ranks) if later else evidence)
        assert (of.verdict == "wrong-gradients") is found
        assert ("train.py:9 main: set_requires_gradient_sync(False)" in of.cause) is found

    @pytest.mark.parametrize(
        ("name", "value", "rest", "found"),
        [("mlp.gate.weight", ZERO_GRADIENT, "", True), ("gate.wg.weight", ZERO_GRADIENT, "", True),
         ("mlp.gate.weight", NO_GRADIENT, "", False), ("mlp.gate.weight", "some", "", False),
         ("mlp.gate_proj.weight", ZERO_GRADIENT, "", False),
         ("mlp.gate.weight", ZERO_GRADIENT, ZERO_GRADIENT, False)],
        ids=["zero", "inside", "none", "some", "no router", "all are zero"],
    )  # fmt: skip
    def test_a_router_with_gradients_of_zeros_is_suspicious(
        self, name: str, value: str, rest: str, found: bool
    ) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            others = (rest, rest) if rest else check.grads[:2]
            return replace(check, grads=(*others, value))

        of = diagnose(job(2, change, PLAIN, names=("mlp.a", "mlp.b", name)))
        assert any("router weight" in text for text in of.suspicious) is found

    @pytest.mark.parametrize("beside", ["mlp.experts.0.weight", "mlp.fc1.weight"])
    def test_a_router_without_gradients_beside_experts_is_suspicious(self, beside: str) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            return replace(check, grads=(check.grads[0], NO_GRADIENT))

        of = diagnose(job(2, change, PLAIN, names=(beside, "mlp.router.weight")))
        found = any("router weight" in text for text in of.suspicious)
        assert found is ("experts" in beside)

    @pytest.mark.parametrize("kept", [0, 1])
    def test_gradients_of_zeros_in_all_parameters_are_suspicious(self, kept: int) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            zeros = (ZERO_GRADIENT,) * len(check.grads)
            return replace(check, grads=check.grads[:kept] + zeros[kept:])

        of = diagnose(job(2, change, PLAIN))
        assert any("The updates train nothing" in text for text in of.suspicious) is (kept == 0)

    @pytest.mark.parametrize("value", [NO_GRADIENT, ZERO_GRADIENT])
    def test_adapters_that_never_train_are_a_failure(self, value: str) -> None:
        of = self.found(lambda check: (value, value, check.grads[2]))
        assert of.verdict == "wrong-gradients"
        assert "base.{lora_A,lora_B}.weight" in of.cause

    def test_adapters_may_train_after_the_last_checked_step(self) -> None:
        """The head trains alone first."""
        evidence = job(
            2, lambda _, one: replace(one, grads=("", "", one.grads[2])), PLAIN, names=LORA
        )
        for last, verdict in ((20, "clean"), (6, "wrong-gradients")):
            call = Collective(9, "world", 9, "all_reduce", 8, 8, "float32", step=last)
            ranks = {
                rank: replace(seen, no_gradient={6: LORA[:2]}, collectives=(call,))
                for rank, seen in evidence.ranks.items()
            }
            assert diagnose(replace(evidence, ranks=ranks)).verdict == verdict

    def test_the_first_gradient_of_one_half_of_an_adapter_is_zero(self) -> None:
        """The other half starts at zero."""
        of = self.found(
            lambda check: (ZERO_GRADIENT, *check.grads[1:]) if check.step == 1 else check.grads
        )
        assert (of.verdict, of.notes) == ("clean", ())

    def test_frozen_parameters_are_unknown(self) -> None:
        of = self.found(lambda check: (None, None, check.grads[2]))
        assert (of.verdict, of.notes) == ("clean", ())

    def still(self, updated: Sequence[int] = (), names: int = 1) -> Diagnosis:
        """The first ``names`` parameters never change between checks; the update itself changed
        net.weight in the steps ``updated``."""

        def change(_: int, check: LawCheck) -> LawCheck:
            return replace(check, params=(*("same", "same")[:names], *check.params[names:]))

        events = tuple({"step": step, "names": ["net.weight"]} for step in updated)
        return diagnose(with_events(job(2, change), updated=events))

    def test_updates_that_round_to_nothing_are_suspicious(self) -> None:
        of = self.still()
        assert of.verdict == "clean"
        assert "1 parameter (net.weight) did not change" in of.suspicious[0]

    def test_a_bias_before_a_normalisation_is_healthy(self) -> None:
        """Its gradient is a rounding error, and the weight of its layer moves."""
        of = diagnose(job(2, lambda _, check: replace(check, params=(check.params[0], "same"))))
        assert (of.verdict, of.suspicious) == ("clean", ())

    def test_an_update_that_is_undone_is_a_failure(self) -> None:
        of = self.still((2, 3))
        assert of.verdict == "wrong-weights"
        assert "before each next update it had the first value again" in of.cause

    @pytest.mark.parametrize(("shape", "value"), [("", "same"), ("8", "same"), ("8x8", "40")])
    def test_what_a_bound_or_a_mask_puts_back_is_suspicious(self, shape: str, value: str) -> None:
        """A scale at its bound; a matrix of which everything is pruned."""

        def change(_: int, one: LawCheck) -> LawCheck:
            pieces = (replace(one.pieces[0], shape=shape), *one.pieces[1:])
            return replace(one, pieces=pieces, params=(value, *one.params[1:]))

        events = tuple({"step": step, "names": ["net.weight"]} for step in (2, 3))
        of = diagnose(with_events(job(2, change), updated=events))
        assert of.verdict == "clean" and "bounds or masks it" in of.suspicious[0]

    @pytest.mark.parametrize("change", [{"updated": (2,)}, {"updated": (2, 3), "names": 2}])
    def test_a_model_that_is_set_back_as_a_whole_is_no_failure(
        self, change: dict[str, Any]
    ) -> None:
        """Meta-learning begins each task with the same weights."""
        assert self.still(**change).verdict == "clean"

    def copied(self, copies: bool = True, still: int = 1) -> Diagnosis:
        """A model whose first ``still`` parameters keep their values; its optimizer has copies."""

        def change(_: int, check: LawCheck) -> LawCheck:
            first = tuple(f"{piece.name}@1" for piece in check.pieces)
            of = dict(enumerate(check.params)) if copies else {}
            params = (*first[:still], *check.params[still:])
            return replace(check, optimizer="", params=params, copies=of, hyper=())

        return diagnose(job(2, change, PLAIN))

    def test_a_copy_that_is_never_copied_back_is_a_failure(self) -> None:
        of = self.copied()
        assert of.verdict == "wrong-weights"
        assert "copies of 1 parameter (net.weight), and the model kept the first value" in of.cause

    @pytest.mark.parametrize("change", [{"copies": False}, {"still": 0}, {"still": 2}])
    def test_copies_that_are_unknown_agree_or_are_of_another_model_are_not(
        self, change: dict[str, int]
    ) -> None:
        assert self.copied(**change).verdict == "clean"  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("rows", "broken"),
        [((("w",), (), ()), True), (((), (), ()), False), ((("w",), ("w",), ()), False),
         ((("w",), ()), False), ((None, ("w",), (), ()), False), ((), False)],
        ids=["overwritten", "equal", "written in each step", "few steps", "later", "unknown"],
    )  # fmt: skip
    def test_weights_that_the_first_update_overwrites(self, rows: Any, broken: bool) -> None:
        steps = zip((1, 2, 3, 6), rows, strict=False)
        events = [{"step": step, "apart": apart} for step, apart in steps if apart is not None]
        of = diagnose(with_events(job(2), copied=lambda rank: events if rank else [
            {**event, "apart": ()} for event in events]))  # fmt: skip
        assert of.verdict == ("wrong-weights" if broken else "clean")
        assert "1 parameter (w) had other values than DeepSpeed's" in of.cause or not broken

    def test_without_a_learning_rate_nothing_moves(self) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            return replace(check, params=("same", "same"), hyper=({"lr": "0.0"},))

        (note,) = diagnose(job(2, change)).notes
        assert note == (
            "The learning rate of AdamW was 0 in all checked steps: its updates change nothing."
        )

    @pytest.mark.parametrize(
        ("since", "moves", "found"),
        [(3, False, True), (6, False, False), (3, True, False)],
        ids=["half of it", "its last step", "cycles"],
    )
    def test_a_schedule_that_ends_too_early(self, since: int, moves: bool, found: bool) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            over = check.step >= since
            kept = ("kept",) * len(check.params) if over and not moves else check.params
            return replace(check, params=kept, hyper=({"lr": "0.0" if over else "0.1"},))

        texts = diagnose(job(2, change)).suspicious
        assert len(texts) == found
        assert not found or f"is 0 from step {since} (of 6 or more)" in texts[0]

    @pytest.mark.parametrize(
        ("rates", "zeros", "found"),
        [((4, 3, 2, 0), 3, True), ((4, 3, 2, 0), 2, False), ((4, 4, 4, 0), 3, False),
         ((4, 3, 2, 1), 0, False), ((4, 3, 2, 0), 0, False)],
        ids=["three updates", "two", "switched off", "not yet", "not counted"],
    )  # fmt: skip
    def test_a_rate_that_falls_to_zero_before_the_end(
        self, rates: tuple[int, ...], zeros: int, found: bool
    ) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            lr = f"{rates[(1, 2, 3, 6).index(check.step)]}.0"
            counted = zeros if check.step == 6 else 0
            return replace(check, hyper=({"lr": lr},), zero_rates=counted)

        texts = diagnose(job(2, change)).suspicious
        assert [f"is 0 from step {7 - zeros} (of 6" in text for text in texts] == [True] * found

    def test_a_warm_up_from_zero_is_no_note(self) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            return replace(check, hyper=({"lr": "0.0" if check.step < 3 else "0.1"},))

        assert not diagnose(job(2, change)).notes


class TestNotFinite:
    def found(self, since: int) -> Diagnosis:
        def change(_: int, check: LawCheck) -> LawCheck:
            bad = ("net.weight",) if check.step >= since else ()
            grads = ("net.bias",) if check.step == 2 else ()
            return replace(check, nonfinite=bad, nonfinite_grads=grads)

        return diagnose(job(2, change))

    def test_a_parameter_that_becomes_nan_is_a_failure(self) -> None:
        of = self.found(3)
        assert (of.verdict, of.culprits) == ("nonfinite", ())
        assert "in step 2 they were finite" in of.cause
        assert "the gradient of net.bias was not finite" in of.cause

    def test_a_parameter_that_starts_so_may_be_meant(self) -> None:
        of = self.found(1)
        assert of.verdict == "clean"
        assert "Before the first update, net.weight had elements that are not finite" in of.notes[0]

    def test_one_that_was_never_initialised_makes_others_nan(self) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            bad = ("net.weight", "net.bias") if check.step > 1 else ("net.bias",)
            return replace(check, nonfinite=bad, nonfinite_grads=bad)

        of = diagnose(job(2, change))
        assert of.verdict == "nonfinite"
        assert "net.weight had elements" in of.cause
        assert "net.bias had elements that are not finite before that" in of.cause

    def test_one_whose_gradients_stay_finite_may_be_meant(self) -> None:
        """A pruned expert: its router's bias is set to -inf."""

        def change(_: int, check: LawCheck) -> LawCheck:
            return replace(check, nonfinite=("net.bias",) if check.step > 2 else ())

        of = diagnose(job(2, change))
        assert of.verdict == "clean" and "net.bias had elements" in of.suspicious[0]

    def test_a_scaler_that_overflows_once_changes_nothing(self) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            over = ("net.weight",) if check.step == 3 else ()
            bad = ("net.bias",) if check.step > 2 else ()
            return replace(check, nonfinite=bad, nonfinite_grads=over)

        of = diagnose(job(2, change))
        assert of.verdict == "clean" and "net.bias had elements" in of.suspicious[0]

    def test_without_gradients_nothing_says_that_it_is_meant(self) -> None:
        def change(_: int, check: LawCheck) -> LawCheck:
            bad = ("net.bias",) if check.step > 2 else ()
            return replace(check, nonfinite=bad, grads=(None, None))

        assert diagnose(job(2, change)).verdict == "nonfinite"

    def test_a_gradient_alone_may_be_skipped(self) -> None:
        assert self.found(9).verdict == "clean"


class TestNorms:
    def found(self, *norms: float, how: str = PART, most: float = 1.0) -> Diagnosis:
        evidence = job(len(norms), how=PLAIN)

        def add(rank: int, laws: RankLaws) -> RankLaws:
            part = f"shard {rank} of {len(norms)}" if how == PART else ""
            checks = tuple(
                replace(c, pieces=(LawPiece("flat", part, how, tuple(range(len(norms)))),),
                        params=c.params[:1], grads=c.grads[:1], state={})
                for c in laws.checks
            )  # fmt: skip
            norm = ClipNorm(2, ("flat",), norms[rank], most, "train.py:8 main")
            return replace(laws, checks=checks, norms=(norm,))

        return with_laws(evidence, add)

    def test_norms_of_shards_that_differ_are_a_failure(self) -> None:
        of = self.found(3.0, 4.0)
        assert of.verdict == "wrong-gradients"
        assert "3 on rank 0, 4 on rank 1" in of.cause
        assert "train.py:8 main" in of.cause

    def test_equal_norms_are_clean(self) -> None:
        assert self.found(3.0, 3.0).verdict == "clean"

    def test_norms_that_clip_nothing_are_clean(self) -> None:
        assert self.found(3.0, 4.0, most=float("inf")).verdict == "clean"

    def test_norms_of_plain_parameters_may_differ(self) -> None:
        """Pipeline stages."""
        assert self.found(3.0, 4.0, how=PLAIN).verdict == "clean"
