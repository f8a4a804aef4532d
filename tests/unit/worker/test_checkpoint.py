"""Requesting a layout from each release, and errors if it is unsupported."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import nn

from moediag.lab.step import preparation
from moediag.lab.step.models import checkpoint, tiny
from moediag.lab.step.models.tiny import Anatomy
from moediag.lab.step.shard import expert_parallel, fsdp2_internals
from moediag.lab.step.shard.kinds import kind_of
from moediag.lab.step.shard.wrapped import Wrapped, ep_rank
from moediag.protocol import ModelSpec, SkewSpec, StepSpec, Trial, WrapperSpec
from moediag.recorder.not_applicable import NotApplicable
from tests.unit.sharded import placed, rank_of

# Fields of DistributedConfig, by the release that added them.
FIELDS = {
    "5.12": ["enable_expert_parallel"],
    "5.13": ["tp_size", "tp_plan", "enable_expert_parallel", "fsdp_size"],
    "5.18": ["tp_size", "tp_plan", "enable_expert_parallel", "fsdp_size", "pp_size"],
    "5.22": ["tp_size", "tp_plan", "enable_expert_parallel", "fsdp_size", "pp_size", "ep_size",
             "ep_plan"],
    "5.23": ["tp_size", "tp_plan", "enable_expert_parallel", "fsdp_size", "pp_size", "ep_size",
             "ep_plan", "dp_replicate_size", "ep_implementation"],
}  # fmt: skip

NATIVE = {"native_fsdp": True}


def trial(
    layout: dict[str, int], kind: str = "transformers", batches: str = "per-replica", **wrapper: Any
) -> Trial:
    world = 1
    for size in layout.values():
        world *= size
    return Trial(
        "t", "s", "v", world_size=world, layout=layout, model=ModelSpec(source="checkpoint"),
        wrapper=WrapperSpec(kind=kind, **wrapper), skew=SkewSpec(batches=batches),
    )  # fmt: skip


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Simulates a release: the fields of its DistributedConfig, and its version."""

    def install(number: str) -> None:
        monkeypatch.setattr(checkpoint, "version", lambda: f"{number}.0")
        made = dataclasses.make_dataclass(
            "DistributedConfig", [(name, Any, None) for name in FIELDS.get(number, [])]
        )
        module = ModuleType("transformers.distributed")
        if number in FIELDS:
            module.DistributedConfig = made  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "transformers.distributed", module)

    return install


EP, EP_OF_TWO, FSDP = {"ep": 4}, {"dp_shard": 2, "ep": 2}, {"dp_shard": 4}
TP, TP_OF_TWO = {"tp": 2}, {"dp_shard": 2, "tp": 2}


@pytest.mark.parametrize(
    ("number", "asked_for", "spelt"),
    [
        ("5.12", trial(EP), {"enable_expert_parallel": True}),
        ("5.12", trial(EP, "accelerate"), {"enable_expert_parallel": True}),
        ("5.13", trial(EP, "fsdp2"), {"tp_size": 4, "enable_expert_parallel": True}),
        ("5.18", trial(EP, "accelerate"), {"tp_size": 4, "enable_expert_parallel": True}),
        ("5.18", trial(EP_OF_TWO, **NATIVE),
         {"fsdp_size": 2, "tp_size": 2, "enable_expert_parallel": True}),
        ("5.18", trial(FSDP, **NATIVE), {"fsdp_size": 4}),
        ("5.18", trial(FSDP, batches="distinct", **NATIVE), {"fsdp_size": 4}),
        ("5.22", trial(EP), {"tp_size": 4, "ep_size": 4, "tp_plan": {}}),
        ("5.22", trial(EP_OF_TWO, batches="distinct", **NATIVE), {"fsdp_size": 4, "ep_size": 2}),
        ("5.23", trial(EP), {"tp_size": 4, "ep_size": 4}),
        ("5.23", trial(EP, batches="distinct", **NATIVE), {"fsdp_size": 4, "ep_size": 4}),
        ("5.23", trial(FSDP, **NATIVE), {"fsdp_size": 4, "ep_size": 1}),
        ("5.23", trial(EP, "trl", batches="distinct"), {"tp_size": 4, "ep_size": 4}),
        ("5.13", trial(TP), {"tp_size": 2}),
        ("5.23", trial(TP, batches="distinct"), {"tp_size": 2}),
        ("5.23", trial(TP_OF_TWO, **NATIVE), {"fsdp_size": 2, "tp_size": 2}),
        # An argument of from_pretrained requests it, not DistributedConfig.
        ("5.12", trial(TP), None),
        ("4.53", trial(TP), None),
        # Nothing is requested.
        ("4.53", trial(FSDP, "fsdp2"), None),
        ("5.23", trial(FSDP, "accelerate"), None),
        ("5.23", trial({"dp_shard": 1}), None),
        # As written in the trial, whatever the release supports.
        ("5.12", trial(EP_OF_TWO, distributed_config={"tp_size": 9}), {"tp_size": 9}),
    ],
)  # fmt: skip
def test_each_release_gets_its_own_arguments(
    release: Any, number: str, asked_for: Trial, spelt: dict[str, Any] | None
) -> None:
    release(number)
    assert checkpoint.spelling(asked_for) == spelt


