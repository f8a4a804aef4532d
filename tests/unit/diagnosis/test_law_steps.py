"""Laws of what a step computes, on recorded data: weights of tokens, reductions by hand, clipping
before them, recomputation, layers, embeddings, rounding, left-out updates, ties, loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.law_model import (
    PART,
    PLAIN,
    REDUCED,
    Cleared,
    ClipNorm,
    LawCheck,
    ModelInputs,
    ModelState,
    RankLaws,
    Shard,
)
from moediag.evidence.model import Collective, Evidence
from moediag.result import Diagnosis
from tests.unit.law_evidence import NAMES, STEPS, job, other, with_events

Events = tuple[Mapping[str, Any], ...]


def with_laws(evidence: Evidence, add: Callable[[int, RankLaws], RankLaws]) -> Evidence:
    ranks = {
        rank: replace(seen, laws=add(rank, seen.laws or RankLaws()))
        for rank, seen in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)


def plain(ranks: int = 2, change: Any = None) -> Evidence:
    """A job whose parameters no wrapper keeps equal."""

    def alone(rank: int, one: LawCheck) -> LawCheck:
        pieces = tuple(replace(piece, ranks=()) for piece in one.pieces)
        own = replace(one, pieces=pieces, clocks=())
        return change(rank, own) if change else own

    return job(ranks, alone, PLAIN)


# ------------------------------------------------------------------------ numbers of each rank


@pytest.mark.parametrize(
    ("odd", "used", "found"),
    [(STEPS, [1.0, 4.0], True), (STEPS, [2.0, 8.0], False), (STEPS, [1.0, 3.0], False),
     (STEPS[:1], [1.0, 4.0], False), ((), [1.0, 4.0], False)],
    ids=["other numbers", "one number", "no number", "in one step", "not recorded on one rank"],
)  # fmt: skip
def test_shards_that_each_rank_multiplies_by_a_number_of_its_own(
    odd: Sequence[int], used: list[float], found: bool
) -> None:
    made = [2.0, 8.0]

    def rescaled(rank: int) -> Events:
        steps = () if rank and not odd else STEPS
        return tuple(
            {
                "step": step,
                "ranks": [0, 1],
                "made": made,
                "used": used if rank and step in odd else made,
            }
            for step in steps
        )

    of = diagnose(with_events(job(2, how=PART), rescaled=rescaled))
    told = [text for text in of.suspicious if "--allow local-norms" in text]
    assert bool(told) == found
    assert not found or "(1 on rank 0, 0.5 on rank 1 in step 1)" in told[0]


@pytest.mark.parametrize(
    ("units", "found"),
    [
        ([["emb.weight", 1.0, True], ["block.weight", 2, False]], True),
        ([["emb.weight", 1.0, True], ["block.weight", 1.0, True]], False),
        ([["emb.weight", 4, False], ["experts.weight", 4.0, True]], False),
        ([["emb.weight", 4, False], ["experts.weight", 2, False]], False),
        ([], False),
    ],
    ids=["some", "all", "as the others", "another mesh", "not recorded"],
)
def test_units_of_fsdp2_that_divide_by_another_number(units: list[Any], found: bool) -> None:
    of = diagnose(with_events(job(2, how=PART), divisors=({"step": 2, "units": units},)))
    assert bool(of.suspicious) == found
    assert not found or "by 1 those of the units with emb.weight; by 2" in of.suspicious[0]


# ------------------------------------------------------------------------ weights of tokens


def losses(*counts: int, total: float = 1.0, direct: bool = True, per: int = 1) -> Events:
    """In each step a backward for each count, with so many equal cross entropies."""
    of = [
        [count, 16, 50, total / per, total / count / per, total / count / per] for count in counts
    ]
    rows = [{"direct": direct, "of": [one] * per} for one in of]
    return tuple({"step": step, "backwards": rows} for step in STEPS)


@pytest.mark.parametrize(
    ("rests", "found"),
    [
        ([0.02, 0.03, 0.01, 0.05], True),
        ([0.02, 0.02, 0.02, 0.02], False),
        ([0.02, 0.03, 0.0, 0.05], False),
        ([1e-6, 2e-6, -1e-6, 3e-6], False),
        ([0.02, 0.03], False),
        ([], False),
    ],
    ids=["changes", "constant", "at times", "rounding", "few steps", "unknown"],
)
def test_a_part_of_the_loss_without_a_gradient(rests: list[float], found: bool) -> None:
    events = tuple(
        {**event, "backwards": [{**event["backwards"][0], "rest": [2.0, rest]}]}
        for event, rest in zip(losses(16), rests, strict=False)
    )
    of = diagnose(with_events(job(2), losses=events))
    assert bool(of.suspicious) == found
    assert not found or "(0.02 of 2 in step 1, 0.03 of 2 in step 2" in of.suspicious[0]


class TestMicroBatches:
    def found(self, *counts: int, **more: Any) -> tuple[str, ...]:
        return diagnose(with_events(job(1), losses=losses(*counts, **more))).suspicious

    def test_means_of_unequal_micro_batches_are_suspicious(self) -> None:
        (text,) = self.found(12, 4, total=0.5)
        assert "4 to 12 target tokens" in text and "3 times as much as another one" in text
        assert "--allow micro-batches-unequal" in text

    @pytest.mark.parametrize("counts", [(12, 8), (18, 9)], ids=["padding", "few masked tokens"])
    def test_small_differences_and_those_by_chance_are_notes(self, counts: tuple[int, int]) -> None:
        of = diagnose(with_events(job(1), losses=losses(*counts)))
        assert not of.suspicious and f"{counts[1]} to {counts[0]} target tokens" in of.notes[0]

    @pytest.mark.parametrize("counts", [(12, 12), (12, 10), (12,)])
    def test_micro_batches_of_about_the_same_size(self, counts: tuple[int, ...]) -> None:
        assert not self.found(*counts)

    @pytest.mark.parametrize("more", [{"direct": False}, {"per": 2}])
    def test_other_losses_say_nothing(self, more: dict[str, Any]) -> None:
        """An auxiliary loss, or two heads that one backward trains."""
        assert not self.found(12, 4, **more)

    def test_tokens_that_count_the_same(self) -> None:
        rows = [{"direct": True, "of": [[n, 16, 50, n / 16, 1 / 16, 1 / 16]]} for n in (12, 4)]
        events = tuple({"step": step, "backwards": rows} for step in STEPS)
        assert not diagnose(with_events(job(1), losses=events)).suspicious


MATRICES = ("a.weight", "b.weight", "c.weight", "d.weight")


def gradients(
    rank: int, factor: float = 0.5, used: Callable[[str, int], Any] = lambda name, step: None
) -> Events:
    """Gradients that are added up over two ranks and multiplied; ``used`` of a name and step
    replaces one."""

    def made(step: int, of: int) -> list[list[float]]:
        return [[(1 + at) * step + of, 9.0] for at in range(len(MATRICES))]

    events = []
    for step in STEPS:
        rows = []
        for at, name in enumerate(MATRICES):
            total = factor * (made(step, 0)[at][0] + made(step, 1)[at][0])
            rows.append(used(name, step) or [total, 9.0])
        events.append({"step": step, "names": MATRICES, "made": made(step, rank), "used": rows})
    return tuple(events)


class TestScale:
    def found(
        self, factor: float, total: float = 1.0, evidence: Evidence | None = None, **more: Any
    ) -> tuple[str, ...]:
        of = {
            "own_gradients": lambda rank: gradients(rank, factor),
            "losses": losses(8, total=total),
        }
        return diagnose(with_events(evidence or plain(), **{**of, **more})).suspicious

    def test_a_sum_in_place_of_a_mean_is_suspicious(self) -> None:
        (text,) = self.found(1.0)
        assert "add up to 2, not to 1" in text and "added up and not averaged" in text

    def test_one_division_too_many_is_suspicious(self) -> None:
        (text,) = self.found(0.5, total=0.5)
        assert "add up to 0.5" in text and "divided by the number of ranks once too often" in text

    def test_the_same_under_a_wrapper(self) -> None:
        (text,) = self.found(1.0, total=0.5, evidence=job(2), own_gradients=())
        assert "add up to 0.5" in text

    @pytest.mark.parametrize("changed", [1, -1])
    def test_gradients_that_are_divided_after_the_backward(self, changed: int) -> None:
        divided = tuple({**one, "changed": changed} for one in losses(8, total=0.5))
        assert not self.found(1.0, evidence=job(2), own_gradients=(), losses=divided)

    @pytest.mark.parametrize(("factor", "total"), [(0.5, 1.0), (1.0, 0.5), (1.0, 40.0)])
    def test_a_mean_and_a_sum_over_tokens(self, factor: float, total: float) -> None:
        assert not self.found(factor, total)

    @pytest.mark.parametrize(
        "more",
        [{"losses": ()}, {"own_gradients": ()}, {"losses": losses(8, direct=False)},
         {"losses": losses(8, 8, total=0.5, per=1) [:1]}],
    )  # fmt: skip
    def test_without_evidence(self, more: dict[str, Any]) -> None:
        assert not self.found(1.0, **more)

    @pytest.mark.parametrize(("backwards", "per"), [(1, 2), (2, 1), (2, 2)])
    def test_mean_losses_that_are_added_up(self, backwards: int, per: int) -> None:
        """Two images for each text, or parts of a batch with the features of all of it."""
        each = losses(*[8] * backwards, total=2 / backwards, per=per)
        assert not self.found(0.5, losses=each)

    def test_clipping_is_no_scale(self) -> None:
        def add(_: int, laws: RankLaws) -> RankLaws:
            return replace(laws, norms=tuple(ClipNorm(s, MATRICES, 2.0, 1.0) for s in STEPS))

        assert not self.found(0.25, evidence=with_laws(plain(), add))

    @pytest.mark.parametrize(
        ("total", "added", "why"),
        [(1.0, True, "not divided by their number"), (0.25, True, "their number once too often"),
         (0.5, True, ""), (1.0, False, ""), (2.0, True, "but multiplied by that of ranks"),
         (2.0, False, "")],
    )  # fmt: skip
    def test_micro_batches_are_not_taken_for_ranks(
        self, total: float, added: bool, why: str
    ) -> None:
        """Two ranks and two micro-batches. SAM clears what its first backward made."""
        rows = ({**row, "added": added} for step in losses(8, 8, total=total) for row in [step])
        events = tuple(
            {**row, "backwards": [{**one, "added": added} for one in row["backwards"]]}
            for row in rows
        )
        found = self.found(0.5, losses=events)
        assert [why in text and "2 micro-batches" in text for text in found] == [True] * bool(why)

    def test_clipping_under_a_wrapper_hides_no_scale(self) -> None:
        def add(_: int, laws: RankLaws) -> RankLaws:
            return replace(laws, norms=tuple(ClipNorm(s, MATRICES, 2.0, 1.0) for s in STEPS))

        assert self.found(0, total=0.5, evidence=with_laws(job(2), add), own_gradients=())

    @pytest.mark.parametrize("mean", [(0, 1), ()])
    def test_micro_batches_under_fsdp_or_deepspeed(self, mean: tuple[int, ...]) -> None:
        events = micro_batches(True, mean=mean)
        found = self.found(0, evidence=plain(), own_gradients=(), losses=events)
        assert ["not divided by their number" in text for text in found] == [True] * len(mean[:1])

    @pytest.mark.parametrize(
        ("total", "sends", "found"), [(1.0, True, True), (0.5, True, False), (1.0, False, False)]
    )
    def test_the_last_stage_of_a_pipeline(self, total: float, sends: bool, found: bool) -> None:
        evidence = plain()
        call = Collective(8, "world", 8, "send", 64, 64, "float32", step=2, peer=1)
        first = replace(evidence.ranks[0], collectives=(call,) if sends else ())
        found_in = self.found(
            0, evidence=replace(evidence, ranks={**evidence.ranks, 0: first}), own_gradients=(),
            losses=lambda rank: micro_batches(True, total) if rank else (),
        )  # fmt: skip
        assert any("not divided by their number" in text for text in found_in) is found

    @pytest.mark.parametrize(
        ("factor", "mean", "op"),
        [(1.0, 1.0, "all_reduce"), (0.5, 1.0, ""), (1.0, 0.5, ""), (1.0, 1.0, "all_gather"),
         (0.25, -1.0, "all_reduce"), (0.25, 0.5, ""), (0.3, 1.0, ""), (1 / 64, 1.0, "")],
    )  # fmt: skip
    def test_means_that_are_added_up(self, factor: float, mean: float, op: str) -> None:
        """Ranks that gather features may add up parts of a common loss; the sum of a loss may be
        divided by any number of samples."""
        rows = [{"direct": False, "of": [], "means": [2.0, mean]}]
        events = tuple({"step": step, "backwards": rows} for step in STEPS)
        call = Collective(8, "world", 8, op, 256, 512, "float32", step=2, phase="other")
        evidence = plain()
        of = {r: replace(s, collectives=(*s.collectives, call)) for r, s in evidence.ranks.items()}
        evidence = replace(evidence, ranks=of) if op else evidence
        found = self.found(factor, evidence=evidence, losses=events)
        told = "divided by 4" if factor < 1 else "divided neither before nor after"
        assert [told in text for text in found] == [True] * (op == "all_reduce")

    @pytest.mark.parametrize(
        ("means", "changed", "calls", "added", "found"),
        [([[1.0], [1.0]], 0, [False, True], True, True),
         ([[0.5], [0.5]], 0, [False, True], True, False),
         ([[1.0], [1.0]], 1, [False, True], True, False),
         ([[1.0], [1.0]], 0, [True, True], True, False),
         ([[1.0], [1.0]], 0, [False, True], False, False),
         ([[1.0], [1.0, 2.0]], 0, [False, True], True, False), ([[1.0]], 0, [True], True, False)],
        ids=["added", "divided", "divided later", "two tasks", "SAM", "other losses", "one"],
    )  # fmt: skip
    def test_means_of_micro_batches_that_are_added_up(
        self, means: list[list[float]], changed: int, calls: list[bool], added: bool, found: bool
    ) -> None:
        rows = [{"direct": False, "of": [], "means": of, "added": added} for of in means]
        events = tuple({"step": s, "changed": changed, "backwards": rows} for s in STEPS)
        unsynced = tuple({"step": step, "calls": calls} for step in STEPS)
        more = {"own_gradients": (), "losses": events, "unsynced": unsynced}
        plainly = job(2, lambda _, check: replace(check, optimizer="SGD"))
        texts = self.found(0, evidence=plainly, **more)
        assert any("are 2 times those of the mean over all" in text for text in texts) == found
        assert not self.found(0, evidence=job(2), **more), "AdamW divides by the size of gradients"
        assert not self.found(0, evidence=plain(), **more)


def micro_batches(added: bool, total: float = 1.0, mean: Sequence[int] = ()) -> Events:
    """Two in each step."""
    events = losses(8, 8, total=total)
    rows = [[{**one, "added": added} for one in event["backwards"]] for event in events]
    return tuple(
        {**event, "backwards": of, "mean": mean} for event, of in zip(events, rows, strict=True)
    )


def gathering(evidence: Evidence, numel: int = 128, **more: Any) -> Evidence:
    """Each rank gathers so many elements in the forward of each step."""
    calls = tuple(
        Collective(
            at, "world", at, "all_gather", numel, 2 * numel, "float32",
            **{"phase": "forward", "step": step, **more},
        )
        for at, step in enumerate(STEPS)
    )  # fmt: skip
    ranks = {r: replace(seen, collectives=calls) for r, seen in evidence.ranks.items()}
    return replace(evidence, ranks=ranks)


class TestContrast:
    """Each rank compares 16 samples with those that both ranks gathered."""

    @pytest.mark.parametrize(
        ("more", "found"), [({}, False), ({"numel": 8}, True), ({"parameters": ("a",)}, True)]
    )
    def test_a_loss_of_what_all_ranks_gathered(self, more: Any, found: bool) -> None:
        """All ranks have the same loss, and each the gradients of its part: times their number, the
        mean is right."""
        evidence = with_events(job(2), losses=losses(8, total=2.0))
        assert bool(diagnose(gathering(evidence, **more)).suspicious) == found


class TestParts:
    """Context parallelism: each rank has half of each sequence."""

    def found(self, counts: Sequence[int] = (12, 4), numel: int = 128, **more: Any) -> Any:
        of = {
            "own_gradients": lambda rank: gradients(rank, 1.0),
            "losses": lambda rank: losses(counts[rank], total=0.5),
        }
        return diagnose(gathering(with_events(plain(), **{**of, **more}), numel)).suspicious

    def test_own_means_are_suspicious(self) -> None:
        (text,) = self.found()
        assert "(12 on rank 0, 4 on rank 1)" in text and "3 times as much" in text

    @pytest.mark.parametrize(
        "more", [{"counts": (8, 8)}, {"numel": 8}, {"own_gradients": ()}, {"losses": ()}]
    )
    def test_equal_counts_other_gathers_and_missing_evidence(self, more: dict[str, Any]) -> None:
        """A batch norm gathers a few numbers."""
        assert not self.found(**more)


# ------------------------------------------------------------------------ gradients


class TestStale:
    def found(self, used: Callable[[str, int], Any], **more: Any) -> Diagnosis:
        of = {"own_gradients": lambda rank: gradients(rank, 0.5, used)}
        return diagnose(with_events(plain(), **{**of, **more}))

    def test_a_gradient_that_never_changes_is_a_failure(self) -> None:
        of = self.found(lambda name, step: [3.3, 9.0] if name == "b.weight" else None)
        assert of.verdict == "wrong-gradients" and "1 parameter (b.weight)" in of.cause

    def test_the_gradient_of_the_step_before_is_suspicious(self) -> None:
        """Some reduce a large matrix while the next step runs."""

        def late(name: str, step: int) -> Any:
            first = {1: [7.7, 9.0], 6: [0.2, 9.0]}  # nothing was recorded of the steps before
            before = 0.5 * (2 * 2 * (step - 1) + 1)
            return first.get(step, [before, 9.0]) if name == "b.weight" else None

        of = self.found(late)
        assert of.verdict == "clean" and "1 parameter (b.weight)" in of.suspicious[0]

    def test_rows_that_a_program_masks_are_no_failure(self) -> None:
        other = lambda name, step: [0.1 * step, 5.0] if name == "b.weight" else None  # noqa: E731
        assert self.found(other).verdict == "clean"

    def test_healthy_and_without_evidence(self) -> None:
        still = lambda name, step: [3.3, 9.0] if name == "b.weight" else None  # noqa: E731
        assert self.found(lambda name, step: None).verdict == "clean"
        assert self.found(still, own_gradients=()).verdict == "clean"
        of_one = lambda rank: () if rank else gradients(rank, 0.5, still)  # noqa: E731
        assert self.found(still, own_gradients=of_one).verdict == "clean"


@pytest.mark.parametrize("seen", [True, False])
def test_a_parameter_that_is_left_out_of_a_reduction(seen: bool) -> None:
    """What differs between ranks has a reason, if it was seen."""

    def own(rank: int) -> Events:
        used = lambda name, step: [2.0 * step + rank, 9.0] if name == "b.weight" else None  # noqa: E731
        return gradients(rank, 0.5, used) if seen else ()

    def change(rank: int, one: LawCheck) -> LawCheck:
        pieces = tuple(replace(piece, ranks=()) for piece in one.pieces)
        apart = other(one.params, rank)[1:2] if one.step > 1 else one.params[1:2]
        params = (one.params[0], *apart, *one.params[2:])
        return replace(one, pieces=pieces, params=params, clocks=())

    evidence = with_events(job(2, change, PLAIN, names=MATRICES), own_gradients=own)
    (text,) = diagnose(evidence).suspicious
    assert "1 parameter (b.weight) differ" in text
    assert ("and those of b.weight are not" in text) == seen


class TestOneWay:
    """Experts whose tokens come and go by calls without a backward."""

    def found(self, phases: Sequence[str], gradient: str = "") -> tuple[str, ...]:
        calls = tuple(
            Collective(
                index=at, group="world", position=at, op="all_to_all", phase=phase, step=step,
                dtype="float32", numel_in=64, numel_out=64, site="moe.py:8 forward",
            )
            for step in STEPS
            for at, phase in enumerate(phases)
        )  # fmt: skip
        evidence = plain(change=lambda _, one: replace(one, grads=(gradient, one.grads[1])))
        ranks = {r: replace(seen, collectives=calls) for r, seen in evidence.ranks.items()}
        return diagnose(replace(evidence, ranks=ranks)).suspicious

    def test_experts_without_gradients_are_suspicious(self) -> None:
        (text,) = self.found(["forward"])
        assert "1 parameter (net.weight) had no gradient" in text and "moe.py:8 forward" in text

    def test_an_exchange_with_a_backward_other_parameters_and_no_exchange(self) -> None:
        assert not self.found(["forward", "backward"])
        assert not self.found(["forward"], gradient="g")
        assert not self.found([])


class TestReducedAgain:
    """Sums of all gradients that a wrapper has averaged already."""

    def found(self, sizes: Sequence[int], phase: str = "other", how: str = REDUCED) -> Any:
        calls = tuple(
            Collective(
                index=at, group="world", position=at, op="all_reduce", phase=phase, step=step,
                dtype="float32", numel_in=size, numel_out=size, site="train.py:8 main",
            )
            for step in (1, 2, 3, 4)
            for at, size in enumerate(sizes)
        )  # fmt: skip
        evidence = job(2, how=how, names=MATRICES)
        ranks = {r: replace(seen, collectives=calls) for r, seen in evidence.ranks.items()}
        return diagnose(replace(evidence, ranks=ranks)).suspicious

    def test_sums_of_the_sizes_of_all_matrices_are_suspicious(self) -> None:
        (text,) = self.found([64] * 4)
        assert "the sizes of 4 parameters over all ranks at train.py:8 main" in text

    def test_other_sizes_the_wrapper_itself_and_no_wrapper(self) -> None:
        assert not self.found([64] * 3)
        assert not self.found([64] * 4, phase="backward")
        assert not self.found([64] * 4, how=PLAIN)


class TestStartsApart:
    def found(self, apart: Sequence[str], **more: Any) -> Diagnosis:
        def change(rank: int, one: LawCheck) -> LawCheck:
            values = zip(one.pieces, one.params, strict=True)
            params = tuple(f"{v}{rank if p.name in apart else ''}" for p, v in values)
            pieces = tuple(replace(piece, ranks=()) for piece in one.pieces)
            return replace(one, pieces=pieces, params=params, grads=one.params, clocks=())

        evidence = job(2, change, PLAIN, names=MATRICES)
        return diagnose(with_events(evidence, **{"own_gradients": gradients, **more}))

    def test_models_that_begin_apart_and_add_up_gradients_are_suspicious(self) -> None:
        (text,) = self.found(MATRICES).suspicious
        assert "4 parameters ({a,b,c,d}.weight) began with different values on each rank" in text

    @pytest.mark.parametrize(
        ("sharded", "reduced", "how", "found"),
        [(True, False, PART, True), (False, False, PART, False), (True, True, PART, False),
         (True, False, REDUCED, False)],
        ids=["made later", "made before", "reduced by hand", "beside another wrapper"],
    )  # fmt: skip
    def test_a_layer_that_is_made_after_fsdp_sharded_the_model(
        self, sharded: bool, reduced: bool, how: str, found: bool
    ) -> None:
        def change(rank: int, one: LawCheck) -> LawCheck:
            first, *others = one.pieces
            pieces = replace(first, how=PLAIN, ranks=()), *(replace(p, how=how) for p in others)
            own = f"{one.params[0]} of {rank}", *one.params[1:]
            return replace(one, pieces=pieces, params=own, grads=one.params if reduced else own)

        def add(_: int, laws: RankLaws) -> RankLaws:
            whole = {name: Shard(1, "w", False, True) for name in MATRICES if sharded}
            return replace(laws, shards=whole)

        of = diagnose(with_laws(job(2, change, names=MATRICES), add))
        assert (of.verdict == "replica-divergence") is found
        assert found is ("FSDP sharded 1 parameter (a.weight), and the optimizer" in of.cause)

    def test_parts_that_are_clipped_by_norms_of_their_own(self) -> None:
        """An actor and a critic: two factors."""

        def used(name: str, step: int) -> Any:
            at = MATRICES.index(name)
            return [0.1 * (2 * (1 + at) * step + 1), 9.0] if at > 1 else None

        own = lambda rank: gradients(rank, 0.5, used)  # noqa: E731
        assert self.found(MATRICES, own_gradients=own).suspicious

    @pytest.mark.parametrize("since", [2, 3])
    def test_models_that_the_first_update_makes_equal(self, since: int) -> None:
        """Local SGD averages them later."""

        def change(rank: int, one: LawCheck) -> LawCheck:
            apart = one.step < since
            return replace(one, params=other(one.params, rank) if apart else one.params)

        found = diagnose(plain(change=change)).suspicious
        assert ["after the first update they are equal" in t for t in found] == [True] * (since < 3)

    @pytest.mark.parametrize(
        ("names", "wrapped", "op", "grads", "told"),
        [
            (("experts.0.weight",), True, "all_to_all", "one", "add up gradients of different"),
            (("experts.0.weight",), False, "all_to_all", "one", "add up gradients of different"),
            (("experts.0.weight",), True, "all_gather", "one", ""),  # not exchanged
            (("experts.0.weight",), True, "all_to_all", "own", ""),
            (("experts.0.weight",), True, "all_to_all", None, ""),  # unknown
            (("experts.0.weight",), True, "all_to_all", "zero", ""),
            (("experts.0.weight", "gate.wg.weight"), True, "all_to_all", "own", "(gate.wg.weight)"),
            (("experts.0.weight", "gate.wg.weight"), False, "all_to_all", "own", ""),
            (("experts.0.weight", "gate.wg.weight"), True, "all_gather", "own", ""),
            (("experts.0.weight", "experts.0.gate.weight"), True, "all_to_all", "own", ""),
            (("mlp.up.weight", "mlp.gate.weight"), True, "all_to_all", "own", ""),  # gated layers
        ],
    )
    def test_experts_of_each_rank(
        self, names: tuple[str, ...], wrapped: bool, op: str, grads: str | None, told: str
    ) -> None:
        """``names`` begin different; a wrapper may keep another matrix equal."""

        def change(rank: int, one: LawCheck) -> LawCheck:
            pieces = [
                replace(p, ranks=(), how=PLAIN) if p.name in names or not wrapped else p
                for p in one.pieces
            ]
            count = len(names)
            values = tuple(f"{v} of {rank}" for v in one.params[:count])
            own = tuple(f"{v} {rank}" if grads == "own" else grads for v in one.grads[:count])
            return replace(
                one, pieces=tuple(pieces), params=(*values, *one.params[count:]),
                grads=(*own, *one.grads[count:]),
            )  # fmt: skip

        evidence = job(2, change, names=(*names, "embed.weight"))
        call = Collective(8, "world", 8, op, 64, 64, "float32", step=4, phase="forward")
        ranks = {r: replace(s, collectives=(call,)) for r, s in evidence.ranks.items()}
        of = diagnose(replace(evidence, ranks=ranks))
        assert of.verdict == "clean"
        assert bool(told) is bool(of.suspicious) and told in str(of.suspicious)

    def test_parts_whose_gradients_are_not_added_up_and_equal_models(self) -> None:
        assert not self.found(MATRICES, own_gradients=()).suspicious
        assert not self.found(()).suspicious


def apart(rank: int, check: LawCheck) -> LawCheck:
    """The gradients of each rank are its own."""
    return replace(check, grads=other(check.grads, rank))


class TestClippedBeforeBackward:
    def found(
        self, *early: int, norm: float = 2.0, steps: Sequence[int] = STEPS
    ) -> tuple[str, ...]:
        """``early``: steps in which a backward followed."""

        def add(_: int, laws: RankLaws) -> RankLaws:
            norms = (ClipNorm(step, MATRICES, norm, 1.0, "t.py:8 f") for step in steps)
            return replace(laws, norms=tuple(norms))

        rows = [{"step": step, "line": "t.py:8 f"} for step in early]
        return diagnose(with_events(with_laws(job(2), add), unclipped=rows)).suspicious

    @pytest.mark.parametrize(("norm", "what"), [(2.0, "clipped"), (0.0, "found no")])
    def test_a_backward_follows(self, norm: float, what: str) -> None:
        (text,) = self.found(*STEPS, norm=norm)
        assert f"clip_grad_norm_ at t.py:8 f {what} gradients, then a backward added" in text

    def test_the_last_update_may_be_missing(self) -> None:
        assert self.found(*STEPS[:-1])

    def test_after_some_calls_only_and_once(self) -> None:
        assert not self.found(*STEPS[1:]) and not self.found(STEPS[0]) and not self.found()


class TestLastBackward:
    def found(self, *ranks: int, step: int = 0, **late: bool) -> Diagnosis:
        calls = [Collective(8, "world", 8, "all_reduce", 64, 64, "float32", step=step)]
        one = {"line": "t.py:9 f", "keeps": True, **late}
        evidence = with_events(job(2), late=lambda rank: (one,) * (rank in ranks))
        of = {r: replace(s, collectives=tuple(calls)) for r, s in evidence.ranks.items()}
        return diagnose(replace(evidence, ranks=of) if step else evidence)

    def test_it_is_a_failure_on_all_ranks(self) -> None:
        of = self.found(0, 1)
        assert of.verdict == "wrong-gradients" and "Before updates at t.py:9 f" in of.cause

    def test_a_program_that_averages_by_itself_and_a_rank_alone(self) -> None:
        assert self.found(0, 1, step=2).suspicious
        assert not self.found(0).suspicious and self.found(0).verdict == "clean"

    def test_gradients_that_are_discarded_leave_replicas_equal(self) -> None:
        of = self.found(0, 1, keeps=False)
        assert of.verdict == "clean" and not of.suspicious


class TestClippedFirst:
    def found(self, norms: Sequence[float] = (3.0, 2.0), change: Any = None) -> Diagnosis:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            one = ClipNorm(1, ("net.weight", "net.bias"), norms[rank], 1.0, "train.py:8 main")
            return replace(laws, norms=tuple(replace(one, step=step) for step in STEPS))

        return diagnose(with_laws(plain(change=change), add))

    def test_other_norms_of_gradients_that_are_equal_later_are_suspicious(self) -> None:
        """Differential privacy bounds what each rank adds."""
        of = self.found()
        assert of.verdict == "clean"
        (text,) = of.suspicious
        assert "(3 on rank 0, 2 on rank 1)" in text and "train.py:8 main" in text

    def test_a_second_update_of_a_step_has_gradients_of_its_own(self) -> None:
        """DiLoCo: ranks differ in the inner update, and average for the outer one."""

        def add(rank: int, laws: RankLaws) -> RankLaws:
            one = ClipNorm(1, ("net.weight", "net.bias"), 3.0 - rank, 1.0, "train.py:8 main")
            outer = tuple(replace(one, key="b.0", optimizer="SGD") for one in laws.checks)
            inner = tuple(apart(rank, one) for one in laws.checks)
            norms = tuple(replace(one, step=step) for step in STEPS)
            return replace(laws, norms=norms, checks=(*inner, *outer))

        assert diagnose(with_laws(plain(), add)).verdict == "clean"

    def test_clipping_of_each_micro_batch_may_be_meant(self) -> None:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            norms = [
                ClipNorm(step, ("net.weight",), norm, 1.0, "train.py:8 main")
                for step in STEPS
                for norm in (3.0 - rank, 2.0)
            ]
            return replace(laws, norms=tuple(norms))

        for evidence in (plain(), job(2)):
            of = diagnose(with_laws(evidence, add))
            assert of.verdict == "clean" and "(3 on rank 0, 2 on rank 1)" in of.suspicious[0]

    def test_one_norm_and_norms_that_clip_nothing(self) -> None:
        assert self.found((3.0, 3.0)).verdict == "clean"
        assert self.found((0.3, 0.2)).verdict == "clean"

    @pytest.mark.parametrize(
        ("op", "phase", "numel", "found"),
        [
            ("reduce_scatter", "optimizer", 64, True),
            ("reduce", "optimizer", 64, True),
            ("all_reduce", "optimizer", 63, False),  # the matrix has 64 elements
            ("all_gather", "optimizer", 64, False),
            ("all_reduce", "backward", 64, False),
        ],
    )
    def test_an_optimizer_that_reduces_in_its_step(
        self, op: str, phase: str, numel: int, found: bool
    ) -> None:
        calls = tuple(
            Collective(at, "world", at, op, numel, numel, "float32", phase, step=step)
            for at, step in enumerate(STEPS)
        )

        def add(rank: int, laws: RankLaws) -> RankLaws:
            norms = (ClipNorm(step, ("net.weight",), 3.0 - rank, 1.0) for step in STEPS)
            return replace(laws, norms=tuple(norms))

        apart = lambda rank, one: replace(one, grads=other(one.grads, rank))  # noqa: E731
        evidence = with_laws(plain(change=apart), add)
        ranks = {r: replace(seen, collectives=calls) for r, seen in evidence.ranks.items()}
        of = diagnose(replace(evidence, ranks=ranks))
        assert of.verdict == "clean"
        assert any("inside its step()" in text for text in of.suspicious) == found

    @pytest.mark.parametrize("none", ["", "zero", None])
    def test_matrices_without_gradients_on_every_rank_may_be_clipped_too(
        self, none: str | None
    ) -> None:
        """A head that another phase trains."""
        names = ("net.weight", "head.weight")

        def found(change: Any) -> Diagnosis:
            def add(rank: int, laws: RankLaws) -> RankLaws:
                norm = ClipNorm(1, names, 3.0 - rank, 1.0, "train.py:8 main")
                return replace(laws, norms=tuple(replace(norm, step=step) for step in STEPS))

            def alone(rank: int, one: LawCheck) -> LawCheck:
                pieces = tuple(replace(piece, ranks=()) for piece in one.pieces)
                return replace(one, pieces=pieces, clocks=(), grads=change(rank, one.grads))

            return diagnose(with_laws(job(2, alone, PLAIN, names=names), add))

        of = found(lambda _, grads: (grads[0], none))
        assert of.verdict == "clean" and bool(of.suspicious) is (none is not None)
        assert not found(lambda rank, grads: (grads[0], grads[1] if rank else none)).suspicious
        assert "clipped" not in str(found(lambda _, __: (none, none)).suspicious)

    def test_models_of_their_own_have_norms_of_their_own(self) -> None:
        assert self.found(change=apart).verdict == "clean"

    def test_unknown_gradients_show_nothing(self) -> None:
        unknown = lambda rank, one: replace(one, grads=(None, None))  # noqa: E731
        assert self.found(change=unknown).verdict == "clean"


class TestNormIncomplete:
    def found(self, norm: float, squares: Sequence[Sequence[float]]) -> Diagnosis:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            one = ClipNorm(1, ("net.weight", "expert.weight"), norm, 1.0, "train.py:8 main")
            one = replace(one, squares=tuple(squares[rank]))
            return replace(laws, norms=tuple(replace(one, step=step) for step in STEPS))

        return diagnose(with_laws(plain(change=apart), add))

    def test_experts_of_other_ranks_left_out_are_a_failure(self) -> None:
        of = self.found(4.5, [(9.0, 7.0), (9.0, 16.0)])
        assert of.verdict == "wrong-gradients" and "train.py:8 main" in of.cause
        assert (
            "by the norm 4.5, and the norm of all gradients is 5.65685: 1 parameter (expert.w"
            in (of.cause)
        )

    @pytest.mark.parametrize(
        ("norm", "squares"),
        [
            (32**0.5, [(9.0, 7.0), (9.0, 16.0)]),  # of all
            (5.0, [(9.0, 16.0), (9.0, 16.0)]),  # one group of experts
            (5.0, [(9.0, 16.0), (9.0, 16.0001)]),  # replicas up to rounding
            (41**0.5, [(9.0, 16.0), (9.0, 16.0001)]),  # experts that are almost alike
            (0.9, [(0.3, 0.4), (0.3, 0.5)]),  # nothing is scaled
            (4.5, [(), ()]),  # not known
        ],
    )
    def test_right_norms_and_unknown_ones(
        self, norm: float, squares: Sequence[Sequence[float]]
    ) -> None:
        assert self.found(norm, squares).verdict == "clean"


class TestRecomputed:
    def found(self, again: float, steps: Sequence[int] = STEPS, norm: float = 9.0) -> Diagnosis:
        row = ["mlp.up", [6.0, 9.0], [again, norm]]
        line = {"line": "train.py:5 block", "compared": 4, "apart": [row]}
        events = tuple({"step": step, **line} for step in steps)
        return diagnose(with_events(job(1), recomputed=events))

    def test_another_input_is_a_failure(self) -> None:
        of = self.found(9.0, norm=13.5)
        assert of.verdict == "wrong-gradients"
        assert "checkpoint at train.py:5 block runs mlp.up again" in of.cause and "33 %" in of.cause

    def test_rounding_and_one_step_alone_are_no_failure(self) -> None:
        assert self.found(6.05).verdict == "clean"
        assert self.found(9.0, (1,)).verdict == "clean"

    def test_without_evidence(self) -> None:
        assert self.found(9.0, ()).verdict == "clean"


class TestRounded:
    def found(self, rounded: int = 5, times: int = 8, dtype: str = "float32") -> tuple[str, ...]:
        def add(_: int, laws: RankLaws) -> RankLaws:
            rows = (Cleared(step, "AdamW", ("a",), False, "", times) for step in STEPS)
            return replace(laws, cleared=tuple(rows))

        events = tuple(
            {"step": step, "optimizer": "AdamW", "matrices": 5, "rounded": rounded}
            for step in STEPS
        )
        evidence = with_events(with_laws(job(2), add), rounded=events)
        calls = (Collective(0, "world", 0, "all_reduce", 8, 8, dtype),)
        ranks = {r: replace(seen, collectives=calls) for r, seen in evidence.ranks.items()}
        return diagnose(replace(evidence, ranks=ranks)).suspicious

    def test_a_sum_in_bfloat16_is_suspicious(self) -> None:
        (text,) = self.found()
        assert "8 micro-batches" in text and "5 matrices of float32" in text

    @pytest.mark.parametrize("more", [{"rounded": 4}, {"times": 1}, {"dtype": "bfloat16"}])
    def test_float32_autocast_and_a_reduction_in_bfloat16(self, more: dict[str, Any]) -> None:
        assert not self.found(**more)


class TestUpdatesOf16Bits:
    def found(self, *kept: int) -> tuple[str, ...]:
        names = ("a.weight", "b.weight")
        events = tuple(
            {"step": step, "names": names, "elements": [80, 20], "kept": [n, 0]}
            for step, n in zip(STEPS, kept, strict=False)
        )
        return diagnose(with_events(job(2, names=names), halves=events)).suspicious

    def test_most_elements_keep_their_values(self) -> None:
        (text,) = self.found(0, 70, 70, 60)
        assert "step 6 and in earlier" in text and "1 parameter (a.weight) of 16" in text
        assert "75 % of them" in text

    @pytest.mark.parametrize("kept", [(), (70, 70), (70, 70, 70, 40), (50, 50, 50, 50)])
    def test_few_elements_a_warm_up_and_too_few_steps(self, kept: tuple[int, ...]) -> None:
        assert not self.found(*kept)

    @pytest.mark.parametrize(("kind", "told"), [("weight", True), ("bias", False)])
    def test_several_matrices_among_others(self, kind: str, told: bool) -> None:
        """The weights of norms, which are near 1, move last."""
        names = (*(f"{n}.{kind}" for n in "abc"), "d.weight", "e.weight", "f.weight", "g.weight")
        events = tuple(
            {"step": step, "names": names, "elements": [20] * 3 + [80] * 4,
             "kept": [20] * 3 + [0] * 4}
            for step in STEPS
        )  # fmt: skip
        found = diagnose(with_events(job(2, names=names), halves=events)).suspicious
        assert ["3 parameters ({a,b,c}.weight)" in text for text in found] == [True] * told


class TestReturnedWeights:
    def found(self, *rows: tuple[int, int]) -> tuple[str, ...]:
        events = tuple({"step": step, "name": "a.weight", "since": since} for step, since in rows)
        return diagnose(with_events(job(2), returned=events)).suspicious

    def test_weights_of_an_earlier_step(self) -> None:
        (text,) = self.found((12, 5), (20, 5))
        assert "step 12 (and in 1 later step) a.weight had exactly the values of step 5" in text
        assert "--allow weights-returned" in text

    def test_tasks_that_begin_from_the_same_weights(self) -> None:
        assert not self.found((9, 5), (20, 16))
        assert not self.found()


# ------------------------------------------------------------------------ models


def layers(*rows: tuple[int, str, bool]) -> Events:
    return ({"lists": {"layers": [list(row) for row in rows]}},)


class TestLayers:
    def found(self, *ranks: Events) -> tuple[str, ...]:
        return diagnose(with_events(job(2), layers=lambda rank: ranks[rank])).suspicious

    def test_a_layer_that_no_stage_holds_is_suspicious(self) -> None:
        one = layers((0, "Mlp", True), (1, "Identity", False), (2, "Identity", False))
        two = layers((0, "Identity", False), (1, "Identity", False), (2, "Mlp", True))
        (text,) = self.found(one, two)
        assert "No rank holds layers.1" in text

    def test_a_key_that_no_stage_has(self) -> None:
        assert "layers.1" in self.found(layers((0, "Mlp", True)), layers((2, "Mlp", True)))[0]

    @pytest.mark.parametrize("kind", ["ReLU", "Linear"])
    def test_a_list_of_other_modules_is_healthy(self, kind: str) -> None:
        one = layers((0, "Mlp", True), (1, kind, kind == "Linear"), (2, "Identity", False))
        two = layers((0, "Identity", False), (1, kind, False), (2, "Mlp", True))
        assert not self.found(one, two)

    def test_whole_models_and_a_rank_without_record(self) -> None:
        whole = layers((0, "Mlp", True), (1, "Identity", False), (2, "Mlp", True))
        assert not self.found(whole, whole)
        assert not self.found(layers((0, "Mlp", True)), ())


class TestEmbeddings:
    def found(self, zeros: Sequence[int], tokens: int = 11, steps: Any = STEPS) -> tuple[str, ...]:
        row = {"module": "embed", "tokens": tokens, "zeros": list(zeros)}
        events = tuple({"step": step, **row} for step in steps)
        return diagnose(with_events(job(2), embedding=events)).suspicious

    def test_tokens_that_always_get_zeros_are_suspicious(self) -> None:
        assert "embed gave zeros for 2 tokens (5, 11)" in self.found((5, 11))[0]

    @pytest.mark.parametrize(
        ("zeros", "tokens", "steps"),
        [((0,), 11, STEPS), ((1, 2, 3, 4), 9, STEPS), ((5, 11), 11, (1, 2)), ((5, 11), 11, ())],
    )
    def test_padding_parts_of_a_vocabulary_and_missing_evidence(
        self, zeros: Sequence[int], tokens: int, steps: Sequence[int]
    ) -> None:
        assert not self.found(zeros, tokens, steps)


class TestTies:
    def found(self, lost: int = 2, left_out: bool = True, ranks: int = 2) -> Diagnosis:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            apart = {step: step >= lost and rank < ranks for step in STEPS}
            return replace(laws, models=tuple(
                ModelState(
                    step, left_out={"head.weight": "v"} if apart[step] and left_out else {},
                    tied=() if apart[step] else (("embed.weight", "head.weight"),),
                )
                for step in STEPS
            ))  # fmt: skip

        return diagnose(with_laws(plain(), add))

    def test_a_lost_tie_is_a_failure(self) -> None:
        of = self.found()
        assert of.verdict == "wrong-weights"
        assert "Since step 2 head.weight is a different one" in of.cause

    @pytest.mark.parametrize("more", [{"lost": 9}, {"left_out": False}, {"ranks": 1}])
    def test_a_kept_tie_and_one_that_an_optimizer_trains(self, more: dict[str, Any]) -> None:
        assert self.found(**more).verdict == "clean"


# ------------------------------------------------------------------------ updates and loads


class TestUpdates:
    def found(
        self, calls: Callable[[int, int], int], how: str = REDUCED, ranks: int = 2
    ) -> Diagnosis:
        """``calls`` of rank and step: calls on the group before this update."""

        def change(rank: int, one: LawCheck) -> LawCheck:
            past = tuple((step - 1, calls(rank, step)) for step in range(1, one.step + 1))
            return replace(one, clocks=past[-1][1:], past=past)

        return diagnose(job(ranks, change, how))

    def test_a_left_out_update_is_a_failure(self) -> None:
        of = self.found(lambda rank, step: 2 * (step + (rank == 1 and step > 1)))
        assert of.verdict == "replica-divergence"
        assert "first 2 on rank 0, 1 on rank 1" in of.cause and "rank 1 updated less" in of.cause
        assert not of.culprits  # rank 0 may have updated once too often

    def test_the_one_of_three_is_named(self) -> None:
        of = self.found(lambda rank, step: 2 * (step + (rank == 1 and step > 1)), ranks=3)
        assert of.culprits == (1,)

    @pytest.mark.parametrize(
        "calls",
        [
            lambda rank, step: 2 * step,
            lambda rank, step: 2 * step + rank,  # from the start
            lambda rank, step: (
                2 * step + (rank and step == 3)
            ),  # a call before the update, or after
        ],
    )
    def test_equal_counts_are_healthy(self, calls: Callable[[int, int], int]) -> None:
        assert self.found(calls).verdict == "clean"

    @pytest.mark.parametrize(
        ("lag", "op", "told"),
        [(lambda count: count // 2, "broadcast", True), (lambda count: count // 2, "send", False),
         (lambda count: 1, "", False), (lambda count: 0, "", False),
         (lambda count: count % 2, "", False)],
    )  # fmt: skip
    def test_updates_that_are_left_out_again_and_again(
        self, lag: Callable[[int], int], op: str, told: bool
    ) -> None:
        """Such a rank's steps have other numbers. With transfers its calls may be others, too."""

        def change(rank: int, one: LawCheck) -> LawCheck:
            counts = range(one.count + 1)
            past = tuple((n - (lag(n) if rank else 0), 2 * n) for n in counts)
            return replace(one, past=past, step=one.step + 100 * rank)

        evidence = job(2, change)
        call = Collective(8, "world", 8, op, 8, 8, "float32", peer=0)
        ranks = {r: replace(s, collectives=(call,) * bool(op)) for r, s in evidence.ranks.items()}
        of = diagnose(replace(evidence, ranks=ranks))
        assert (of.verdict == "replica-divergence") == told
        assert not told or "at last 5 on rank 0, 3 on rank 1. For the same" in of.cause

    def test_plain_parameters_say_nothing(self) -> None:
        late = lambda rank, step: 2 * (step + (rank == 1 and step > 1))  # noqa: E731
        assert self.found(late, PLAIN).verdict == "clean"


