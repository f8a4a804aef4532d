"""What one rank records of its training loop: cleared gradients, modes, scaled norms, parameters
that no optimizer has."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402

from moediag.diagnosis import diagnose  # noqa: E402
from moediag.evidence.trial_folder import read_trial  # noqa: E402
from moediag.protocol import write_json  # noqa: E402
from moediag.recorder import Recorder  # noqa: E402
from moediag.recorder.laws.replica_sets import ReplicaSets  # noqa: E402
from tests.unit.fake_ranks import fake_rank  # noqa: E402
from tests.unit.law_evidence import job  # noqa: E402
from tests.unit.recorder.written import laws  # noqa: E402

pytestmark = pytest.mark.usefixtures("recorder")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1), nn.Linear(3, 2))


def backward(net: nn.Module) -> None:
    net(torch.randn(2, 4)).pow(2).sum().backward()


class TestClearedGradients:
    def kept(self, folder: Path) -> list[bool]:
        return [one.kept for one in laws(folder).cleared]

    def test_gradients_that_nothing_clears(self, tmp_path: Path) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            backward(net)
            optimizer.step()
        first, *_ = laws(tmp_path).cleared
        assert self.kept(tmp_path) == [True] * 3
        assert (first.step, first.optimizer) == (1, "SGD")
        assert first.names == ("2.bias", "0.bias", "2.weight")

    def test_one_model_of_two_that_nothing_clears(self, tmp_path: Path) -> None:
        """Its parameters are switched off while another one runs."""
        nets = model(), model()
        optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
        for _ in range(4):
            nets[1].requires_grad_(False)
            backward(nets[0])
            backward(nets[1].requires_grad_(True))
            optimizer.step()
            nets[0].zero_grad()
        assert self.kept(tmp_path) == [False, True] * 3

    @pytest.mark.parametrize("to_none", [True, False])
    @pytest.mark.parametrize("when", ["before the forward", "before the backward", "after"])
    def test_every_place_to_clear_them(self, tmp_path: Path, to_none: bool, when: str) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            if when == "before the forward":
                net.zero_grad(set_to_none=to_none)
            loss = net(torch.randn(2, 4)).sum()
            if when == "before the backward":
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        parameter.grad = None if to_none else parameter.grad * 0
            loss.backward()
            optimizer.step()
            if when == "after":
                optimizer.zero_grad(set_to_none=to_none)
        assert self.kept(tmp_path) == [False] * 3

    @pytest.mark.parametrize("cleared", [False, True])
    def test_shards_whose_gradients_fsdp2_adds_up(self, tmp_path: Path, cleared: bool) -> None:
        from torch.distributed.fsdp import fully_shard

        with fake_rank(0, 1):
            net = model()
            fully_shard(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(4):
                loss = net(torch.randn(2, 4)).sum()
                if cleared:
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert self.kept(tmp_path) == [not cleared] * 3

    def test_shards_that_are_cleared_after_the_backward_of_another_model(
        self, tmp_path: Path
    ) -> None:
        """Their own backward is no call of a tensor's, as in torch's pipeline schedules."""
        from torch.distributed.fsdp import fully_shard

        with fake_rank(0, 1):
            net, other = model(), model()
            fully_shard(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(4):
                backward(other)
                optimizer.zero_grad()
                torch.autograd.backward(net(torch.randn(2, 4)).sum())
                optimizer.step()
        assert not any(self.kept(tmp_path))

    @pytest.mark.parametrize("sharded", [False, True])
    @pytest.mark.parametrize("times", [1, 2])
    def test_two_updates_with_one_gradient(self, tmp_path: Path, sharded: bool, times: int) -> None:
        from torch.distributed.fsdp import fully_shard

        with fake_rank(0, 1):
            net = model()
            if sharded:
                fully_shard(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(4):
                net(torch.ones(2, 4)).sum().backward()
                for _ in range(times):
                    optimizer.step()
                optimizer.zero_grad()
        found = laws(tmp_path).cleared
        assert {one.step for one in found if one.again} == ({1, 2} if times == 2 else set())
        assert not any(one.kept for one in found)

    def test_an_update_whose_closure_makes_the_backward(self, tmp_path: Path) -> None:
        net = model()
        optimizer = torch.optim.LBFGS(net.parameters())

        def closure() -> float:
            optimizer.zero_grad()
            backward(net)
            return 0.0

        for _ in range(4):
            optimizer.step(closure)
        assert not any(one.again for one in laws(tmp_path).cleared)

    def test_accumulation_over_micro_batches(self, tmp_path: Path) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            for _ in range(3):
                backward(net)
            optimizer.step()
            optimizer.zero_grad()
        assert self.kept(tmp_path) == [False] * 3

    @pytest.mark.parametrize("early", [False, True])
    def test_two_optimizers(self, tmp_path: Path, early: bool) -> None:
        """A GAN: the generator's loss adds to the discriminator's gradients, which are cleared
        before the discriminator's own loss, or too ``early``."""
        one, two = nn.Linear(4, 4), nn.Linear(4, 1)
        of_one = torch.optim.SGD(one.parameters(), lr=0.1)
        of_two = torch.optim.SGD(two.parameters(), lr=0.1)
        for _ in range(4):
            if not early:
                of_two.zero_grad()
            two(one(torch.randn(2, 4)).detach()).sum().backward()
            of_two.step()
            if early:
                of_two.zero_grad()
            of_one.zero_grad()
            two(one(torch.randn(2, 4))).sum().backward()
            of_one.step()
        assert self.kept(tmp_path) == [False] * 6
        found = laws(tmp_path).cleared
        assert {one.mixed for one in found if "weight" in one.names and one.times > 1} <= {early}
        assert any(one.mixed for one in found) is early

    @pytest.mark.parametrize("early", [False, True])
    def test_two_optimizers_that_both_keep_the_other_one_s_gradients(
        self, tmp_path: Path, early: bool
    ) -> None:
        one, two = nn.Linear(4, 4), nn.Linear(4, 1)
        of_one = torch.optim.SGD(one.parameters(), lr=0.1)
        of_two = torch.optim.SGD(two.parameters(), lr=0.1)
        for _ in range(4):
            for optimizer in (of_two, of_one):
                if not early:
                    optimizer.zero_grad()
                two(one(torch.randn(2, 4))).sum().backward()
                optimizer.step()
                if early:
                    optimizer.zero_grad()
        found = [one for one in laws(tmp_path).cleared if one.times > 1]
        assert {one.crossed for one in found} - {None} == {early}
        assert not any(one.mixed for one in found)

    def test_a_body_that_accumulates_while_its_head_steps(self, tmp_path: Path) -> None:
        body, head = nn.Linear(4, 4), nn.Linear(4, 1)
        of_body = torch.optim.SGD(body.parameters(), lr=0.1)
        of_head = torch.optim.SGD(head.parameters(), lr=0.1)
        for step in range(8):
            of_head.zero_grad()
            head(body(torch.randn(2, 4))).sum().backward()
            of_head.step()
            if step % 2:
                of_body.step()
                of_body.zero_grad()
        assert laws(tmp_path).cleared
        assert not any(one.mixed for one in laws(tmp_path).cleared)
        assert not all(one.crossed for one in laws(tmp_path).cleared)

    def test_a_momentum_that_is_kept_in_the_gradients(self, tmp_path: Path) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            backward(net)
            optimizer.step()
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad *= 0.9
        assert self.kept(tmp_path) == [False] * 3

    def test_an_optimizer_that_updates_in_some_calls_only(self, tmp_path: Path) -> None:
        """It clears the gradients itself, in the calls that update."""

        class Accumulating(torch.optim.SGD):
            calls = 0

            def step(self, closure: Any = None) -> None:
                self.calls += 1
                if self.calls % 5 == 0:
                    super().step()
                    self.zero_grad()

        net = model()
        optimizer = Accumulating(net.parameters(), lr=0.1)
        for _ in range(14):
            backward(net)
            optimizer.step()
        assert not any(self.kept(tmp_path))

    def test_gradients_that_autograd_does_not_add_to_are_unknown(self, tmp_path: Path) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            loss = net(torch.randn(2, 4)).sum()
            own = list(net.parameters())
            for parameter, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
                parameter.grad = gradient
            optimizer.step()
        assert not laws(tmp_path).cleared

    def test_nothing_stays_behind(self, tmp_path: Path, recorder: Recorder) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        backward(net)
        optimizer.step()
        assert net._forward_pre_hooks
        recorder.uninstall()
        backward(net)
        optimizer.step()
        assert not laws(tmp_path).cleared
        assert not net._forward_pre_hooks