@pytest.mark.parametrize(
    ("number", "asked_for", "why"),
    [
        ("4.53", trial(EP), "transformers 4.53.0 has no DistributedConfig"),
        ("4.53", trial(FSDP, **NATIVE), "transformers 4.53.0 has no DistributedConfig"),
        ("5.12", trial(EP, batches="distinct", **NATIVE), "5.12.0 cannot shard by FSDP2"),
        ("5.12", trial(FSDP, **NATIVE), "5.12.0 cannot shard by FSDP2"),
        ("5.23", trial(EP_OF_TWO), "leaves 2 ranks for each expert.*needs an ep axis of 4"),
        ("5.12", trial(EP_OF_TWO, "accelerate"), "kind accelerate needs an ep axis of 4"),
        ("5.23", trial(FSDP), "leaves 4 ranks, and nothing shards or replicates"),
        ("5.23", trial(TP_OF_TWO), "leaves 2 ranks for each piece.*native_fsdp, or tp to 4"),
        ("5.12", trial(TP_OF_TWO, **NATIVE), "5.12.0 cannot shard by FSDP2"),
        ("5.23", trial({"tp": 4}), "4 heads and 2 key/value heads cannot be divided over 4 ranks"),
        # Ranks that sum results of different tokens.
        ("5.18", trial(EP, batches="distinct", **NATIVE), "share a batch.*is distinct: set it to"),
        ("5.12", trial(EP, "accelerate", "one-token"), "share a batch.*is one-token"),
        ("5.23", trial(EP, batches="distinct"), "5.23.0 lets the ranks of an ep axis share"),
    ],
)
def test_limits_of_a_release_are_reported(
    release: Any, number: str, asked_for: Trial, why: str
) -> None:
    release(number)
    with pytest.raises(NotApplicable, match=why):
        checkpoint.spelling(asked_for)


def test_the_arguments_are_noted(release: Any) -> None:
    release("5.23")
    asked = "from_pretrained was asked by DistributedConfig(tp_size=4, ep_size=4)"
    assert checkpoint.notes(trial(EP)) == [asked]
    assert checkpoint.notes(trial(FSDP, "accelerate")) == []
    built = dataclasses.replace(trial(EP), model=ModelSpec())
    assert checkpoint.notes(built) == []


def test_unsupported_arguments_are_not_applicable(release: Any) -> None:
    release("5.13")
    assert checkpoint.distributed_config({"tp_size": 4}).tp_size == 4
    with pytest.raises(NotApplicable, match=r"5\.13\.0 has no ep_size and no ep_plan"):
        checkpoint.distributed_config({"tp_size": 4, "ep_size": 4, "ep_plan": {}})


# ------------------------------------------------------------------------ refusals

REFUSING = "def prepare(why):\n    raise ValueError(why)\n"


def refusal(module: str) -> Any:
    namespace: dict[str, Any] = {"__name__": module}
    exec(REFUSING, namespace)
    return namespace["prepare"]


def test_a_refusal_by_the_library_is_not_applicable(release: Any) -> None:
    release("5.23")
    asked = {"fsdp_size": 4, "ep_size": 3}
    refuse = refusal("transformers.distributed.mixin")
    with (
        pytest.raises(
            NotApplicable, match=r"5\.23\.0 refuses .*\(fsdp_size=4, ep_size=3\): not so"
        ),
        checkpoint._refusals(trial(EP), asked),
    ):
        refuse("not so")


@pytest.mark.parametrize(
    ("module", "asked", "wrapper"),
    [
        ("transformers.modeling_utils", {"ep_size": 3}, {}),
        ("transformers.distributed.mixin", None, {}),
        # Written in the scenario, it is tried as requested.
        ("transformers.distributed.mixin", {"ep_size": 3}, {"distributed_config": {"ep_size": 3}}),
    ],
)
def test_other_errors_are_not_converted(
    module: str, asked: dict[str, Any] | None, wrapper: dict[str, Any]
) -> None:
    refuse = refusal(module)
    with (
        pytest.raises(ValueError, match="not so"),
        checkpoint._refusals(trial(EP, **wrapper), asked),
    ):
        refuse("not so")


# ------------------------------------------------------------------------ from_pretrained


