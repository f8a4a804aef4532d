"""The step under test, in one process: data, skew, anatomy, fixes, comparison."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from moediag.lab.step import content, data
from moediag.lab.step.measure import gradients as compare
from moediag.lab.step.measure import reference
from moediag.lab.step.models import tiny
from moediag.lab.step.models.skew import RouterSkew
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import ModelSpec, SkewSpec, Starve, Trial, WrapperSpec
from moediag.protocol.names import clean_fqn
from moediag.recorder.not_applicable import NotApplicable

FOUR = {"world_size": 4, "layout": {"dp_shard": 4}}
STARVED = SkewSpec(starve=[Starve(expert=3, layer=1)])


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def trial(**changes) -> Trial:
    base = Trial("t", "s", "v", world_size=1, layout={"dp_shard": 1})
    return dataclasses.replace(base, **changes)


def one_backward(model, anatomy, skew: SkewSpec = STARVED) -> dict:
    """Gradients by FQN after one forward and backward of rank 0's batch."""
    wrapped = Wrapped(model, anatomy, trial())
    bent = RouterSkew(skew, anatomy.experts)
    with bent.installed(anatomy):
        wrapped.loss(data.batch(trial(), 0, 1, 0)).backward()
    return {clean_fqn(n): p.grad for n, p in model.named_parameters()}


class TestData:
    def test_a_batch_depends_only_on_rank_step_and_micro_batch(self):
        def at(rank, number, micro):
            return data.batch(trial(**FOUR), rank, number, micro)

        assert torch.equal(at(1, 2, 0), at(1, 2, 0))
        others = [at(0, 2, 0), at(1, 3, 0), at(1, 2, 1)]
        assert not any(torch.equal(at(1, 2, 0), other) for other in others)

    def test_identical_batches_are_the_same_on_all_ranks(self):
        skew = SkewSpec(batches="identical")
        batches = [data.batch(trial(skew=skew, **FOUR), rank, 1, 0) for rank in range(3)]
        assert torch.equal(batches[0], batches[1])
        assert torch.equal(batches[0], batches[2])

    def test_one_token_batches_repeat_a_different_token_on_each_rank(self):
        skew = SkewSpec(batches="one-token")
        tokens = [data.batch(trial(skew=skew, **FOUR), rank, 1, 0) for rank in range(4)]
        assert all(t.unique().numel() == 1 for t in tokens)
        assert len({int(t[0, 0]) for t in tokens}) == 4


class TestModels:
    @pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
    def test_a_family_is_built_with_its_layers_and_experts_or_is_refused(self, family):
        spec = ModelSpec(family=family)
        try:
            model = tiny.build(spec, seed=0)
        except NotApplicable as reason:
            assert family in str(reason)
            return
        anatomy = tiny.anatomy(model, spec)
        assert len(anatomy.layers) == spec.layers
        assert [block.layer for block in anatomy.blocks] == [0, 1]
        names = dict(model.named_modules())
        assert all(names[fqn] is layer for fqn, layer in anatomy.layers)
        assert anatomy.fused or all(len(b.experts) == spec.experts for b in anatomy.blocks)

    def test_weights_depend_on_the_seed(self):
        first, same, other = (tiny.build(ModelSpec(), seed) for seed in (5, 5, 6))
        weight = "model.layers.0.mlp.gate.weight"
        assert torch.equal(first.state_dict()[weight], same.state_dict()[weight])
        assert not torch.equal(first.state_dict()[weight], other.state_dict()[weight])

    def test_the_reference_of_a_bf16_trial_starts_from_the_rounded_weights(self):
        spec = ModelSpec(dtype="bfloat16")
        rounded, reference_model = tiny.build(spec, 0), tiny.build(spec, 0, dtype="float32")
        weight = "model.layers.0.mlp.gate.weight"
        expected = rounded.state_dict()[weight].float()
        assert torch.equal(reference_model.state_dict()[weight], expected)


