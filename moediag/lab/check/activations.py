"""What lives at each moment of a step, at full depth, from steps of a few layers on fake tensors.

Layers of one kind are alike. The model keeps the first and the last layer of each kind; a second
run with one layer more of a kind tells what each of the others adds to each moment. All runs are
in one process: torch's fake tensors remember the shapes that operations returned.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, Callable, Dict, Hashable, List, Sequence, Tuple, TypeVar

import torch
from torch import nn

from moediag.axes import CP, EP, PP, TP, Layout
from moediag.lab.check.configured import Configured
from moediag.lab.check.fused_attention import fused_attention
from moediag.lab.check.live_tensors import LOSS_BACKWARD, Timeline
from moediag.lab.check.simulated_group import ChildRaised, in_child
from moediag.lab.check.traffic import Sent
from moediag.lab.check.unreal_routing import UnrealRouting, not_traced
from moediag.lab.step.shard import activation_checkpointing
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import CheckTask, MemoryPhase, MemoryTimeline, Traffic, Trial
from moediag.recorder.not_applicable import NotApplicable

# Name of --recompute -> what a region saves; see activation_checkpointing.SAVED.
RECOMPUTED = {"layers": "nothing", "selective": "matmul-attention"}
_KINDS = 4  # kinds of layers that are told apart
_FIXED = ("name", "ranks", "last")  # do not depend on the number of layers
_Named = TypeVar("_Named", MemoryPhase, Traffic)
Ran = Tuple[List[MemoryPhase], List[Traffic]]


def measured(
    configured: Configured, wrapped: Wrapped, again: Callable[[], Wrapped], trial: Trial,
    folder: Path,
) -> MemoryTimeline:  # fmt: skip
    """Returns the moments of one forward and backward. In a simulated process group; the model is
    sharded, without weights, and ``again`` makes another. Raises NotApplicable."""
    layout = Layout(trial.layout)
    if layout.size(PP) > 1:
        raise NotApplicable(f"{PP} has a schedule of micro-batches of its own")
    most = _most_received(configured, trial) if layout.size(EP) > 1 else 0
    task = trial.task
    assert isinstance(task, CheckTask)

    def work() -> MemoryTimeline:
        torch.set_num_threads(1)
        layers, unused = _Layers(wrapped, task.reserved), [wrapped]
        ran: List[Timeline] = []

        def step(kept: List[int], received: int) -> Ran:
            model = unused.pop() if unused else again()
            found, sent = _step(configured, model, trial, kept, received)
            ran.append(found)
            return list(found.phases.values()), sent

        def run(received: int) -> Ran:
            return layers.at_full_depth(lambda kept: step(kept, received))

        phases, traffic = run(0)
        worst = run(most)[0] if most and not task.brief else []
        events = ran[0].events if task.reserved else []
        return MemoryTimeline(phases, worst, layers.shallow, traffic, events, ran[0].before)

    try:
        found: MemoryTimeline = in_child(work, folder)
    except ChildRaised as error:
        why = error.args[0]
        if why.refused:
            raise NotApplicable(why.words) from error
        at = f" at {why.where}" if why.where else ""
        raise NotApplicable(f"a step on fake tensors raises {why.words}{at}") from error
    return found


class _Layers:
    """The decoder layers of a model: a list of modules, of a few kinds. ``whole``: all are kept."""

    def __init__(self, wrapped: Wrapped, whole: bool = False) -> None:
        lists: Dict[str, List[Tuple[int, nn.Module]]] = {}
        for name, module in wrapped.anatomy.layers:
            parent, _, number = name.rpartition(".")
            if number.isdecimal():
                lists.setdefault(parent, []).append((int(number), module))
        if not lists:
            raise NotApplicable("the model has no list of layers")
        self.count = max(map(len, lists.values()))
        parent, found = next(item for item in lists.items() if len(item[1]) == self.count)
        types = getattr(wrapped.model.config.get_text_config(), "layer_types", None) or ()
        kinds = [_kind(module, types[n] if n < len(types) else "") for n, module in found]
        self.base, self.more = (list(range(self.count)), []) if whole else chosen(kinds)
        self.shallow = len(self.base)
        self.parent = parent

    def at_full_depth(self, run: Callable[[List[int]], Ran]) -> Ran:
        phases, sent = run(self.base)
        longer = [(run(sorted([*self.base, extra])), rest) for extra, rest in self.more]
        return (
            extended(phases, [(one, rest) for (one, _), rest in longer]),
            extended(sent, [(one, rest) for (_, one), rest in longer]),
        )


def chosen(kinds: Sequence[Hashable]) -> Tuple[List[int], List[Tuple[int, int]]]:
    """Returns the layers to keep, and for each kind with others: one of those, and how many they
    are. Raises NotApplicable for too many kinds."""
    places: Dict[Hashable, List[int]] = {}
    for number, kind in enumerate(kinds):
        places.setdefault(kind, []).append(number)
    if len(places) > _KINDS:
        raise NotApplicable(f"its layers are of {len(places)} kinds, more than {_KINDS}")
    base = sorted({n for found in places.values() for n in (found[0], found[-1])})
    more = [(found[1], len(found) - 2) for found in places.values() if len(found) > 2]
    return base, more


def extended(
    base: Sequence[_Named], longer: Sequence[Tuple[Sequence[_Named], int]]
) -> List[_Named]:
    """Returns the moments, or the traffic, of the full model. ``longer``: those of a model with one
    layer more, and how many such layers the full model has more than the base."""
    found = []
    for one in base:
        values = dict(vars(one))
        for others, count in longer:
            same = next((other for other in others if other.name == one.name), one)
            for name, value in vars(one).items():
                if name not in _FIXED:
                    values[name] += count * (getattr(same, name) - value)
        found.append(type(one)(**{n: v if n in _FIXED else max(v, 0) for n, v in values.items()}))
    return found


def _kind(layer: nn.Module, named: str) -> Hashable:
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in layer.named_parameters())
    return type(layer).__name__, named, shapes


def _most_received(configured: Configured, trial: Trial) -> int:
    """Returns the rows that a peer of expert parallelism can send to this rank at most."""
    local = max(configured.experts // Layout(trial.layout).size(EP), 1)
    return _dispatched(trial) * min(configured.top_k, local)


def _dispatched(trial: Trial) -> int:
    """Returns the tokens that this rank sends to experts: ranks of tp share a batch, and each
    dispatches a part of it."""
    rows, length = tokens(trial)
    return math.ceil(rows * length / Layout(trial.layout).size(TP))


def tokens(trial: Trial) -> Tuple[int, int]:
    """Returns the batch and the length of a rank's part of a sequence."""
    task = trial.task
    assert isinstance(task, CheckTask)
    return task.batch, math.ceil(task.length / Layout(trial.layout).size(CP))