# ------------------------------------------------------------------------ values that ranks share


def shared(rank: int, **more: Any) -> Events:
    """What the backward of a function gets whose forward gathers over two ranks."""
    row = {
        "function": "GatherBackward", "line": "train.py:7 forward", "op": "all_gather", "calls": 0,
        "ranks": [0, 1], "gradient": [2.0 * rank, 5.0], "bias": "", "matrix": "",
    }  # fmt: skip
    return tuple({"step": step, "rows": [{**row, **more}]} for step in STEPS)


class TestShared:
    def found(self, one: Events, two: Events) -> tuple[str, ...]:
        return diagnose(with_events(plain(), shared=lambda rank: two if rank else one)).suspicious

    def test_gradients_that_nothing_adds_are_suspicious(self) -> None:
        (text,) = self.found(shared(0), shared(1))
        assert "Gather at train.py:7 forward calls all_gather" in text and "40 %" in text

    def test_a_backward_that_communicates_and_one_loss_on_all_ranks(self) -> None:
        assert not self.found(shared(0, calls=1), shared(1, calls=1))
        assert not self.found(shared(0), shared(0))

    def test_other_samples_are_told(self) -> None:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            return replace(laws, inputs=tuple(ModelInputs(s, 0, f"{s} {rank}") for s in STEPS))

        evidence = with_events(plain(), shared=shared)
        (text,) = diagnose(with_laws(evidence, add)).suspicious
        assert "their models were called with different values" in text
        assert "different values" not in diagnose(evidence).suspicious[0]

    def test_without_the_records_of_a_rank(self) -> None:
        assert not self.found(shared(0), ())
        assert not self.found(shared(0), shared(1)[:1])

    @pytest.mark.parametrize(
        ("reached", "steps", "found"),
        [([False], STEPS, True), ([False], STEPS[:1], False), ([True], STEPS, False),
         ([True, False], STEPS, False), ([], STEPS, False)],
    )  # fmt: skip
    def test_what_is_gathered_and_gets_no_gradient(
        self, reached: list[bool], steps: Sequence[int], found: bool
    ) -> None:
        rows = [{"line": "train.py:5", "shape": [4, 8], "reached": one} for one in reached]
        events = tuple({"step": step, "rows": rows} for step in steps)
        assert bool(diagnose(with_events(plain(), gathered=events)).suspicious) == found
        one = with_events(plain(), gathered=lambda rank: () if rank else events)
        assert not diagnose(one).suspicious

    def twice(
        self, times: float = 2.0, of: Events | None = None, evidence: Any = None, **more: Any
    ) -> tuple[str, ...]:
        """All ranks get the same gradient, which changes, and return ``times`` as much."""
        rows = of or tuple(
            {**event, "rows": [{**event["rows"][0], "op": "all_reduce", "calls": 1,
                                "gradient": [n, 5.0], "made": [times * n, times * 5.0]}]}
            for n, event in enumerate(shared(0), 1)
        )  # fmt: skip
        return diagnose(with_events(evidence or plain(), shared=rows, **more)).suspicious

    def test_equal_gradients_that_are_added_up_are_suspicious(self) -> None:
        (text,) = self.twice()
        assert "Gather at train.py:7 forward" in text and "gets 2 times its gradient" in text

    def test_a_gather_that_adds_equal_gradients(self) -> None:
        half = 5.0 * 2**0.5  # of each rank's own part
        for made, found in ((half, True), (half / 2, False)):
            of = tuple(
                event
                for n, step in enumerate(STEPS)
                for event in shared(0, calls=1, gradient=[n, 5.0], made=[1.0, made])
                if event["step"] == step
            )
            assert bool(self.twice(of=of)) == found

    def test_a_backward_that_divides_and_a_loss_that_is_divided(self) -> None:
        assert not self.twice(1.0)
        assert not self.twice(losses=tuple({**e, "backwards": [
            {"means": [0.5], "of": []}]} for e in losses(8)))  # fmt: skip

    def test_gradients_of_the_mean_of_outputs(self) -> None:
        """They are the same whatever the samples are, so each rank may have samples of its own."""
        row = {"op": "all_reduce", "calls": 1, "gradient": [1.0, 5.0], "made": [2.0, 10.0]}
        assert not self.twice(of=shared(0, **row))

    @pytest.mark.parametrize(("used", "found"), [(1.0, True), (0.5, False), (1.5, False)])
    def test_gradients_that_are_added_up_after_the_backward(self, used: float, found: bool) -> None:
        """Each rank has those of its part: the sum is right, and the mean corrects the factor."""

        def own(rank: int) -> Events:
            made = [[1.0 + rank, 4.0], [3.0 - 5 * rank, 4.0]]
            sums = [[used * 3.0, used * 6.0], [used * 1.0, used * 6.0]]
            return tuple({"step": s, "names": NAMES, "made": made, "used": sums} for s in STEPS)

        assert bool(self.twice(own_gradients=own)) == found

    def test_a_wrapper_that_averages(self) -> None:
        assert not self.twice(evidence=job(2))

    def bias(self, params: Callable[[int, int], tuple[str, str]], **more: Any) -> tuple[str, ...]:
        """``params``: values of matrix and bias, of rank and step."""
        names = {"op": "all_reduce", "bias": "net.bias", "matrix": "net.weight"}
        row = {**names, "gradient": [1.0, 5.0], **more}
        change = lambda rank, one: replace(one, params=params(rank, one.step))  # noqa: E731
        events = {"shared": lambda rank: shared(rank, **row)}
        return diagnose(with_events(plain(change=change), **events)).suspicious

    def test_a_bias_that_each_rank_adds_is_suspicious(self) -> None:
        (text,) = self.bias(lambda rank, step: (f"part {rank} {step}", f"b {step}"))
        assert "net.bias is the same on ranks 0, 1" in text and "it counts 2 times" in text

    @pytest.mark.parametrize(
        "params",
        [
            lambda rank, step: (f"part {rank} {step}", f"b {rank} {step}"),  # a bias of its own
            lambda rank, step: (f"part {rank} {step}", "zeros"),  # which does not train
            lambda rank, step: (f"w {step}", f"b {step}"),  # no parts of a matrix
        ],
    )
    def test_other_biases(self, params: Callable[[int, int], tuple[str, str]]) -> None:
        assert not [text for text in self.bias(params) if "net.bias is the same" in text]

    def test_a_sum_of_products_alone(self) -> None:
        assert not self.bias(lambda r, step: (f"part {r} {step}", f"b {step}"), bias="", matrix="")


