"""Laws of loss scales, declared tensors, loads and values that no optimizer changes, on recorded
data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from moediag.diagnosis import broken_law, diagnose
from moediag.evidence.law_model import (
    PART,
    PLAIN,
    REDUCED,
    DeclaredTensor,
    LawCheck,
    LawPiece,
    Load,
    ModelInputs,
    ModelState,
    RankLaws,
    Shard,
)
from moediag.evidence.model import Evidence
from moediag.result import Diagnosis
from tests.unit.law_evidence import STEPS, job


def with_laws(evidence: Evidence, add: Callable[[int, RankLaws], RankLaws]) -> Evidence:
    ranks = {
        rank: replace(seen, laws=add(rank, seen.laws or RankLaws()))
        for rank, seen in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)


class TestLossScale:
    def found(self, scale: Callable[[int, int], float], how: str = PART) -> Diagnosis:
        """``scale`` of rank and step."""

        def change(rank: int, check: LawCheck) -> LawCheck:
            numbers = {"lr": "0.01", "loss_scale": repr(scale(rank, check.step))}
            # a rank that skips a step counts one less
            return replace(check, hyper=(numbers,), count=check.count - (rank == 1 < check.step))

        return diagnose(job(2, change, how))

    @pytest.mark.parametrize("how", [PART, REDUCED])
    def test_another_scale_on_one_rank_is_a_failure(self, how: str) -> None:
        of = self.found(lambda rank, step: 512.0 if rank and step > 1 else 1024.0, how)
        assert of.verdict == "replica-divergence"
        assert "In step 2 the loss scale" in of.cause
        assert "1024 on rank 0, 512 on rank 1" in of.cause
        assert "ShardedGradScaler" in of.next_step

    def test_a_scale_that_changes_alike_is_clean(self) -> None:
        assert self.found(lambda _, step: 1024.0 / step).verdict == "clean"

    def test_plain_parameters_may_have_scales_of_their_own(self) -> None:
        assert self.found(lambda rank, _: 2.0**rank, PLAIN).verdict == "clean"

    def test_one_moment_is_not_enough_where_ranks_count_differently(self) -> None:
        of = self.found(lambda rank, step: 2.0 if rank and step == 2 else 1.0)
        assert of.verdict == "clean"


class TestDeclared:
    def found(
        self,
        digest: Callable[[int, int], str | None] = lambda _, step: f"{step}",
        sketch: Callable[[int, int], tuple[float, float]] | None = None,
        given: bool = True,
        data: bool = False,
    ) -> Diagnosis:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            declared = [
                DeclaredTensor(
                    step, ("tp",), (0, 1), "", "4x6", data,
                    None if sketch else digest(rank, step),
                    sketch(rank, step) if sketch else None,
                    "train.py:9 main",
                )
                for step in STEPS
            ]  # fmt: skip
            inputs = [ModelInputs(step, 0, f"{digest(rank, step)}-7") for step in STEPS[1:]]
            return replace(laws, declared=tuple(declared), inputs=tuple(inputs) if given else ())

        return diagnose(with_laws(job(2, how=PLAIN), add))

    def test_other_tokens_on_one_rank_of_a_tp_group_are_a_failure(self) -> None:
        of = self.found(lambda rank, step: f"{rank}{step}")
        assert (of.verdict, of.culprits) == ("wrong-gradients", ())
        assert "(2, 3, 6)" in of.cause and "(4x6) at train.py:9 main differs" in of.cause
        assert "Give all ranks of one tp group the same samples" in of.next_step

    def test_the_same_tokens_are_clean(self) -> None:
        of = self.found()
        assert (of.verdict, of.notes) == ("clean", ())

    def test_integers_that_are_no_input_are_not_compared(self) -> None:
        assert self.found(lambda rank, step: f"{rank}{step}", given=False).verdict == "clean"

    def test_an_axis_of_data_parallelism_is_not_compared(self) -> None:
        assert self.found(lambda rank, step: f"{rank}{step}", data=True).verdict == "clean"

    def test_inputs_that_differ_in_one_step_only_are_not_enough(self) -> None:
        assert self.found(lambda rank, step: f"{rank * (step == 3)}{step}").verdict == "clean"

    def test_activations_that_differ_much_are_a_note(self) -> None:
        of = self.found(sketch=lambda rank, _: (1.0 + rank, 2.0))
        assert of.verdict == "clean"
        assert "by up to 50 % of its norm" in of.notes[0]

    def test_activations_that_round_differently_are_no_note(self) -> None:
        assert not self.found(sketch=lambda rank, _: (1.0 + rank / 100, 2.0)).notes


class TestModels:
    def found(
        self, state: Callable[[int, int], ModelState], evidence: Evidence | None = None
    ) -> tuple[str, ...]:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            return replace(laws, models=tuple(state(rank, step) for step in STEPS))

        of = diagnose(with_laws(evidence or job(2), add))
        assert of.verdict == "clean"
        return of.notes

    def buffers(
        self, value: Callable[[int, int], str], over: tuple[int, ...] = (0, 1)
    ) -> tuple[str, ...]:
        return self.found(
            lambda rank, step: ModelState(step, ((over, {"rope.freq": value(rank, step)}),))
        )

    def test_a_constant_that_differs_between_ranks_is_a_note(self) -> None:
        (note,) = self.buffers(lambda rank, _: f"{rank}")
        assert note.startswith("1 buffer (rope.freq) never changed and differs between ranks 0, 1")

    def test_running_statistics_may_differ(self) -> None:
        assert not self.buffers(lambda rank, step: f"{rank}{step}")

    def test_equal_constants_are_no_note(self) -> None:
        assert not self.buffers(lambda _, __: "1")

    def test_ranks_that_average_nothing_may_differ(self) -> None:
        assert not self.buffers(lambda rank, _: f"{rank}", ())

    @pytest.mark.parametrize("name", ["gate.weight", "gates[0].weight"])
    @pytest.mark.parametrize(("since", "suspicious"), [(1, True), (2, False)])
    def test_a_parameter_that_no_optimizer_has(
        self, since: int, suspicious: bool, name: str
    ) -> None:
        """An optimizer may step first after some steps of another one."""

        def add(_: int, laws: RankLaws) -> RankLaws:
            left = ({name: "1"} if step >= since else {} for step in STEPS)
            states = (ModelState(s, left_out=out) for s, out in zip(STEPS, left, strict=True))
            return replace(laws, models=tuple(states))

        of = diagnose(with_laws(job(2), add))
        (text,) = of.suspicious if suspicious else of.notes
        assert f"({name}) had gradients and never changed" in text
        assert ("ModuleList" in text) == ("[0]" in name)

    @pytest.mark.parametrize("tensors", [("bias",), ()])
    def test_a_plain_tensor_that_no_optimizer_has(self, tensors: tuple[str, ...]) -> None:
        def add(_: int, laws: RankLaws) -> RankLaws:
            left = {"bias": "1", "gate.weight": "2"}
            states = (ModelState(s, left_out=left, tensors=tensors) for s in STEPS)
            return replace(laws, models=tuple(states))

        (text,) = diagnose(with_laws(job(2), add)).suspicious
        assert ("A plain tensor (bias)" in text and "torch.nn.Parameter" in text) is bool(tensors)

    @pytest.mark.parametrize(
        ("since", "more", "told"),
        [(1, (), True), (2, (), False), (2, (12, 24), True), (9, (), False)],
    )
    def test_a_wrapped_model_that_no_optimizer_has_is_suspicious(
        self, since: int, more: tuple[int, ...], told: bool
    ) -> None:
        """An optimizer that steps first after some steps is not missing. A generator may have its
        first gradient after the discriminator's first update."""

        def add(_: int, laws: RankLaws) -> RankLaws:
            states = (
                ModelState(s, left_out={"d.w": "1"}, unowned=("Disc",))
                if s >= since
                else ModelState(s)
                for s in (*STEPS, *more)
            )
            return replace(laws, models=tuple(states))

        of = diagnose(with_laws(job(2), add)).suspicious
        assert any("These are all of Disc, whose gradients" in text for text in of) is told

    @pytest.mark.parametrize("late", [True, False])
    def test_one_that_changes_or_gets_an_optimizer_is_no_note(self, late: bool) -> None:
        def state(_: int, step: int) -> ModelState:
            left = {} if late and step > 2 else {"gate.weight": f"{step * (not late)}"}
            return ModelState(step, left_out=left)

        assert not self.found(state)

    def test_a_frozen_router_is_a_note(self) -> None:
        (note,) = self.found(lambda _, step: ModelState(step, frozen_routers=("moe.gate.weight",)))
        assert "The router's moe.gate.weight does not require gradients" in note

    def test_an_average_that_one_rank_updates_is_a_note(self) -> None:
        (note,) = self.found(lambda rank, step: ModelState(step, averages=(step * (not rank),)))
        assert "(6 times on rank 0, 0 times on rank 1), since step 1" in note

    @pytest.mark.parametrize("rank_0_only", [True, False])
    def test_averages_that_are_updated_alike_or_kept_once_are_no_note(
        self, rank_0_only: bool
    ) -> None:
        def state(rank: int, step: int) -> ModelState:
            return ModelState(step, averages=() if rank and rank_0_only else (step,))

        assert not self.found(state)

    @pytest.mark.parametrize(
        ("value", "told"),
        [(lambda rank, step: step * (not rank), True), (lambda rank, step: step, False),
         (lambda rank, step: rank, False), (lambda rank, step: 0, False)],
    )  # fmt: skip
    def test_a_teacher_that_one_rank_updates(
        self, value: Callable[[int, int], int], told: bool
    ) -> None:
        """One of its own on each rank, and one that never changes, may be meant."""

        def add(rank: int, laws: RankLaws) -> RankLaws:
            values = ((step, str(value(rank, step - 1))) for step in (1, 2, 3, 6, 12))
            states = (ModelState(s, followers=(("Vit", {"a.weight": v}),)) for s, v in values)
            return replace(laws, models=tuple(states))

        found = diagnose(with_laws(job(2), add)).suspicious
        assert ["of Vit, which runs" in text and "only changes on rank 0" in text for text in found
                ] == [True] * told  # fmt: skip