class TestSkew:
    def counts(self, skew: SkewSpec, rank: int = 0, step: int = 1):
        model = tiny.build(ModelSpec(), 0)
        anatomy = tiny.anatomy(model, ModelSpec())
        seen = []
        for _, layer in anatomy.layers:
            gate = layer.mlp

            def hook(module, args, output):
                chosen = output[1].topk(2, dim=-1)[1]
                seen.append(torch.bincount(chosen.reshape(-1), minlength=8).tolist())

            # Inside the layer's forward, so that the skew applies to this top-k as well.
            gate.register_forward_hook(hook)
        bent = RouterSkew(skew, anatomy.experts)
        bent.set_rank(rank)
        bent.set_step(step)
        with bent.installed(anatomy), torch.no_grad():
            Wrapped(model, anatomy, trial()).loss(data.batch(trial(), 0, 1, 0))
        return seen

    def test_the_starved_expert_gets_no_token_in_its_layer_only(self):
        natural, bent = self.counts(SkewSpec()), self.counts(STARVED)
        assert all(count > 0 for layer in natural for count in layer)
        assert bent[1][3] == 0
        assert bent[0] == natural[0]
        assert sum(bent[1]) == sum(natural[1])

    def test_skew_does_not_affect_other_ranks_or_earlier_steps(self):
        skew = SkewSpec(starve=[Starve(expert=3, rank=1, layer=1, from_step=3)])
        natural = self.counts(SkewSpec())
        assert self.counts(skew, rank=0, step=3) == natural
        assert self.counts(skew, rank=1, step=2) == natural
        assert self.counts(skew, rank=1, step=3)[1][3] == 0

    def test_topk_is_restored(self):
        before = torch.topk, torch.Tensor.topk
        self.counts(STARVED)
        assert (torch.topk, torch.Tensor.topk) == before

    def test_skew_detects_whether_a_router_can_be_skewed(self):
        """The expert starves from step 2 on; before that no routing is changed."""
        model = tiny.build(ModelSpec(), 0)
        anatomy = tiny.anatomy(model, ModelSpec())
        bent = RouterSkew(SkewSpec(starve=[Starve(expert=3, from_step=2)]), 8)
        (_, layer), *_ = anatomy.layers
        enter = bent._entering(0)
        enter(layer, ())
        assert not bent.missed
        bent.set_step(2)
        enter(layer, ())
        assert bent.missed, "no top-k was seen"
        with bent.installed(anatomy):
            torch.topk(torch.rand(5, 4), 2)
            assert bent.missed, "not over the experts"
            torch.topk(torch.rand(5, 8), 2)
        assert not bent.missed

    def test_skew_returns_real_scores_with_gradients(self):
        model = tiny.build(ModelSpec(), 0)
        anatomy = tiny.anatomy(model, ModelSpec())
        bent = RouterSkew(SkewSpec(starve=[Starve(expert=3)]), 8)
        scores = torch.rand(5, 8, requires_grad=True)
        with bent.installed(anatomy):
            bent._layers.append(0)
            values, indices = torch.topk(scores, 2, dim=-1)
        assert not (indices == 3).any()
        assert torch.equal(values, scores.gather(-1, indices))
        values.sum().backward()
        assert scores.grad.sum() == 10


class TestFixes:
    """Each in-model fix on a starved expert: every parameter gets the correct gradient."""

    def gradients(self, fix: str | None) -> dict:
        model = tiny.build(ModelSpec(), 0)
        anatomy = tiny.anatomy(model, ModelSpec())
        if fix:
            module = content.fix(fix)
            for when in ("before_wrap", "after_wrap"):
                if hasattr(module, when):
                    getattr(module, when)(model, anatomy, WrapperSpec())
        return one_backward(model, anatomy)

    def test_without_a_fix_the_starved_expert_has_no_gradient(self):
        missing = [name for name, g in self.gradients(None).items() if g is None]
        assert missing == [
            f"model.layers.1.mlp.experts.3.{p}_proj.weight" for p in ("gate", "up", "down")
        ]

    @pytest.mark.parametrize("fix", ["touch", "iterate-all", "dense-experts"])
    def test_with_a_fix_every_gradient_is_correct(self, fix):
        plain, fixed = self.gradients(None), self.gradients(fix)
        assert set(plain) == set(fixed)
        for name, gradient in fixed.items():
            assert gradient is not None, name
            expected = plain[name] if plain[name] is not None else torch.zeros_like(gradient)
            assert (gradient - expected).abs().max() < 1e-6, name

    @pytest.mark.parametrize("fix", ["set-reduce-scatter-unused-params", "zero-fill"])
    def test_a_fix_for_fsdp2_requires_fsdp2(self, fix):
        with pytest.raises(NotApplicable, match="FSDP2"):
            self.gradients(fix)

    def test_iterate_all_does_not_apply_where_each_expert_is_an_fsdp1_unit(self):
        units = WrapperSpec(kind="fsdp1", granularity="expert")
        model = tiny.build(ModelSpec(), 0)
        anatomy = tiny.anatomy(model, ModelSpec())
        with pytest.raises(NotApplicable, match="FSDP1 unit"):
            content.fix("iterate-all").after_wrap(model, anatomy, units)

    def test_iterate_all_keeps_the_order_of_experts(self):
        called = []
        model = tiny.build(ModelSpec(), 0)
        anatomy = tiny.anatomy(model, ModelSpec())
        content.fix("iterate-all").after_wrap(model, anatomy, WrapperSpec())
        for index, (_, expert) in enumerate(anatomy.blocks[1].experts):
            expert.register_forward_pre_hook(lambda m, a, i=index: called.append(i))
        one_backward(model, anatomy)
        assert called == list(range(8))


