"""When a difference between two ways counts as a finding. The relations here are planted."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moediag.lab.relations import compiled, conditions
from moediag.lab.relations.adapters import Adapters
from moediag.lab.relations.cached_steps import CachedSteps
from moediag.lab.relations.known_relations import RELATIONS
from moediag.lab.relations.relation import Case, Relation, Tensors, Undecided
from moediag.lab.relations.resumed_training import ResumedTraining
from moediag.lab.step.models.plan_names import matches, mentioned
from moediag.protocol import CONDITIONS, SIZES
from moediag.recorder.not_applicable import NotApplicable, NotInStack

CASE = Case(family=None)  # type: ignore[arg-type] - planted relations build nothing
RIGHT = torch.linspace(-1.0, 1.0, 16)


class Planted(Relation):
    """``error``: what the other way adds to the right result."""

    name = "planted"
    route = "declared"

    def __init__(
        self, error: Callable[[Case], float], route: bool | None = True, exact: bool = False
    ) -> None:
        self.error = error
        self.answer = route
        self.exact = exact
        self.calls = 0
        self.noise = 0.0
        self.rounding = 0.0  # of the plain way, when every weight is nudged

    def ways(self, case: Case) -> Sequence[str]:
        return ("other",)

    def plain(self, case: Case, way: str) -> Tensors:
        self.calls += 1
        extra = self.noise * self.calls + (self.rounding if case.nudged else 0.0)
        return {"logits": RIGHT.to(case.dtype) + extra, "gradient of w": RIGHT.to(case.dtype)}

    def other(self, case: Case, way: str) -> Tensors:
        right = RIGHT.to(case.dtype)
        return {"logits": right + self.error(case), "gradient of w": right}

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool | None:
        assert wrong == ("logits",)
        return self.answer


def judged(relation: Relation) -> Any:
    (found,) = conditions.outcomes(relation, CASE)
    return found


def test_a_wrong_way_is_confirmed_if_every_condition_is_met() -> None:
    found = judged(Planted(lambda case: 0.1))
    assert (found.holds, found.kind, found.what) == (False, "wrong", "logits")
    assert found.confirmed
    assert found.conditions == dict.fromkeys(CONDITIONS, True)
    assert found.error == pytest.approx(0.1)


def test_a_right_way_holds_and_costs_two_computations() -> None:
    relation = Planted(lambda case: 0.0)
    found = judged(relation)
    assert found.holds is True
    assert found.conditions == {}
    assert relation.calls == 1


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (lambda case: 0.1 * (case.seed == 0), "other-seed"),
        (lambda case: 0.1 * (case.size == SIZES[0]), "other-size"),
        (lambda case: 0.1 * (case.dtype is torch.float32), "float64"),
        # It shrinks with the rounding: there it is still wrong, but a hundredth of what it was.
        (lambda case: 0.1 if case.dtype is torch.float32 else 1e-3, "float64"),
    ],
)
def test_what_shows_in_one_setting_only_is_not_confirmed(
    error: Callable[[Case], float], failed: str
) -> None:
    found = judged(Planted(error))
    assert (found.holds, found.confirmed, found.failed) == (False, False, failed)


def test_what_shows_once_is_not_confirmed() -> None:
    shown = iter([0.1] + 9 * [0.0])
    found = judged(Planted(lambda case: next(shown)))
    assert (found.confirmed, found.failed) == (False, "twice")


@pytest.mark.parametrize("answer", [False, None])
def test_without_a_second_route_nothing_is_confirmed(answer: bool | None) -> None:
    found = judged(Planted(lambda case: 0.1, route=answer))
    assert (found.confirmed, found.failed) == (False, "second-route")


def test_a_second_route_that_fails_confirms_nothing() -> None:
    class Broken(Planted):
        def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool | None:
            raise ValueError("cannot be computed")

    class Without(Planted):
        route = ""

    for kind in (Broken, Without):
        found = judged(kind(lambda case: 0.1))
        assert (found.confirmed, found.failed) == (False, "second-route")


def test_a_plain_way_that_disagrees_with_itself_is_a_failed_control() -> None:
    relation = Planted(lambda case: 0.1)
    relation.noise = 1e-3
    found = judged(relation)
    assert (found.confirmed, found.failed) == (False, "control")


def test_a_difference_as_large_as_rounding_is_none() -> None:
    relation = Planted(lambda case: 1e-3)
    relation.rounding = 1e-4
    assert judged(relation).holds is True


def test_where_rounding_changes_an_output_nothing_is_decided() -> None:
    relation = Planted(lambda case: 0.1)
    relation.rounding = 0.1
    found = judged(relation)
    assert found.holds is None
    assert "one rounding of the weights changes logits" in found.text


def test_an_exact_relation_needs_the_same_bytes_and_no_float64() -> None:
    assert judged(Planted(lambda case: 0.0, exact=True)).holds is True
    found = judged(Planted(lambda case: 1e-6, exact=True))
    assert found.confirmed
    assert found.conditions["float64"] is None


def test_an_exception_of_the_other_way_is_a_crash_with_its_place() -> None:
    def fail(case: Case) -> float:
        raise KeyError("no such expert")

    found = judged(Planted(fail))
    assert (found.kind, found.what) == ("crash", "KeyError in test_relations.py fail")
    assert found.confirmed
    assert found.conditions["second-route"] is None


def test_an_exception_of_the_plain_way_decides_nothing() -> None:
    class Broken(Planted):
        def plain(self, case: Case, way: str) -> Tensors:
            raise ValueError("cannot be computed")

    found = judged(Broken(lambda case: 0.0))
    assert found.holds is None
    assert "ValueError: cannot be computed" in found.text


def test_a_missing_tensor_differs() -> None:
    class Lost(Planted):
        def other(self, case: Case, way: str) -> Tensors:
            return {"logits": RIGHT}

    plain = Lost(lambda case: 0.0).plain(CASE, "")
    found = conditions.compare(plain, {"logits": RIGHT}, dict.fromkeys(plain, 1.0))
    assert found.names == ("gradient of w",)
    assert found.what == "gradients"


def test_a_tensor_that_is_zero_up_to_rounding_does_not_differ() -> None:
    plain = {"gradient of a": RIGHT, "gradient of b": torch.full((4,), 1e-9)}
    other = {"gradient of a": RIGHT, "gradient of b": torch.full((4,), -1e-9)}
    assert not conditions.compare(plain, other, dict.fromkeys(plain, 1e-4)).shows


def test_ways_that_do_not_apply_are_left_out() -> None:
    class Some(Planted):
        def other(self, case: Case, way: str) -> Tensors:
            raise NotApplicable("the family has no such thing")

    with pytest.raises(NotApplicable, match="no such thing"):
        conditions.outcomes(Some(lambda case: 0.0), CASE)


def test_each_relation_says_what_holds_and_how_it_is_confirmed() -> None:
    names = [relation.name for relation in RELATIONS]
    assert len(set(names)) == len(names)
    assert all(relation.says and relation.route for relation in RELATIONS)


@pytest.mark.parametrize(
    ("relation", "package"), [(Adapters(), "peft"), (ResumedTraining(), "accelerate")]
)
def test_a_relation_says_which_package_the_stack_lacks(
    relation: Relation, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(NotInStack, match=f"{package} is not in this stack"):
        conditions.outcomes(relation, CASE)


def test_a_relation_may_say_what_differs() -> None:
    class Named(Planted):
        def quantity(self, wrong: Sequence[str]) -> str:
            return f"{len(wrong)} outputs"

    assert judged(Named(lambda case: 0.1)).what == "1 outputs"
    assert judged(Named(lambda case: 0.0)).what == ""


def test_a_way_that_says_nothing_is_undecided_with_its_reason() -> None:
    def late(case: Case) -> float:
        raise Undecided("not compiled in 20 s of CPU time")

    found = judged(Planted(late))
    assert (found.holds, found.kind, found.text) == (None, "", "not compiled in 20 s of CPU time")


def test_a_limit_of_cpu_time_ends_what_swallows_exceptions() -> None:
    def compile_for_ever() -> None:
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(Undecided, match="too long"), compiled._limited(0.01, "too long"):
        compile_for_ever()
    with compiled._limited(60.0, "too long"):
        assert signal.getitimer(signal.ITIMER_PROF)[0] > 0
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0, "nothing is left behind"


def test_a_resume_tells_lost_weights_from_lost_optimizer_state() -> None:
    resume = ResumedTraining()
    last = ["after step 5: w", "after step 5: exp_avg of w"]
    assert resume.quantity(last) == "weights at the end"
    assert resume.quantity([*last, "after step 2: w"]) == "weights after loading"
    lost = "after step 2: exp_avg of w"
    assert resume.quantity([*last, lost]) == "optimizer state after loading"


def test_a_plan_pattern_is_relative_to_the_base_model() -> None:
    assert matches("layers.*.mlp.experts", "model.layers.0.mlp.experts")
    assert not matches("layers.*.mlp.experts", "model.layers.0.mlp.experts.down_proj")
    assert not matches("layers.*.expert", "model.layers.0.mlp.expert")
    source = "self.layers = 1\nself.mlp = 2\n"
    assert mentioned("layers.*.mlp.weight", source)
    assert not mentioned("layers.*.mlp.experts", source)


class Decoder(torch.nn.Module):
    """Sums of the tokens so far, as logits of one entry; the sum is its cache. ``forgets``: the
    cache starts again."""

    def __init__(self, name: str, forgets: bool = False) -> None:
        super().__init__()
        self.name, self.forgets = name, forgets

    def step(self, input_ids: Any, cache: Any) -> Any:
        before = 0 if cache is None or self.forgets else cache
        sums = before + input_ids.cumsum(1)
        return SimpleNamespace(logits=sums[..., None].float(), **{self.name: sums[:, -1:]})


class StateSpace(Decoder):
    def forward(self, input_ids: Any, cache_params: Any = None, use_cache: bool = False) -> Any:
        return self.step(input_ids, cache_params)


class Attention(Decoder):
    def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = False) -> Any:
        return self.step(input_ids, past_key_values)


class Renamed(Decoder):  # from 5.24 on
    def forward(self, input_ids: Any, cache: Any = None, use_cache: bool = False) -> Any:
        return self.step(input_ids, cache)


class Encoder(Decoder):
    def forward(self, input_ids: Any) -> Any:
        return self.step(input_ids, None)


class OfModel(Case):
    """A case of a model that is given."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(family=None)  # type: ignore[arg-type]
        object.__setattr__(self, "given", model)

    def model(self, train: bool = False, **settings: Any) -> Any:
        return self.__dict__["given"]

    def tokens(self, rows: int = 2, length: int = 12, name: int = 0) -> Any:
        return torch.arange(1, rows * length + 1).reshape(rows, length)


@pytest.mark.parametrize(
    "named",
    [(StateSpace, "cache_params"), (Attention, "past_key_values"), (Renamed, "cache")],
    ids=lambda n: n[1],
)
@pytest.mark.parametrize("way", CachedSteps().ways(CASE))
def test_a_cache_by_any_name_is_passed_on(named: Any, way: str) -> None:
    kind, name = named
    for forgets in (False, True):
        case = OfModel(kind(name, forgets))
        plain, other = CachedSteps().plain(case, way), CachedSteps().other(case, way)
        assert torch.equal(plain["logits"], other["logits"]) is not forgets


def test_a_model_without_a_cache_is_not_compared() -> None:
    with pytest.raises(NotApplicable, match="takes no cache"):
        CachedSteps().other(OfModel(Encoder("logits_only")), "token-by-token")