@pytest.mark.parametrize("sync", [[False] * 3, [False, True, False], [True] * 3])
def test_a_unit_of_fsdp2_whose_gradients_are_never_reduced(
    tmp_path: Path, sync: list[bool]
) -> None:
    from torch.distributed.fsdp import fully_shard

    with fake_rank(0, 2):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        first = fully_shard(net[0])
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for one in sync:
            first.set_requires_gradient_sync(one, recurse=False)
            net(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(laws(tmp_path).others.get("unsent", ())) == (not any(sync))


@pytest.mark.parametrize("shards", [True, False])
def test_how_far_gradients_of_what_fsdp2_ignores_are_apart(tmp_path: Path, shards: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    with fake_rank(0, 2):
        net = nn.Linear(4, 4, bias=False)
        net.scale = nn.Parameter(torch.ones(()))
        if shards:
            fully_shard(net, ignored_params={net.scale})
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        (net(torch.ones(1, 4)).sum() * net.scale).backward()
        optimizer.step()
    check = laws(tmp_path).checks[0]
    assert [check.names[at] for at in check.sketches] == ["scale"] * shards


def test_an_update_of_zeros_says_nothing_of_what_clears(tmp_path: Path) -> None:
    """As the first one of a model whose last layer begins with zeros."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        (net(torch.randn(2, 4)).sum() * bool(step)).backward()
        optimizer.step()
    assert [(one.step, one.kept) for one in laws(tmp_path).cleared] == [(2, True), (3, True)]


@pytest.mark.parametrize("clears", [False, True])
def test_parameters_without_an_influence_do_not_hide_what_clears(
    clears: bool, tmp_path: Path
) -> None:
    """Their gradients are zeros, and they are smaller than all that train."""
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)), nn.Linear(2, 8))
    nn.init.zeros_(net[3].weight)
    net[3].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        (net(torch.randn(2, 2)) - 1).square().sum().backward()
        optimizer.step()
        if clears:
            optimizer.zero_grad()
    assert [one.kept for one in laws(tmp_path).cleared] == [not clears] * 3


class TestModes:
    def modes(self, folder: Path) -> list[tuple[int, int, bool]]:
        return [(one.step, one.model, one.training) for one in laws(folder).modes]

    def test_each_mode_of_a_trained_model_is_told_once_a_step(self, tmp_path: Path) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            backward(net)
            backward(net)
            optimizer.step()
            if step == 1:
                net.eval()
        assert self.modes(tmp_path) == [(1, 0, True), (2, 0, True), (3, 0, False)]
        assert laws(tmp_path).modes[0].kinds == ("Dropout",)

    def test_parts_that_are_put_back_into_training_mode(self, tmp_path: Path) -> None:
        """And not the whole that the program calls."""
        whole = nn.Sequential(model()).eval()
        whole[0].train()
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        backward(whole)
        optimizer.step()
        assert [one.training for one in laws(tmp_path).modes] == [True]

    def test_an_optimizer_of_inputs_trains_no_model(self, tmp_path: Path) -> None:
        """An attack, whose gradients also reach the model."""
        net, inputs = model(), torch.zeros(2, 4, requires_grad=True)
        optimizer, attack = (torch.optim.SGD(of, lr=0.1) for of in (net.parameters(), [inputs]))
        backward(net)
        optimizer.step()
        net.eval()
        for _ in range(6):
            net(inputs).sum().backward()
            attack.step()
        assert [one.training for one in laws(tmp_path).modes] == [True]

    @pytest.mark.parametrize("frozen", [True, False])
    def test_a_teacher_is_not_trained(self, tmp_path: Path, frozen: bool) -> None:
        net, teacher = model(), model().eval().requires_grad_(not frozen)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            batch = torch.randn(2, 4)
            (net(batch) - teacher(batch).detach()).pow(2).sum().backward()
            optimizer.step()
        followers = laws(tmp_path).models[-1].followers
        assert [(kind, len(matrices)) for kind, matrices in followers] == [
            ("Sequential", 0), ("Sequential", 2)
        ]  # fmt: skip
        assert {(model, training) for _, model, training in self.modes(tmp_path)} == {(0, True)}

    def test_a_freed_model_s_number_is_not_used_again(self, tmp_path: Path) -> None:
        for _ in range(2):
            net = model()
            torch.optim.SGD(net.parameters())
            for _ in range(2):
                backward(net)
            del net
            gc.collect()
        assert [one.model for one in laws(tmp_path).mode_changes] == [0, 1]

    def test_an_evaluation_with_gradients_between_two_steps(self, tmp_path: Path) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net.eval()(torch.randn(2, 4))
            net.train()
            backward(net)
            optimizer.step()
        assert [one.training for one in laws(tmp_path).modes] == [False, True, False, True]

    def test_settings_inside_a_forward_that_the_program_wraps(self, tmp_path: Path) -> None:
        """As accelerate's mixed precision does; and hooks of gradients."""
        net = model()
        net.forward = torch.autocast("cpu", torch.bfloat16)(net.forward)
        net[0].weight.register_hook(lambda gradient: gradient / 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            backward(net)
            optimizer.step()
        for one in laws(tmp_path).others["settings"]:
            assert one["of"]["autocast = cpu, torch.bfloat16"] == [1, ""]
            assert one["of"]["number of gradient hooks of a parameter = 1"] == [1, "0.weight"]

    def test_a_model_that_is_saved_while_a_part_has_not_run(self, tmp_path: Path) -> None:
        """Its hooks must pickle as if moediag were not there, and go with the backward."""
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(4, 4))
        net.forward = net[1].forward
        loss = net(torch.randn(2, 4)).sum()
        assert b"moediag" not in pickle.dumps(net[0])
        assert net[0]._forward_pre_hooks
        loss.backward()
        assert not net[0]._forward_pre_hooks

    @pytest.mark.parametrize(
        ("part", "frozen", "expected"),
        [("0", False, [["0", ["Dropout"]]]), ("0", True, []), ("0.1", False, []), ("", False, [])],
        ids=["a part", "a frozen part", "a dropout alone", "the whole model"],
    )
    def test_parts_in_evaluation_mode(
        self, tmp_path: Path, part: str, frozen: bool, expected: object
    ) -> None:
        net = nn.Sequential(model(), nn.Linear(2, 2))
        inner = net.get_submodule(part).eval()
        inner.requires_grad_(not frozen)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            backward(net)
            optimizer.step()
        settings = laws(tmp_path).others["settings"]
        assert [one["parts"] for one in settings] == [expected] * 2
        of = settings[0]["of"]
        assert of["backwards of an update = 1"] == [1, ""] and of["p of Dropout = 0.1"] == [
            1,
            "0.1",
        ]
        assert f"training of Dropout = {part not in ('0', '0.1', '')}" in of
        assert ("requires_grad of parameters = False" in of) == frozen


class TestScaledNorms:
    @pytest.mark.parametrize("unscales", [False, True])
    def test_the_scale_that_is_still_in_the_gradients(self, tmp_path: Path, unscales: bool) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(2, 4)).sum()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        # In the first step no scaler has made a step.
        assert [n.scale for n in laws(tmp_path).norms] == [0.0, *([0.0 if unscales else 64.0] * 2)]

    @pytest.mark.parametrize(
        ("how", "told"),
        [("forgotten", True), ("micro-batches", True), ("by the scaler", False),
         ("unscaled", False), ("by hand", False), ("replaced", False), ("hooked", False),
         ("not scaled", False), ("also a plain loss", False), ("off", False), ("few", False),
         ("clipped", False)],
    )  # fmt: skip
    def test_gradients_of_a_scaled_loss_that_nothing_divides(
        self, tmp_path: Path, how: str, told: bool
    ) -> None:
        """Clipping writes gradients, too: it hides whether something divided them."""
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=how != "off")
        for p in net.parameters() if how == "hooked" else ():
            p.register_hook(lambda gradient: gradient / 64.0)
        for _ in range(2 if how == "few" else 7):
            optimizer.zero_grad()
            for at in range(1 + (how in ("micro-batches", "also a plain loss"))):
                loss = net(torch.randn(2, 4)).sum()
                plain = how == "not scaled" or (how == "also a plain loss" and not at)
                loss = loss if plain else scaler.scale(loss)
                loss.backward()
            if how == "unscaled":
                scaler.unscale_(optimizer)
            if how == "clipped":
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            for p in net.parameters() if how in ("by hand", "replaced") else ():
                p.grad = p.grad.div_(64.0) if how == "by hand" else p.grad / 64.0
            scaler.step(optimizer) if how == "by the scaler" else optimizer.step()
            if how in ("by the scaler", "unscaled"):
                scaler.update()
        text = suspicious(tmp_path)
        place = f"the optimizer stepped at {Path(__file__).name}:"
        assert (f"the loss of step 1 by 64, and {place}" in text) is told

    def clip(self, net: nn.Module) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)

    def early(
        self, folder: Path, act: Callable[[nn.Module, Any, Callable[[], None]], None]
    ) -> bool:
        """Whether clipping is found to be too early where ``act(net, optimizer, clip)`` is a
        step."""
        net = nn.ModuleDict({"used": model(), "unused": model()})
        net.forward = net["used"].forward
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            act(net, optimizer, lambda: self.clip(net))
        text = suspicious(folder)
        assert f"clip_grad_norm_ at {Path(__file__).name}:" in text or not text
        return "then a backward added" in text

    @pytest.mark.parametrize("order", ["cbu", "bcbu", "cbcbu", "buc"])
    def test_gradients_that_are_clipped_before_a_backward(self, tmp_path: Path, order: str) -> None:
        """In this order: clip, backward, update."""

        def step(net: nn.Module, optimizer: Any, clip: Callable[[], None]) -> None:
            optimizer.zero_grad()
            does = {"c": clip, "b": lambda: backward(net), "u": optimizer.step}
            for act in order:
                does[act]()

        assert self.early(tmp_path, step)

    @pytest.mark.parametrize("order", ["bcu", "bcbcu", "cbcu", "bbcu", "bu", "bm"])
    def test_gradients_that_are_clipped_last(self, tmp_path: Path, order: str) -> None:
        """m: an update that clips inside."""

        def step(net: nn.Module, optimizer: Any, clip: Callable[[], None]) -> None:
            optimizer.zero_grad()
            inside = lambda: optimizer.step(lambda: clip() or 0.0)  # noqa: E731
            does = {"c": clip, "b": lambda: backward(net), "u": optimizer.step, "m": inside}
            for act in order:
                does[act]()

        assert not self.early(tmp_path, step)

    @pytest.mark.parametrize("first", [True, False])
    def test_a_closure_of_the_optimizer_that_clips(self, tmp_path: Path, first: bool) -> None:
        """As Lightning's."""

        def step(net: nn.Module, optimizer: Any, clip: Callable[[], None]) -> None:
            def closure() -> float:
                acts = [clip, lambda: backward(net)]
                for act in acts if first else reversed(acts):
                    optimizer.zero_grad() if act is not clip else None
                    act()
                return 0.0

            optimizer.step(closure)

        assert self.early(tmp_path, step) == first

    def test_a_clipped_part_of_which_other_losses_change_some(self, tmp_path: Path) -> None:
        """Such as layers that an actor and a critic share."""

        def step(net: nn.Module, optimizer: Any, clip: Callable[[], None]) -> None:
            optimizer.zero_grad()
            backward(net)
            clip()
            hidden = net["used"][0](torch.randn(2, 4))
            hidden.sum().backward()
            optimizer.step()

        assert not self.early(tmp_path, step)

    def test_two_optimizers_that_step_after_both_are_clipped(self, tmp_path: Path) -> None:
        other = model()
        second = torch.optim.SGD(other.parameters(), lr=0.1)

        def step(net: nn.Module, optimizer: Any, clip: Callable[[], None]) -> None:
            for one, of in ((net, optimizer), (other, second)):
                of.zero_grad()
                backward(one)
                nn.utils.clip_grad_norm_(one.parameters(), 1e-3)
            optimizer.step()
            second.step()

        assert not self.early(tmp_path, step)

    def test_clipping_in_a_hook_of_the_backward(self, tmp_path: Path) -> None:
        def step(net: nn.Module, optimizer: Any, clip: Callable[[], None]) -> None:
            optimizer.zero_grad()
            first = next(net.parameters())
            hook = first.register_post_accumulate_grad_hook(lambda _: clip())
            backward(net)
            hook.remove()
            optimizer.step()

        assert not self.early(tmp_path, step)

    def test_a_norm_that_is_only_measured(self, tmp_path: Path) -> None:
        def step(net: nn.Module, optimizer: Any, _: Callable[[], None]) -> None:
            optimizer.zero_grad()
            nn.utils.clip_grad_norm_(net.parameters(), float("inf"))
            backward(net)
            nn.utils.clip_grad_norm_(net.parameters(), 1e9)
            backward(net)
            optimizer.step()

        assert not self.early(tmp_path, step)

    def test_a_scaler_that_is_off_scales_nothing(self, tmp_path: Path) -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for _ in range(2):
            scaler.scale(net(torch.randn(2, 4)).sum()).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
        assert [norm.scale for norm in laws(tmp_path).norms] == [0.0, 0.0]
        every = [file.read_text() for file in tmp_path.glob("rank-0.*jsonl")]
        assert every and not any("laws of scales" in text for text in every)  # no failure of ours