@pytest.mark.parametrize(
    ("value", "kinds", "told"),
    [(lambda rank, step: f"{rank} {step}", ("Critic", "Critic"), True),
     (lambda rank, step: f"{rank} {step}", ("Critic", "Actor"), False),  # of another class
     (lambda rank, step: f"{rank}", ("Critic", "Critic"), False),  # of no model that trains
     (lambda rank, step: f"{step}", ("Critic", "Critic"), False)],
    ids=["apart", "another class", "constant", "equal"],
)  # fmt: skip
def test_targets_that_begin_with_other_values_on_each_rank(
    value: Callable[[int, int], str], kinds: tuple[str, str], told: bool
) -> None:
    def add(rank: int, laws: RankLaws) -> RankLaws:
        of = lambda step: ((kinds[0], {"a.weight": value(rank, step)}), (kinds[1], {}))  # noqa: E731
        return replace(laws, models=tuple(ModelState(s, followers=of(s)) for s in (1, 2, 3, 6)))

    found = diagnose(with_laws(job(2), add)).suspicious
    assert ["began with other values on each rank" in text for text in found] == [True] * told


class TestTied:
    def found(self, drifts: bool, names: Mapping[int, tuple[str, ...]]) -> Diagnosis:
        """Each rank is a stage; all of a stage's matrices have the values of the other's."""

        def change(rank: int, check: LawCheck) -> LawCheck:
            own = names[rank]
            pieces = tuple(LawPiece(name, "", PLAIN, (), shape="12x8") for name in own)
            drift = f" {rank}" if drifts and check.count else ""
            values = tuple(f"{at} {check.step}{drift}" for at in range(len(own)))
            return replace(
                check, key=f"{own}", pieces=pieces, params=values, grads=values, state={}
            )

        return diagnose(job(2, change))

    def test_a_shared_matrix_that_drifts_is_suspicious(self) -> None:
        of = self.found(True, {0: ("embedding.weight",), 1: ("head.weight",)})
        assert of.verdict == "clean"
        found = of.suspicious[0]
        assert "embedding.weight on rank 0 and head.weight on rank 1 had the same" in found
        assert "since step 2" in found

    def test_one_that_is_kept_equal_is_not(self) -> None:
        assert not self.found(False, {0: ("embedding.weight",), 1: ("head.weight",)}).suspicious

    def test_stages_from_the_same_seed_are_not(self) -> None:
        names = {0: ("one.weight", "two.weight"), 1: ("three.weight", "four.weight")}
        assert not self.found(True, names).suspicious