class TestReferenceAndComparison:
    @pytest.fixture
    def expected(self, tmp_path):
        subject = trial(
            reference_path=str(tmp_path / "reference.pt"), world_size=2, layout={"dp_shard": 2}
        )
        reference.run(subject)
        return subject, reference.load(str(tmp_path / "reference.pt"))

    def test_a_model_that_draws_random_numbers_is_not_applicable(self, tmp_path, monkeypatch):
        plain = Wrapped.loss

        def with_dropout(self, tokens):
            return plain(self, tokens) + 0 * torch.nn.functional.dropout(torch.ones(4), 0.5).sum()

        monkeypatch.setattr(Wrapped, "loss", with_dropout)
        path = tmp_path / "reference.pt"
        with pytest.raises(NotApplicable, match="qwen3_moe draws random numbers"):
            reference.run(trial(reference_path=str(path)))
        assert not path.exists()

    def test_a_router_without_a_top_k_cannot_be_skewed(self, tmp_path, monkeypatch):
        # Like a router that samples its experts: its top-k does not use the experts' scores.
        monkeypatch.setattr(RouterSkew, "_choose", lambda *_: None)
        path = tmp_path / "reference.pt"
        with pytest.raises(NotApplicable, match="does not choose experts by a top-k"):
            reference.run(trial(reference_path=str(path), skew=STARVED))
        reference.run(trial(reference_path=str(path)))
        assert path.exists(), "a healthy routing needs no bending"

    def test_reference_is_the_average_over_ranks(self, expected):
        subject, stored = expected
        model = tiny.build(ModelSpec(), 0)
        wrapped = Wrapped(model, tiny.anatomy(model, ModelSpec()), subject)
        losses = []
        for rank in range(2):
            tokens = data.batch(subject, rank, 1, 0)
            losses.append(wrapped.loss(tokens) / 2)
            losses[-1].backward()
        assert stored["losses"][0] == pytest.approx(float(sum(losses).detach()))
        errors = compare.compare(wrapped, stored["gradients"][0])
        assert not any(e.wrong for e in errors.values())
        assert len(errors) == 69

    @pytest.mark.parametrize(
        ("spoil", "missing"),
        [
            (lambda g: g * 1.01, False),
            (lambda g: g * float("nan"), False),
            (lambda g: None, True),
        ],
        ids=["one percent", "nan", "none"],
    )
    def test_only_a_changed_gradient_is_wrong(self, expected, spoil, missing):
        subject, stored = expected
        model = tiny.build(ModelSpec(), 0)
        wrapped = Wrapped(model, tiny.anatomy(model, ModelSpec()), subject)
        for name, parameter in model.named_parameters():
            parameter.grad = stored["gradients"][0][name].clone()
        victim = "model.layers.1.mlp.experts.3.up_proj.weight"
        parameter = model.get_parameter(victim)
        parameter.grad = spoil(parameter.grad)
        errors = compare.compare(wrapped, stored["gradients"][0])
        assert [name for name, e in errors.items() if e.wrong] == [victim]
        assert errors[victim].missing is missing