@pytest.mark.parametrize(
    ("number", "word"),
    [("4.53", "torch_dtype"), ("4.56", "dtype"), ("5.0", "dtype"), ("10.1", "dtype")],
)
def test_dtype_argument_depends_on_the_release(release: Any, number: str, word: str) -> None:
    release(number)
    assert checkpoint.dtype_argument() == word


def test_an_unsupported_experts_implementation_is_not_applicable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered = ModuleType("transformers.integrations.moe")
    registered.ALL_EXPERTS_FUNCTIONS = {"grouped_mm": None}  # type: ignore[attr-defined]
    package = ModuleType("transformers.integrations")
    package.moe = registered  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.integrations", package)
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", registered)
    assert [checkpoint.known(word) for word in (None, "eager", "grouped_mm")] == [
        None, "eager", "grouped_mm",
    ]  # fmt: skip
    with pytest.raises(NotApplicable, match="no experts_implementation batched_mm"):
        checkpoint.known("batched_mm")
    monkeypatch.setitem(
        sys.modules, "transformers.integrations", ModuleType("transformers.integrations")
    )
    monkeypatch.delitem(sys.modules, "transformers.integrations.moe")
    assert checkpoint.known(None) is None
    with pytest.raises(NotApplicable, match="has no experts_implementation"):
        checkpoint.known("grouped_mm")
    # Also for a built model, which would ignore the argument.
    built = Trial("t", "s", "v", model=ModelSpec(experts_implementation="grouped_mm"))
    with pytest.raises(NotApplicable, match="has no experts_implementation"):
        preparation.prepare(built, torch.device("cpu"))


# ------------------------------------------------------------------------ a real checkpoint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_checkpoint_is_loaded_unchanged(tmp_path: Path, dtype: str) -> None:
    spec = ModelSpec(layers=1, experts=4, vocab=64, source="checkpoint", dtype=dtype)
    subject = Trial(
        "t", "s", "v", world_size=1, layout={"dp_shard": 1}, model=spec, step=StepSpec(seed=3),
        reference_path=str(tmp_path / "r.pt"),
    )  # fmt: skip
    saved = tiny.build(spec, 3)
    checkpoint.save(saved, subject.checkpoint_path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.checkpoint"], "and nothing half"
    loaded = checkpoint.from_checkpoint(subject, torch.device("cpu"))
    assert loaded.training
    truth = dict(saved.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == getattr(torch, dtype)
        assert torch.equal(parameter, truth[name]), name


# ------------------------------------------------------------------------ who shards the rest


def built(kind: Any, subject: Trial, model: nn.Module) -> Wrapped:
    return kind(model, Anatomy((), (), 4), subject)


def test_an_axis_that_a_wrapper_cannot_shard_is_not_applicable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ddp", "fsdp1", "zero3"):
        with pytest.raises(NotApplicable, match=f"wrapper {name} has no mesh axis ep"):
            kind_of(trial(EP, name))
    for name in ("transformers", "accelerate", "fsdp2"):
        assert issubclass(kind_of(trial(EP, name)), Wrapped)
        with pytest.raises(NotApplicable, match="has no mesh axis tp"):
            kind_of(trial({"ep": 2, "tp": 2}, name))
    for name in ("ddp", "fsdp1", "fsdp2", "accelerate", "zero3"):
        with pytest.raises(NotApplicable, match=f"wrapper {name} has no mesh axis tp"):
            kind_of(trial(TP, name))
    assert kind_of(trial(TP)) is expert_parallel.Transformers
    spelt = trial({"ep": 2, "tp": 2}, distributed_config={"tp_size": 2})
    assert kind_of(spelt) is expert_parallel.Transformers


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "transformers", "zero3"])
def test_an_axis_that_only_by_hand_has_is_refused_before_loading(kind: str) -> None:
    why = f"wrapper {kind} has no mesh axis etp; kind by-hand has"
    with pytest.raises(NotApplicable, match=why):
        preparation.prepare(trial({"etp": 2}, kind), torch.device("cpu"))


@pytest.mark.parametrize("axis", ["pp", "cp"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "transformers", "zero3"])
def test_only_fsdp2_runs_beside_a_pipeline_or_a_ring(axis: str, kind: str) -> None:
    with pytest.raises(NotApplicable, match=f"wrapper {kind} has no mesh axis {axis}"):
        kind_of(trial({axis: 2}, kind))


def test_a_pipeline_and_a_ring_are_not_combined() -> None:
    with pytest.raises(NotApplicable, match="has no mesh axis pp beside cp"):
        kind_of(trial({"pp": 2, "cp": 2}, "fsdp2"))