class TestLoads:
    def sharded(
        self, shard: Callable[[int], Shard | None], line: str = "train.py:5 main"
    ) -> Evidence:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            found = shard(rank)
            shards = {} if found is None else {"net.weight": found, "net.bias": found}
            loads = (Load(line, 2),) if found is not None and found.loaded else ()
            return replace(laws, shards=shards, loads=loads)

        return with_laws(job(3, how=PART), add)

    def test_a_checkpoint_loaded_on_one_rank_before_sharding_is_a_failure(self) -> None:
        evidence = self.sharded(lambda rank: Shard(1, f"{rank}", rank == 0, True))
        of = diagnose(evidence)
        assert (of.verdict, of.culprits) == ("wrong-weights", ())
        assert "rank 0 loaded the whole parameter at train.py:5 main" in of.cause
        assert "ranks 1, 2 did not" in of.cause
        assert broken_law(evidence) == of.cause

    @pytest.mark.parametrize(
        "shard",
        [
            lambda rank: Shard(1, f"{rank}", False, True),  # seeds of their own
            lambda _: Shard(1, "1", True, True),  # all loaded the same
            lambda rank: Shard(1, "1", rank == 0, True),  # the others had it already
            lambda rank: Shard(1, f"{rank}", rank == 0, False),  # something was loaded afterwards
            lambda rank: Shard(1, f"{rank}", rank == 0, True) if rank < 2 else None,  # unknown
        ],
    )
    def test_healthy_or_unknown_shards(self, shard: Callable[[int], Shard | None]) -> None:
        assert diagnose(self.sharded(shard)).verdict == "clean"

    def loaded(
        self, load: Load, files: tuple[str, ...] = (), into: tuple[str, ...] = ()
    ) -> tuple[str, ...]:
        def add(rank: int, laws: RankLaws) -> RankLaws:
            rows = {"optimizer_file": files, "optimizer_load": into}
            others = {kind: tuple({"line": one} for one in of) for kind, of in rows.items()}
            return replace(laws, loads=(load,), others=others)

        of = diagnose(with_laws(job(2), add))
        assert of.verdict == "clean"
        return of.notes

    def test_names_that_were_left_out_on_both_sides_are_a_note(self) -> None:
        (note,) = self.loaded(Load("train.py:5 main", 2, ("a.w",), ("b.w", "c.w"), (1, 2)))
        assert "left out 1 name of the model (a.w) and 2 names of the checkpoint" in note

    @pytest.mark.parametrize("again", [None, 2, 0])
    def test_names_with_another_prefix(self, again: int | None) -> None:
        """Some programs try the names as they are first, and change them if none fits."""
        first = Load("train.py:5 main", 0, ("a.w", "a.b"), ("module.a.w", "module.a.b"), (2, 2))
        more = () if again is None else (Load("train.py:7 main", 2, (), (), (again, again)),)

        def add(_: int, laws: RankLaws) -> RankLaws:
            return replace(laws, loads=(first, *more))

        of = diagnose(with_laws(job(2), add))
        assert len(of.suspicious) == (again != 0) and len(of.notes) == (again == 0)
        assert again == 0 or "the same names but for a prefix" in of.suspicious[0]

    def test_a_new_head_is_no_note(self) -> None:
        assert not self.loaded(Load("train.py:5 main", 2, ("head.w",), (), (1, 0)))

    def test_an_optimizer_that_was_forgotten_is_a_note(self) -> None:
        (note,) = self.loaded(Load("", 2), ("train.py:4 main",))
        assert note.startswith("The checkpoint loaded at train.py:4 main has the state of an")
        assert "AdamW began without state" in note

    @pytest.mark.parametrize("left", [True, False])
    def test_states_that_a_load_did_not_ask_for(self, left: bool) -> None:
        event = {"line": "train.py:4 main", "names": ["optimizer.state.0.exp_avg"], "count": 8}

        def add(_rank: int, laws: RankLaws) -> RankLaws:
            return replace(laws, others={"states_left": (event,) if left else ()})

        of = diagnose(with_laws(job(2), add))
        assert of.verdict == ("resume-drift" if left else "clean")
        assert ("loaded at train.py:4 main has 8 values of an optimizer" in of.cause) is left

    @pytest.mark.parametrize(
        ("parameters", "files", "into"),
        [(2, ("train.py:4 main",), ("train.py:6 main",)), (2, (), ()), (0, ("a.py:4 b",), ())],
    )
    def test_one_that_was_loaded_or_not_in_the_file_is_no_note(
        self, parameters: int, files: tuple[str, ...], into: tuple[str, ...]
    ) -> None:
        assert not self.loaded(Load("", parameters), files, into)