class TestDroppedMicroBatches:
    def found(
        self, number: int = 2, digests: str = "ab", graded: bool = False, steps: int = 4, **of: Any
    ) -> tuple[str, ...]:
        row = {"direct": False, "of": [], "means": [1.0], "added": False, "moved": False,
               "left": True, **of}  # fmt: skip
        changed = of.pop("changed", 0)
        events = [{"step": step, "changed": changed, "backwards": [row] * number} for step in STEPS]
        optimizers, part = of.pop("optimizers", 1), of.pop("part", "")

        def add(_: int, laws: RankLaws) -> RankLaws:
            inputs = [
                ModelInputs(step, at, f"{digest}{step}", graded=graded)
                for step in STEPS for at, digest in enumerate(digests)
            ]  # fmt: skip
            checks = [
                replace(one, key=f"{n}", pieces=[replace(p, part=part) for p in one.pieces])
                for one in laws.checks for n in range(optimizers)
            ]  # fmt: skip
            return replace(laws, inputs=tuple(inputs), checks=tuple(checks))

        return diagnose(with_events(with_laws(job(2), add), losses=events[:steps])).suspicious

    def test_all_but_the_last_one_are_suspicious(self) -> None:
        (text,) = self.found()
        assert "at train.py:9 main comes after 2 forwards of different samples" in text
        assert "--allow micro-batches-dropped" in text

    def test_fsdp1_clips_each_part_of_a_flat_gradient(self) -> None:
        assert self.found(changed=3, part="shard 0 of 2")

    @pytest.mark.parametrize(
        "design",
        [
            {"added": True},
            {"graded": True},  # an attack on the inputs
            {"digests": "aa"},  # SAM
            {"digests": "a"},  # two losses of one forward
            {"moved": True},  # inner updates of MAML
            {"changed": -1},  # gradients that the program combines
            {"changed": 3},
            {"changed": -1, "part": "shard 0 of 2"},
            {"left": False},  # hooks that add gradients to buffers
            {"optimizers": 2},  # a generator and its discriminator
            {"number": 1, "digests": "a"},
            {"steps": 2},
            {"steps": 0},
        ],
    )
    def test_healthy_designs_and_missing_evidence(self, design: dict[str, Any]) -> None:
        assert not self.found(**design)