def _step(
    configured: Configured, wrapped: Wrapped, trial: Trial, kept: Sequence[int], received: int
) -> Tuple[Timeline, List[Traffic]]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    task = trial.task
    assert isinstance(task, CheckTask)
    model: Any = wrapped.model
    layers = shorten(model, _Layers(wrapped).parent, kept)
    rows, length = tokens(trial)
    pairs = _dispatched(trial) * configured.top_k
    sent = max(pairs // Layout(trial.layout).size(EP), 1)
    fake = FakeTensorMode()
    with fake, not_traced(), fused_attention():
        model._apply(_without_data)
        recompute(model, task.recompute)
        ids = torch.zeros((rows, length), dtype=torch.long)
        routing = UnrealRouting(fake, configured.experts, sent, received or sent)
        calls = Sent(" x ".join(map(str, Layout(trial.layout).active)))
        return run(model, layers, ids, routing, calls), calls.traffic()


def run(model: Any, layers: Sequence[Tuple[int, nn.Module]], ids: Any, *modes: Any) -> Timeline:
    """Returns what one forward and backward held, on fake or real tensors."""
    timeline = Timeline()
    tracker = timeline.tracker(model)
    tracker._update_and_maybe_create_winfos(ids, list(tracker._ref_class)[-1])
    with contextlib.ExitStack() as stack:
        for mode in (tracker, *modes, timeline.following(layers, tracker)):
            stack.enter_context(mode)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        timeline.enter(LOSS_BACKWARD)
        loss.backward()
    return timeline


def recompute(model: Any, kind: str) -> None:
    """Makes each layer a region that backward computes again. ``kind``: as --recompute."""
    if kind != "none":
        options = dict(preserve_rng=True, save=RECOMPUTED[kind], mutate=False)
        activation_checkpointing.enable(model, "non-reentrant", options)


def shorten(model: Any, parent: str, kept: Sequence[int]) -> List[Tuple[int, nn.Module]]:
    """Removes all layers but those ``kept`` from the list ``parent``. Returns them with their
    numbers."""
    above, _, name = parent.rpartition(".")
    owner = model.get_submodule(above)
    layers = getattr(owner, name)
    setattr(owner, name, nn.ModuleList([layers[number] for number in kept]))
    for config in (model.config, model.config.get_text_config()):
        types = getattr(config, "layer_types", None)
        if types and len(types) == len(layers):
            config.layer_types = [types[number] for number in kept]
        if getattr(config, "num_hidden_layers", None) == len(layers):
            config.num_hidden_layers = len(kept)
    return [(number, layers[number]) for number in kept]


def _without_data(tensor: Any) -> Any:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    local = torch.empty(tensor._local_tensor.shape, dtype=tensor.dtype)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
        stride=tensor.stride(),
    )  # fmt: skip