class TestRestart:
    """Both ranks begin with the weights of step 3, after whose save the job was restarted."""

    def found(self, change: Callable[[LawCheck], LawCheck]) -> tuple[str, ...]:
        full = {"exp_avg": ("m1", "m2"), "step": ("3", "3")}

        def first(_rank: int, one: LawCheck) -> LawCheck:
            return replace(one, state=full, hyper=({"lr": "0.1"},)) if one.count == 0 else one

        evidence = job(2, first)
        kept = {}
        for rank, seen in evidence.ranks.items():
            assert seen.laws is not None
            saved = replace(seen.laws.checks[0], count=3, step=4)
            kept[rank] = (saved,)
        changed = with_laws(
            evidence,
            lambda _rank, laws: replace(laws, checks=(change(laws.checks[0]), *laws.checks[1:])),
        )
        return diagnose(replace(changed, earlier=kept)).suspicious

    def test_with_everything_it_is_quiet(self) -> None:
        assert self.found(lambda one: one) == ()

    def test_other_weights_are_of_another_save(self) -> None:
        assert self.found(lambda one: replace(one, params=("x", "y"), state={})) == ()

    def test_without_moments(self) -> None:
        (text,) = self.found(lambda one: replace(one, state={}))
        assert "began with its weights of step 4 of an earlier attempt, after a save" in text
        assert "without exp_avg, step of 2 parameters" in text
        assert "--allow restart-forgets" in text

    def test_with_another_count_and_rate(self) -> None:
        def change(one: LawCheck) -> LawCheck:
            reset = {**one.state, "step": ("0", "0")}
            return replace(one, state=reset, hyper=({"lr": "0.2"},))

        found = " ".join(self.found(change))
        assert "with other values of step" in found
        assert "with lr 0.2 instead of 0.1" in found