# ------------------------------------------------------------------------ what losses get


class TestLossInputs:
    def found(self, steps: Sequence[int] = STEPS, **more: Any) -> Diagnosis:
        row = {"name": "cross_entropy_loss", "line": "train.py:7 main", "unfit": False,
               "spread": False, "ahead": -1, "counted": 40, "padding": 0, **more}  # fmt: skip
        return diagnose(with_events(job(2), loss_inputs=[{"step": s, **row} for s in steps]))

    @pytest.mark.parametrize(
        ("more", "told"),
        [
            ({"unfit": True}, "cross_entropy at train.py:7 main gets probabilities"),
            ({"unfit": True, "name": "nll_loss_nd"}, "nll_loss at train.py:7 main gets scores"),
            ({"spread": True, "name": "mse_loss"}, "mse_loss at train.py:7 main gets an input"),
            ({"ahead": 2}, "train.py:7 main are the tokens after the next ones"),
            (
                {"padding": 10},
                "main counts targets that are padding after padding, 25 %",
            ),
        ],
    )
    def test_what_is_suspicious(self, more: dict[str, Any], told: str) -> None:
        (text,) = self.found(**more).suspicious
        assert told in text
        assert not self.found(STEPS[:2], **more).suspicious

    @pytest.mark.parametrize("more", [{}, {"ahead": 1}])
    def test_what_a_loss_takes(self, more: dict[str, Any]) -> None:
        of = self.found(**more)
        assert not of.suspicious and not of.notes

    def test_targets_at_their_own_places_are_a_note(self) -> None:
        of = self.found(ahead=0)
        assert not of.suspicious and "the very tokens that the model gets" in of.notes[0]

    def test_a_head_for_later_tokens_beside_the_next_ones(self) -> None:
        rows = [
            {"step": step, "name": "cross_entropy_loss", "line": f"train.py:{ahead} main",
             "unfit": False, "spread": False, "ahead": ahead, "counted": 40, "padding": 0}
            for step in STEPS for ahead in (1, 2)
        ]  # fmt: skip
        assert not diagnose(with_events(job(2), loss_inputs=rows)).suspicious

    def test_a_call_that_is_unfit_in_one_step_only(self) -> None:
        rows = [{"step": s, "name": "kl_div", "line": "", "unfit": s == 1, "spread": False,
                 "ahead": -1, "counted": 0, "padding": 0} for s in STEPS]  # fmt: skip
        assert not diagnose(with_events(job(2), loss_inputs=rows)).suspicious