@pytest.mark.parametrize("first", [0, 1])
def test_names_do_not_depend_on_the_model_that_runs_first(tmp_path: Path, first: int) -> None:
    nets = model(), model()
    nets[first](torch.ones(1, 4))
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
    backward(nets[0])
    backward(nets[1])
    optimizer.step()
    names = [piece.name for piece in laws(tmp_path).checks[0].pieces]
    assert names[0] == "0.weight" and names[4] == "0.weight (2)"


@pytest.mark.parametrize(("content", "told"), [("model", 1), ("optimizer", 0), ("random", 0)])
def test_files_to_which_a_rank_saves_matrices(tmp_path: Path, content: str, told: int) -> None:
    net = model()
    of = {
        "model": {"model": net.state_dict()},
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1).state_dict(),
        "random": {"rng": torch.get_rng_state()},
    }
    for _ in range(2):
        torch.save(of[content], tmp_path / "saved.pt")
    assert len(laws(tmp_path).of("saved", lambda event: event["file"])) == told


def test_buffers_of_numbers_are_compared_between_data_parallel_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter (num_batches_tracked) differs without harm where a rank had one batch more."""
    monkeypatch.setattr(ReplicaSets, "data_parallel", lambda _self, _root: (0, 1))
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        backward(net)
        optimizer.step()
    ((ranks, buffers),) = laws(tmp_path).models[-1].buffers
    assert (ranks, set(buffers)) == ((0, 1), {"1.running_mean", "1.running_var"})


def test_how_often_an_average_of_the_model_was_updated(tmp_path: Path) -> None:
    net = model()
    average = AveragedModel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        backward(net)
        optimizer.step()
        average.update_parameters(net)
    assert [state.averages for state in laws(tmp_path).models] == [(0,), (1,), (2,)]


@pytest.mark.parametrize(
    ("frozen", "told"),
    [((), ()), (("gate",), ("0.gate.weight",)), (("gate", "experts"), ())],
)
def test_a_router_that_is_frozen_while_its_experts_train(
    tmp_path: Path, frozen: tuple[str, ...], told: tuple[str, ...]
) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(4, 2, bias=False)
            self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            weights = self.gate(tokens).softmax(-1)
            return sum(weights[:, [i]] * own(tokens) for i, own in enumerate(self.experts))

    net = nn.Sequential(Block(), nn.Linear(4, 2))
    for name in frozen:
        getattr(net[0], name).requires_grad_(False)
    optimizer = torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=0.1)
    backward(net)
    optimizer.step()
    assert laws(tmp_path).models[0].frozen_routers == told


class Loop(nn.Module):
    """A trainer that is a module, as those of lucidrains are."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.net, self.own = model(), own

    def forward(self, steps: int) -> None:
        net = self.net if self.own else copy.deepcopy(self.net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(steps):
            net(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("own", [True, False])
def test_a_module_whose_forward_is_the_training(
    tmp_path: Path, recorder: Recorder, own: bool
) -> None:
    """One that trains a copy in its forward, as MAML does, is a model."""
    Loop(own)(6)
    found = laws(tmp_path)
    assert [one.step for one in found.inputs] == ([2, 3] if own else [])
    assert recorder.current_step == (5 if own else 1)
    assert {one.name for one in found.modes} == ({"Loop", "Sequential"} if own else set())


def test_inputs_of_an_evaluation_are_not_those_of_training(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        backward(net.train())
        net.eval()(torch.ones(2, 4))
        with torch.no_grad():
            net.train()(torch.ones(2, 4))
        optimizer.step()
    found = [(one.step, one.forward) for one in laws(tmp_path).inputs]
    assert found == [(1, 0), (2, 0), (3, 0)]


def test_the_line_that_made_the_data_loader(tmp_path: Path) -> None:
    net = model()
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), 4, shuffle=True)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in loader:
        net(batch).sum().backward()
        optimizer.step()
    source = Path(__file__).read_text().splitlines()
    (made,) = {one.made for one in laws(tmp_path).inputs}
    assert {one.began for one in laws(tmp_path).inputs} == {0}
    assert "shuffle=True" in source[int(made.split(":")[1].split()[0]) - 1]


def test_an_optimizer_of_other_parameters_is_idle(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    net = model()
    for _ in range(3):
        backward(net)
        optimizer.step()
    states = laws(tmp_path).models
    assert [state.idle for state in states] == [True] * 3
    assert set(states[0].left_out) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    own = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        backward(net)
        own.step()
    assert not laws(tmp_path).models[-1].idle


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_learned_temperature_that_belongs_to_no_module(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """Others may be an optimizer's own copies or parts."""
    net, temperature = model(), nn.Parameter(torch.ones(shape))
    optimizer = torch.optim.SGD([*net.parameters(), temperature], lr=0.1)
    for _ in range(3):
        (net(torch.ones(2, 4)).sum() * temperature.sum()).backward()
        optimizer.step()
    names = [check.pieces[-1].name for check in laws(tmp_path).checks if check.optimizer]
    assert set(names) == {"2.bias" if shape else "SGD's parameter 4"}


@pytest.mark.parametrize("trains", [True, False])
def test_a_parameter_of_the_loss_whose_gradient_a_closure_computes(
    tmp_path: Path, trains: bool
) -> None:
    """All gradients are cleared before each update, as Lightning's validation does."""
    net = model()
    net.register_parameter("weight", nn.Parameter(torch.ones(()), requires_grad=trains))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)

    def closure() -> Any:
        loss = net(torch.ones(2, 4)).sum() * net.weight
        loss.backward()
        return loss

    net[2].requires_grad_(False)
    for _ in range(4):
        net.zero_grad()
        optimizer.step(closure)
    states = laws(tmp_path).models
    assert [set(state.left_out) for state in states] == [{"weight"} if trains else set()] * 3


@pytest.mark.parametrize("clears", ["before the step", "in the closure"])
def test_gradients_that_a_closure_computes_are_not_missing(tmp_path: Path, clears: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def closure() -> float:
        if clears == "in the closure":
            optimizer.zero_grad()
        backward(net)
        return 0.0

    for _ in range(3):
        if clears == "before the step":
            optimizer.zero_grad()
        optimizer.step(closure)
    found = laws(tmp_path)
    assert not any(state.idle for state in found.models)
    assert not any("" in check.grads for check in found.checks)


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: another optimizer steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.defaults = optimizer.defaults

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.optimizer.step()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(("times", "often"), [(1, 6), (2, 6), (2, 3), (2, 2)])
def test_a_scheduler_that_steps_several_times_for_each_update(
    tmp_path: Path, times: int, often: int, wrapped: bool
) -> None:
    """``often``: in so many of six steps it is called at all."""
    net = model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = Wrapper(optimizer) if wrapped else optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for step in range(6):
        backward(net)
        optimizer.step()
        for _ in range(times if step < often else 0):
            scheduler.step()
    evidence = job(1)
    seen = replace(evidence.ranks[0], laws=laws(tmp_path))
    texts = diagnose(replace(evidence, ranks={0: seen})).suspicious
    found = [text for text in texts if "is called 2 times for each update" in text]
    assert len(found) == ((times, often) == (2, 6))
    assert all(f"StepLR.step() at {Path(__file__).name}:" in text for text in found)


def suspicious(folder: Path) -> str:
    """What the records of the only rank show."""
    ranks = {0: replace(job(1).ranks[0], laws=laws(folder))}
    return " ".join(diagnose(replace(job(1), ranks=ranks)).suspicious)


_ACCELERATE = """
import contextlib

class Accelerator:
    gradient_accumulation_steps = 2

    def backward(self, loss):
        (loss / self.gradient_accumulation_steps).backward()

    @contextlib.contextmanager
    def accumulate(self, *models):
        yield
"""


@pytest.fixture
def accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for accelerate's, of which the laws read these."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "accelerator.py").write_text(_ACCELERATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name: one for name, one in sys.modules.items() if name.startswith("accelerate")}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("accelerate.accelerator").Accelerator()
    for name in ("accelerate", "accelerate.accelerator"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("asked", "enters", "backwards", "by", "told"),
    [(2, False, 1, 1, True), (2, True, 1, 1, False), (2, False, 2, 1, False),
     (1, False, 1, 1, False), (2, False, 2, 2, True), (2, True, 2, 2, False),
     (2, False, 2, 3, False), (2, False, 3, 2, False)],
    ids=["never entered", "entered", "by hand", "no accumulation", "divided twice",
         "entered, a loss of two halves", "by another number", "of other micro-batches"],
)  # fmt: skip
def test_an_accumulation_that_is_asked_for(
    tmp_path: Path, accelerator: Any, asked: int, enters: bool, backwards: int, by: int, told: bool
) -> None:
    accelerator.gradient_accumulation_steps = asked
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        for _ in range(backwards):
            with accelerator.accumulate(net) if enters else contextlib.nullcontext():
                loss = net(torch.randn(2, 4)).pow(2).mean()
                accelerator.backward(loss if by == 1 else loss / by)
        optimizer.step()
        optimizer.zero_grad()
    text = suspicious(tmp_path)
    assert ("accumulates by hand, divided it by as many" in text) is (told and by == 2)
    assert (f"so `backward` at {Path(__file__).name}:" in text and "by 2" in text) is told


@pytest.mark.parametrize(
    ("how", "told"),
    [("removed", True), ("removed later", True), ("kept", False), ("entered by hand", False),
     ("not asked", False), ("float64", False), ("FSDP", False), ("few steps", False)],
)  # fmt: skip
def test_a_model_that_lost_the_autocast_of_accelerate(
    tmp_path: Path, accelerator: Any, how: str, told: bool
) -> None:
    net = model().to(torch.float64 if how == "float64" else torch.float32)
    accelerator.gradient_accumulation_steps, accelerator._models = 1, [net]
    accelerator.native_amp = how != "not asked"
    accelerator.distributed_type = how if how == "FSDP" else "MULTI_CPU"
    forward = net.forward
    net._original_forward = forward  # type: ignore[assignment]
    net.forward = torch.autocast("cpu", torch.bfloat16)(forward)  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(1, 3 if how == "few steps" else 7):
        if how != "kept" and step > (how == "removed later"):
            net.forward = forward  # type: ignore[method-assign]
            vars(net).pop("_original_forward", None)
        inputs = torch.randn(2, 4, dtype=next(net.parameters()).dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "entered by hand"):
            loss = net(inputs).float().pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    text = suspicious(tmp_path)
    since = 2 if how == "removed later" else 1
    assert (f"since step {since} it runs without autocast" in text) is told


def test_an_accumulation_of_few_updates_is_not_judged(tmp_path: Path, accelerator: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        accelerator.backward(net(torch.randn(2, 4)).pow(2).mean())
        optimizer.step()
    assert "accumulate" not in suspicious(tmp_path)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
class TestSchedulersOfAnotherOptimizer:
    """A scheduler steps an optimizer that the program made again."""

    def found(
        self,
        folder: Path,
        follow: Callable[[Any, Any, int], None] = lambda *_: None,
        parameters: Callable[[nn.Module], Any] = lambda net: net.parameters(),
        of: Callable[[int], Any] = lambda step: 1 / (1 + step),
        steps: int = 13,
    ) -> bool:
        """``follow(old, new, step)`` runs before each update of the new one."""
        net = model()
        old = torch.optim.SGD(parameters(net), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(old, of)
        new = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(steps):
            backward(net)
            follow(old, new, step)
            new.step()
            new.zero_grad()
            scheduler.step()
        text = suspicious(folder)
        assert f"LambdaLR.step() at {Path(__file__).name}:" in text or not text
        return "that never steps" in text

    def test_of_the_same_parameters(self, tmp_path: Path) -> None:
        assert self.found(tmp_path)
        assert self.found(tmp_path, parameters=lambda net: [{"params": [net[0].weight]}])

    def test_few_steps(self, tmp_path: Path) -> None:
        assert not self.found(tmp_path, steps=2)

    @pytest.mark.parametrize(
        ("how", "told"),
        [("in the old one", True), ("in both", False), ("nowhere", False), ("few", False),
         ("until it steps", False), ("other parameters", False)],
    )  # fmt: skip
    def test_learning_rates_that_the_program_sets(
        self, tmp_path: Path, how: str, told: bool
    ) -> None:
        net = model()
        of = (model() if how == "other parameters" else net).parameters()
        old, new = torch.optim.SGD(of, lr=0.3), torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2 if how == "few" else 13):
            backward(net)
            changed = {"nowhere": (), "in both": (old, new)}.get(how, (old,))
            for one in changed:
                one.param_groups[0]["lr"] = 0.2 / (1 + step)
            new.step()
            if how == "until it steps" and step > 7:
                old.step()
            net.zero_grad()
        text = suspicious(tmp_path)
        place = f"of an optimizer of class SGD at {Path(__file__).name}:"
        assert (place in text and "which never steps" in text) is told

    @pytest.mark.parametrize("both", [True, False])
    def test_one_for_each_optimizer(self, tmp_path: Path, both: bool) -> None:
        nets = [model(), model()]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        made = [torch.optim.lr_scheduler.StepLR(one, 5) for one in optimizers]
        for step in range(13):
            for net, optimizer in zip(nets, optimizers, strict=True):
                backward(net)
                optimizer.step()
                optimizer.zero_grad()
            for at in (0, 1) if step % 4 == 3 else ():
                made[at * both].step()
        assert ("A StepLR at" in suspicious(tmp_path)) is not both

    def test_a_learning_rate_that_is_taken_over(self, tmp_path: Path) -> None:
        def copied(old: Any, new: Any, _: int) -> None:
            new.param_groups[0]["lr"] = old.param_groups[0]["lr"]

        assert not self.found(tmp_path, copied)

    def test_groups_that_are_shared(self, tmp_path: Path) -> None:
        """As an optimizer shares those of the one in it."""

        def shared(old: Any, new: Any, _: int) -> None:
            new.param_groups = old.param_groups

        assert not self.found(tmp_path, shared)

    def test_one_that_steps_later(self, tmp_path: Path) -> None:
        assert not self.found(tmp_path, lambda old, _, step: old.step() if step > 9 else None)

    def test_other_parameters(self, tmp_path: Path) -> None:
        assert not self.found(tmp_path, parameters=lambda _: model().parameters())

    def test_a_schedule_that_does_nothing(self, tmp_path: Path) -> None:
        assert not self.found(tmp_path, of=lambda _: 1.0)

    def test_a_schedule_of_the_new_one(self, tmp_path: Path) -> None:
        made: list[Any] = []

        def scheduled(_: Any, new: Any, step: int) -> None:
            if not step:
                made.append(torch.optim.lr_scheduler.StepLR(new, 5))
            elif step:
                made[0].step()

        assert not self.found(tmp_path, scheduled)


@pytest.mark.parametrize("replaced", [-1, 1, None])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_layer_that_is_replaced_after_the_optimizer_was_made(
    tmp_path: Path, replaced: int | None, shape: tuple[int, ...]
) -> None:
    """Before the first step, or after the second one. A temperature is no copy of a parameter."""
    net, temperature = model(), nn.Parameter(torch.ones(shape))
    trained = net[0].parameters() if replaced is None else net.parameters()
    optimizer = torch.optim.SGD(list(trained), lr=0.1)
    other = torch.optim.SGD([temperature], lr=0.1)
    for step in range(-1, 6):
        if step == replaced:
            net[2] = nn.Linear(3, 2)
        if step < 0:
            continue
        backward(net)
        temperature.sum().backward()
        other.step()
        optimizer.step()
        optimizer.zero_grad()
    states = laws(tmp_path).models[1 if replaced != 1 else 2 :]
    assert all(set(state.left_out) == {"2.weight", "2.bias"} for state in states)
    expected = () if replaced is None else ("2.weight", "2.bias")
    assert {state.replaced for state in states} == {expected}


@pytest.mark.parametrize("kind", [list, nn.ModuleList])
@pytest.mark.parametrize("frozen", [False, True])
def test_modules_in_a_plain_list(tmp_path: Path, kind: type, frozen: bool) -> None:
    """A teacher that is kept in a list has no gradients."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind([nn.Linear(4, 4)])
            self.head = nn.Linear(4, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.layers[0](inputs)
            return self.head(hidden.detach() if frozen else hidden)

    net = Stack()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        backward(net)
        optimizer.step()
    lost = {"layers[0].weight", "layers[0].bias"} if kind is list and not frozen else set()
    assert all(set(one.left_out) == lost and not one.replaced for one in laws(tmp_path).models)


@pytest.mark.parametrize("how", ["tensor", "parameter", "given", "zeros", "not trained"])
def test_a_tensor_that_is_no_parameter(tmp_path: Path, how: str) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)
            bias = torch.zeros(2, requires_grad=how != "not trained")
            self.bias = nn.Parameter(bias) if how == "parameter" else bias

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(inputs) + self.bias * (how != "zeros")

    net = Head()
    optimizer = torch.optim.SGD([*net.parameters(), *([net.bias] if how == "given" else [])], 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        backward(net)
        optimizer.step()
    expected = ({"bias"}, ("bias",)) if how == "tensor" else (set[str](), ())
    found = [(set(one.left_out), one.tensors) for one in laws(tmp_path).models]
    assert found == [expected if how != "given" else (set(), ("bias",))] * 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("all_states", [False, True])
def test_a_load_that_asks_for_no_states(tmp_path: Path, all_states: bool) -> None:
    from torch.distributed import checkpoint

    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    backward(net)
    optimizer.step()
    checkpoint.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "saved")
    new = torch.optim.Adam(net.parameters())
    asked = optimizer.state_dict() if all_states else new.state_dict()
    checkpoint.load({"optimizer": asked}, checkpoint_id=tmp_path / "saved")
    events = laws(tmp_path).others.get("states_left", ())
    assert [event["count"] for event in events] == ([] if all_states else [12])


def test_the_step_after_a_save_is_kept_for_a_restart(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(1, 9):
        backward(net)
        optimizer.step()
        if step == 6:
            torch.save(net.state_dict(), tmp_path / "saved")
    (kept,) = laws(tmp_path).kept
    assert (kept.step, kept.count, set(kept.state)) == (7, 6, {"exp_avg", "exp_avg_sq", "step"})
    # the next attempt finds it
    first, second = (tmp_path / "run" / f"attempt-{number}" for number in (0, 1))
    second.mkdir(parents=True)
    shutil.copytree(tmp_path, first, ignore=lambda *_: {"run", "saved"})
    write_json(second / "trial.json", {"task": {"kind": "watch"}, "world_size": 1})
    assert read_trial(second).earlier == {0: (kept,)}
    assert read_trial(first.rename(first.with_name("other"))).earlier == {}


@pytest.mark.parametrize("times", [1, 2])
def test_schedulers_of_deepspeed_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """They are no schedulers of torch."""
    runtime = tmp_path / "deepspeed" / "runtime"
    runtime.mkdir(parents=True)
    (runtime / "lr_schedules.py").write_text("class WarmupLR:\n    def step(self): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    scheduler = importlib.import_module("deepspeed.runtime.lr_schedules").WarmupLR()
    net = model()
    scheduler.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(6):
        backward(net)
        scheduler.optimizer.step()
        for _ in range(times):
            scheduler.step()
    for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.lr_schedules"):
        del sys.modules[name]
    text = suspicious(tmp_path)
    assert ("WarmupLR.step() at" in text and f"{times} times for each" in text) is (times > 1)


def test_warnings_of_torch_name_the_line_of_the_caller(tmp_path: Path) -> None:
    """A frame of moediag between a call and what warns would be named in its place."""
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.warns(UserWarning, match="before `optimizer.step") as told:
        scheduler.step()
    if hasattr(scheduler, "_update_lr"):  # torch 2.13
        assert [Path(one.filename).name for one in told] == [Path(__file__).name]