def test_gloo_that_sums_instead_of_averaging_is_not_applicable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fsdp2_internals, "sums_for_means", lambda backend: backend == "gloo")
    assert kind_of(trial(EP)) is expert_parallel.Transformers, "no FSDP2 there"
    for asked in (trial(EP, **NATIVE), trial(EP, "fsdp2"), trial(FSDP, "accelerate")):
        with pytest.raises(NotApplicable, match=r"needs torch >= 2\.9"):
            kind_of(asked)
        assert kind_of(dataclasses.replace(asked, backend="nccl"))


def test_fully_shard_refuses_weights_that_are_already_sharded() -> None:
    from torch.distributed.tensor import Replicate

    model = nn.Module()
    with rank_of(0, 2) as mesh:
        model.w = nn.Parameter(placed(torch.zeros(2, 2), mesh, Replicate()))
        with pytest.raises(NotApplicable, match="has sharded more than the experts"):
            built(expert_parallel.ExpertsLeftOut, trial({"ep": 2}, "fsdp2"), model)


@pytest.mark.parametrize(("sync", "calls"), [(True, []), (False, [False, True])])
def test_fsdp_of_transformers_synchronises_as_requested(sync: bool, calls: list[bool]) -> None:
    class Sharded(nn.Linear):
        seen: list[bool] = []  # noqa: RUF012

        def set_requires_gradient_sync(self, last: bool) -> None:
            self.seen.append(last)

    Sharded.seen = []
    step = StepSpec(accumulate=2, accumulate_sync=sync)
    subject = dataclasses.replace(trial(FSDP, **NATIVE), step=step)
    made = built(expert_parallel.Transformers, subject, Sharded(2, 2))
    for last in (False, True):
        with made.accumulating(last):
            pass
    assert Sharded.seen == calls
    plain = built(expert_parallel.Transformers, subject, nn.Linear(2, 2))
    with plain.accumulating(last=False):
        pass


@pytest.mark.parametrize(
    ("layout", "places"),
    [
        ({"ep": 4}, [0, 1, 2, 3]),
        ({"dp_shard": 2, "ep": 2}, [0, 1, 0, 1]),
        ({"ep": 2, "tp": 2}, [0, 0, 1, 1]),
        ({"dp_shard": 4}, [None] * 4),
        ({"dp_shard": 4, "ep": 1}, [None] * 4),
    ],
)
def test_position_on_the_ep_axis_is_found(layout: dict[str, int], places: list[int | None]) -> None:
    assert ep_rank(trial(layout)) is None, "no process group"
    for rank, expected in enumerate(places):
        with rank_of(rank, 4):
            assert ep_rank(trial(layout)) == expected


# ------------------------------------------------------------------------ tensor parallelism


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A trial of two tp ranks whose checkpoint of a family is on disk."""

    def save(family: str) -> Trial:
        spec = ModelSpec(family=family, layers=1, experts=4, vocab=64, source="checkpoint")
        subject = dataclasses.replace(
            trial(TP), model=spec, reference_path=str(tmp_path / f"{family}.pt")
        )
        checkpoint.save(tiny.build(spec, 0), subject.checkpoint_path)
        return subject

    return save


def test_older_releases_take_tp_plan_as_an_argument(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = saved("mixtral")
    there = lambda found: monkeypatch.setattr(  # noqa: E731
        checkpoint.importlib.util, "find_spec", lambda name: found
    )
    there(object())
    assert checkpoint.plan(subject, None) == {"tp_plan": "auto"}
    assert checkpoint.plan(subject, {"tp_size": 2}) == {}
    assert checkpoint.plan(dataclasses.replace(subject, layout={"dp_shard": 2}), None) == {}
    there(None)
    with pytest.raises(NotApplicable, match="needs accelerate"):
        checkpoint.plan(subject, None)


def test_a_family_without_a_plan_is_refused(saved: Any) -> None:
    with pytest.raises(NotApplicable, match=r"olmoe of transformers .* has no tp_plan"):
        checkpoint.plan(saved("olmoe"), {"tp_size": 2})


def test_an_undeclared_shard_is_refused(saved: Any) -> None:
    subject = saved("mixtral")
    model: Any = tiny.build(subject.model, 0)
    checkpoint._declares_pieces(model, subject)
    attention = model.model.layers[0].self_attn
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight.detach()[:16])
    with pytest.raises(NotApplicable, match=r"q_proj\.weight as a plain tensor with a part"):
        checkpoint._declares_pieces(model, subject)
    with rank_of(0, 2) as mesh:
        whole = tiny.build(subject.model, 0).model.layers[0].self_attn.q_proj.weight.detach()
        from torch.distributed.tensor import Shard

        attention.q_proj.weight = nn.Parameter(placed(whole, mesh, Shard(0)))
        checkpoint._declares_pieces(model, subject)
