"""Laws of what feeds and drives a training loop: samplers, autocast, schedulers and optimizers that
are made anew, on recorded data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.diagnosis.laws import sample_sources
from moediag.evidence.law_model import PLAIN, REDUCED, LawCheck, ModelInputs, RankLaws
from moediag.result import Diagnosis
from tests.unit.law_evidence import STEPS, check, job, with_events


def sources(since: int = 0, change: Any = None, **odd: Any) -> Diagnosis:
    """Of a job whose model was called with other values on each rank; ``odd`` is so on rank 1.
    ``change`` is applied to each record, and then ``odd`` are events."""
    evidence = with_events(job(2), **odd) if change else job(2)
    odd = {} if change else odd
    ranks = {}
    for rank, seen in evidence.ranks.items():
        of = ModelInputs(
            1, 0, f"x{rank}", (0, 1), "DistributedSampler", 2, rank, made="train.py:4 main",
            epoch=1, drawn=64, given=64,
        )  # fmt: skip
        of = change(rank, of) if change else of
        inputs = [replace(of, step=s, **(odd if rank and s > since else {})) for s in STEPS]
        laws = replace(seen.laws or RankLaws(), inputs=tuple(inputs))
        ranks[rank] = replace(seen, laws=laws)
    return diagnose(replace(evidence, ranks=ranks))


class TestSources:
    @pytest.mark.parametrize(
        ("odd", "told"),
        [
            ({"seed": 1}, "a different seed on each of these ranks (0 on rank 0, 1 on rank 1)"),
            ({"epoch": 0}, "Call set_epoch on every rank"),
            ({"drawn": 16}, "for a dataset of 16 samples, and its loader has another one of 64"),
        ],
    )
    def test_what_differs_is_suspicious(self, odd: dict[str, Any], told: str) -> None:
        (text,) = sources(**odd).suspicious
        assert told in text

    @pytest.mark.parametrize(
        "odd",
        [{}, {"replicas": 0, "seed": 7}, {"over": (0, 1, 2), "seed": 7}, {"drawn": 0}],
        ids=["healthy", "without a sampler on rank 1", "of other ranks", "of unknown length"],
    )
    def test_healthy_and_without_evidence(self, odd: dict[str, Any]) -> None:
        of = sources(**odd)
        assert (of.verdict, of.suspicious) == ("clean", ())

    def test_one_step_is_not_enough(self) -> None:
        assert not sources(STEPS[-2], seed=1).suspicious

    @pytest.mark.parametrize(
        ("order", "data", "found"),
        [
            ("[2, 0]", "d", True),
            ("[1, 3]", "d", False),
            ("[2, 0]", "e", False),
            ("[2, 0]", "", False),
        ],
        ids=["undivided", "one order, which the program may divide", "other data", "unknown data"],
    )
    def test_each_rank_shuffles_all_samples(self, order: str, data: str, found: bool) -> None:
        def add(rank: int, one: ModelInputs) -> ModelInputs:
            known = ("d", "[1, 3]") if not rank else (data, order)
            return replace(
                one, sampler="RandomSampler", replicas=0, number=-1, drawn=0,
                data=known[0], order=known[1],
            )  # fmt: skip

        of = sources(change=add)
        assert of.verdict == "clean" and bool(of.suspicious) == found
        assert not found or "Each rank draws all 64 samples of the same" in of.suspicious[0]

    @pytest.mark.parametrize(
        ("rows", "data", "found"),
        [(4, "d", True), (2, "d", False), (0, "d", False), (4, "", False)],
    )
    def test_each_rank_draws_all_samples_in_one_order(
        self, rows: int, data: str, found: bool
    ) -> None:
        """What the model is called with may differ, as noise does. A rank may take its rows."""

        def add(rank: int, one: ModelInputs) -> ModelInputs:
            return replace(
                one, sampler="RandomSampler", replicas=0, number=-1, drawn=0, data=data,
                order="[1, 3]", batch=4, rows=rows,
            )  # fmt: skip

        texts = sources(change=add).suspicious
        assert any("in the same order, though" in text for text in texts) == found

    def test_parts_of_the_same_samples(self) -> None:
        """Ranks that divide each sequence read the same ones."""
        of = [ModelInputs(1, 0, "a", (0, 1), data="d", order="[1]", batch=4, rows=4)] * 2
        assert sample_sources._undivided(of, split=False)
        assert not sample_sources._undivided(of, split=True)

    @pytest.mark.parametrize(("number", "found"), [(0, True), (1, False)])
    def test_all_ranks_ask_for_one_part(self, number: int, found: bool) -> None:
        texts = sources(change=lambda rank, one: replace(one, number=number * rank)).suspicious
        assert any("for part 0 of 2" in text for text in texts) == found

    @pytest.mark.parametrize(
        ("steps", "since", "told"), [(STEPS, 0, True), (STEPS[:1], 0, False), (STEPS, 9, False)],
        ids=["in all steps", "in one step", "on one rank"],
    )  # fmt: skip
    def test_a_loader_that_is_divided_beside_one_that_is_not(
        self, steps: Sequence[int], since: int, told: bool
    ) -> None:
        one = {"sampler": "RandomSampler", "given": 96, "made": "train.py:7 main",
               "divided": "train.py:5 main"}  # fmt: skip
        beside = lambda rank: [{"step": s, **one} for s in steps if s > since * rank]  # noqa: E731
        whole = lambda rank, of: replace(of, sampler="", replicas=0, drawn=0)  # noqa: E731
        found = sources(change=whole, beside=beside).suspicious
        assert bool(found) is told
        assert not told or (
            "the RandomSampler of the loader at train.py:7 main, 96 samples), and from its part of "
            "those of another, which a sampler divides (loader at train.py:5 main)" in found[0]
        )


def settings(parts: Any = (), since: int = 0, over: Any = (0, 1), **odd: tuple[int, str]) -> Any:
    """Events of a healthy rank 0; ``odd`` is so on rank 1: "what" -> how many, value."""
    known = {"autocast = off": [1, ""], "p of Dropout = 0.1": [12, "h.0"]}

    def of(rank: int) -> Any:
        changed = {text: [n, "h.1"] for text, n in odd.items()}
        return [
            {"step": step, "over": over, "parts": parts,
             "of": {**known, **(changed if rank and step > since else {})}}
            for step in STEPS
        ]  # fmt: skip

    return of


class TestSettings:
    def found(self, **events: Any) -> tuple[str, ...]:
        of = sources(change=lambda _, one: replace(one, sampler="", replicas=0), **events)
        assert of.verdict == "clean"
        return of.suspicious

    def test_what_differs_in_all_steps_is_suspicious(self) -> None:
        odd: Any = {"p of Dropout = 0.1": 11, "p of Dropout = 0.5": 1}
        (text,) = self.found(settings=settings(**odd))
        assert "p of Dropout (h.0, h.1) is 0.1 of 12 on rank 0, 0.1 of 11, 0.5 on rank 1" in text

    def test_what_differs_later_is_suspicious_unless_it_changes(self) -> None:
        odd: Any = {"p of Dropout = 0.5": 12}
        (text,) = self.found(settings=settings(since=STEPS[0], **odd))
        assert text.startswith("In steps 2, 3, 6 ranks 0, 1 average")

        def changing(rank: int) -> Any:
            rows = settings()(rank)
            return [{**row, "of": {f"a = {row['step'] if rank else 0}": [1, ""]}} for row in rows]

        assert not self.found(settings=changing)

    def test_weights_and_norms(self) -> None:
        def losses(rank: int) -> Any:
            rows = [{"direct": False, "of": [], "means": [1.0 - rank / 2]}]
            return [{"step": step, "line": "train.py:5 main", "backwards": rows} for step in STEPS]

        (text,) = self.found(settings=settings(), losses=losses)
        assert "weight of a mean in the loss (train.py:5 main) is 1 on rank 0, 0.5 on" in text

    @pytest.mark.parametrize(
        "events",
        [{}, {"settings": settings()}, {"settings": settings(**{"a = 1": 1}, since=STEPS[-2])},
         {"settings": settings(**{"a = 1": 1}, over=(0, 1, 2))},
         {"settings": lambda rank: [] if rank else settings(**{"a = 1": 1})(1)},
         {"settings": settings(**{"p of Dropout = 0.1": 12})}],
        ids=["not recorded", "alike", "in some steps", "of others", "a rank without records",
             "of other modules"],
    )  # fmt: skip
    def test_healthy_and_without_evidence(self, events: Any) -> None:
        assert not self.found(**events)

    def test_a_part_in_evaluation_mode(self) -> None:
        (text,) = self.found(settings=settings(parts=[["encoder", ["Dropout"]]]))
        assert "1 part of the model (encoder) was in evaluation mode" in text

    def test_a_part_that_was_in_evaluation_mode_in_one_step_or_on_one_rank(self) -> None:
        parts = [["encoder", ["Dropout"]]]
        last = lambda _: settings()(0)[:-1] + settings(parts=parts)(0)[-1:]  # noqa: E731
        one = lambda rank: settings(parts=parts if rank else [])(0)  # noqa: E731
        assert not self.found(settings=last) and not self.found(settings=one)


def schedulers(*optimizers: int, kind: str = "LambdaLR", of: int = 2) -> Any:
    """A scheduler for each number of an optimizer, of ``of`` optimizers."""
    return [
        {"step": step, "number": number, "name": kind, "line": "train.py:9 main", "calls": step,
         "updates": step, "optimizer": optimizer, "optimizers": of}
        for step in STEPS
        for number, optimizer in enumerate(optimizers)
    ]  # fmt: skip


class TestSchedulers:
    def test_all_schedulers_of_one_optimizer_are_suspicious(self) -> None:
        (text,) = diagnose(with_events(job(1), scheduled=schedulers(0, 0))).suspicious
        assert "All 2 schedulers of class LambdaLR that step at train.py:9 main" in text

    @pytest.mark.parametrize("events", [schedulers(0, 1), schedulers(0, 0, of=1), schedulers(0)])
    def test_one_for_each_two_for_one_and_one_alone(self, events: Any) -> None:
        assert not diagnose(with_events(job(1), scheduled=events)).suspicious

    @pytest.mark.parametrize(
        ("change", "found"),
        [({}, True), ({"optimizer": 0}, False), ({"optimizer": -1}, False),
         ({"name": "StepLR"}, False), ({"updates": 2}, False), ({"calls": 1}, False)],
        ids=["other optimizer", "the same", "does not step", "other class", "early", "steps"],
    )  # fmt: skip
    def test_one_that_never_steps_beside_another_one(
        self, change: dict[str, Any], found: bool
    ) -> None:
        rows = [{**one, **({"calls": 0, **change} if one["number"] else {})}
                for one in schedulers(0, 1)]  # fmt: skip
        texts = diagnose(with_events(job(1), scheduled=rows)).suspicious
        assert any("LambdaLR never steps" in text for text in texts) == found

    @pytest.mark.parametrize("prepared", [True, False])
    def test_accelerate_steps_a_prepared_one_once_for_each_rank(self, prepared: bool) -> None:
        events = tuple({**one, "calls": 2 * one["updates"], "prepared": prepared}
                       for one in schedulers(0))  # fmt: skip
        of = diagnose(with_events(job(2), scheduled=events))
        assert bool(of.suspicious) != prepared
        assert (
            any("accelerate steps a prepared LambdaLR 2 times" in one for one in of.notes)
            == prepared
        )

    @pytest.mark.parametrize(("calls", "told"), [((3, 9, 26), True), ((1, 5, 12), False)])
    def test_the_last_update_of_a_pass_may_have_fewer_micro_batches(
        self, calls: tuple[int, ...], told: bool
    ) -> None:
        """Calls after 1, 3 and 9 updates: a scaler leaves out updates, which is nothing."""
        rows = [
            {**schedulers(0)[0], "step": n, "calls": call, "updates": n}
            for call, n in zip(calls, (1, 3, 9), strict=True)
        ]
        text = diagnose(with_events(job(1), scheduled=rows)).suspicious
        assert any("is called 3 times for each update" in one for one in text) is told


class TestRenewedOptimizers:
    def found(
        self, *firsts: int, how: str = REDUCED, state: bool = True, late: int = 0, loaded: int = 0
    ) -> Diagnosis:
        """An optimizer that is made anew before each of these steps, and checked ``late`` steps
        after its first; its state has counted ``loaded`` updates more than it made."""

        def own(rank: int) -> RankLaws:
            checks = []
            for step in range(1, 12):
                number = sum(step >= first for first in firsts)
                begun = max(first for first in (1, *firsts) if first <= step)
                one = check(step, (0, 1), how)
                kept = one.state if state and step > begun else {}
                new: LawCheck = replace(one, key=f"a.{number}", count=step - begun, state=kept)
                new = replace(new, age=new.count + loaded if kept else -1)
                checks += [new] if new.count >= late else []
            return RankLaws(tuple(checks))

        evidence = job(2)
        ranks = {r: replace(seen, laws=own(r)) for r, seen in evidence.ranks.items()}
        return diagnose(replace(evidence, ranks=ranks))

    def test_an_optimizer_for_each_epoch_is_suspicious(self) -> None:
        (text,) = self.found(4, 8).suspicious
        assert "On ranks 0, 1 the AdamW that steps at train.py:9 main was made anew" in text
        assert "before steps 4, 8" in text

    def test_one_that_is_first_checked_later(self) -> None:
        (text,) = self.found(4, 8, late=2).suspicious
        assert "before steps 6, 10" in text
        assert not self.found(4, 8, late=2, loaded=3).suspicious

    def test_once_without_state_or_without_a_wrapper(self) -> None:
        assert not self.found(4).suspicious
        assert not self.found(4, 8, state=False).suspicious
        assert not self.found(4, 8, how=PLAIN).suspicious  # clients of federated training


class TestEmptiedState:
    def found(self, ages: dict[int, tuple[float, ...]]) -> tuple[str, ...]:
        """What the state of one optimizer had counted on each rank at three checks."""

        def own(rank: int) -> RankLaws:
            return RankLaws(
                tuple(
                    replace(check(step, (0, 1), REDUCED), key="a.0", count=step - 1, age=age)
                    for step, age in zip((3, 6, 12), ages[rank], strict=True)
                )
            )

        evidence = job(2)
        ranks = {r: replace(seen, laws=own(r)) for r, seen in evidence.ranks.items()}
        return diagnose(replace(evidence, ranks=ranks)).suspicious

    def test_one_rank_whose_state_began_again(self) -> None:
        (text,) = self.found({0: (2, 5, 11), 1: (2, 5, 3)})
        assert "On rank 1 alone, before step 12, something emptied the state" in text
        assert "it had counted 3 of 11 updates" in text

    def test_all_ranks_once_may_be_on_purpose(self) -> None:
        assert not self.found({0: (2, 5, 3), 1: (2, 5, 3)})
        assert self.found({0: (2, 1, 0), 1: (2, 1, 0)})

    def test_states_that_count_or_are_unknown(self) -> None:
        assert not self.found({0: (2, 5, 11), 1: (2, 5, 11)})
        assert not self.found({0: (2, 5, 11), 1: (-1, -1, -1)})
        assert not self.found({0: (2, 5, 11), 1: (2, -1, 11)})


@pytest.mark.parametrize("who", [(0, 1), (1,), ()])
def test_workers_that_give_the_same_batches(who: tuple[int, ...]) -> None:
    row = {"step": 1, "line": "", "made": "train.py:4 main", "workers": 4}
    texts = sources(change=lambda _, of: of, repeated=lambda r: (row,) * (r in who)).suspicious
    assert ["all 4 workers of the data loader at train.py:4 main" in t for t in texts] == [
        True
    ] * bool(who)


@pytest.mark.parametrize(
    ("autocast", "scaled", "steps", "found"),
    [("cuda, torch.float16", False, 4, True), ("cuda, torch.float16", True, 4, False),
     ("cpu, torch.bfloat16", False, 4, False), ("off", False, 4, False),
     ("cuda, torch.float16", False, 1, False), ("cuda, torch.float16", False, 0, False)],
    ids=["unscaled", "scaled", "bfloat16", "off", "one step", "not recorded"],
)  # fmt: skip
def test_float16_without_a_scaler(autocast: str, scaled: bool, steps: int, found: bool) -> None:
    numbers = {"lr": "0.01", **({"loss_scale": "1024.0"} if scaled else {})}
    rows = [
        {"step": step, "over": [0, 1], "parts": [], "of": {f"autocast = {autocast}": [1, ""]}}
        for step in STEPS[:steps]
    ]
    evidence = job(2, lambda _, one: replace(one, hyper=(numbers,)))
    texts = diagnose(with_events(evidence, settings=rows)).suspicious
    assert ["optimizer steps at train.py:9 main without a GradScaler" in t for t in texts] == [
        True
    ] * found


SHUFFLED = (9, 14, 11, 7, 13, 2, 15, 10, 5, 1, 6, 12, 0, 4, 8, 3)  # the same, in another order


class TestDrawn:
    """The samples that ranks drew, four in each batch, of sixteen for each of two ranks."""

    def found(
        self, draws: Callable[[int, int], int], update: Callable[[int], int] = int, **more: Any
    ) -> tuple[str, ...]:
        """``draws``: the sample of rank and position. ``update``: those before a batch."""

        def drawn(rank: int) -> tuple[dict[str, Any], ...]:
            rows = [[f"{draws(rank, 4 * n + k)}" for k in range(4)] for n in range(4)]
            batches = [["train.py:3 main", 1, n + 1, update(n), row] for n, row in enumerate(rows)]
            return tuple({"step": s, "batches": batches} for s in STEPS[:1])

        change = lambda _, one: replace(one, replicas=0, **more)  # noqa: E731
        return sources(change=change, drawn=drawn).suspicious

    def test_the_same_samples_in_other_batches(self) -> None:
        (text,) = self.found(lambda rank, at: SHUFFLED[at] if rank else at)
        assert "at train.py:3 main ranks 0, 1" in text and "drew 9 of the same samples" in text

    @pytest.mark.parametrize(
        "draws",
        [
            lambda rank, at: 2 * at + rank,
            lambda rank, at: at,
            lambda rank, at: (at + 4 * rank) % 100,
            lambda rank, at: 2 * at + rank if at < 12 else at,
            lambda rank, at: SHUFFLED[at] % 15 if rank else at % 15,
            lambda rank, at: at + 8 * rank,
        ],
        ids=[
            "divided",
            "the same batch",
            "the next batch",
            "a few that fill up",
            "at random",
            "a text that repeats itself",
        ],
    )
    def test_healthy(self, draws: Callable[[int, int], int]) -> None:
        assert not self.found(draws)

    def test_an_evaluation_and_ranks_that_average_nothing(self) -> None:
        draws = lambda rank, at: SHUFFLED[at] if rank else at  # noqa: E731
        assert not self.found(draws, lambda _: 7)
        assert not self.found(draws, lambda batch: 10 * batch)
        assert not self.found(draws, over=())

    def test_without_the_records_of_a_rank(self) -> None:
        batch = ["t.py:3 f", 1, 1, 1, ["1"]]
        evidence = with_events(job(2), drawn=lambda rank: ({"batches": [batch]},) * (1 - rank))
        assert not diagnose(evidence).suspicious
