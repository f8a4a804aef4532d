"""The tensors that live during forward and backward of a sharded model, as torch counts them.

The model runs on fake tensors: no data, the library's own code, torch's own MemTracker. A stretch
of time is named by the layer whose forward or backward runs.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import nn

from moediag.protocol import MemoryPhase
from moediag.recorder.not_applicable import NotApplicable

_TOOLS = "torch.distributed._tools"
# Kinds of memory in torch's trackers -> those of a phase.
_KINDS = {
    "Sharded Param": "parameters", "Parameter": "parameters", "Buffer": "parameters",
    "Sharded Grad": "gradients", "Gradient": "gradients",
    "Unsharded Param": "gathered", "Unsharded Grad": "gathered", "All Gather": "gathered",
    "Reduce Scatter": "gathered", "Activation": "activations", "Inputs": "activations",
    "Other": "activations", "Temp": "temporary",
}  # fmt: skip
BEFORE, LOSS, LOSS_BACKWARD = "before the first layer", "head and loss", "backward of the loss"


class Timeline:
    """``phases``: the moment of each stretch of time at which most was alive; ``events`` and
    ``before``: as those of a MemoryTimeline."""

    def __init__(self) -> None:
        self.phases: Dict[str, MemoryPhase] = {}
        self.events: List[Tuple[int, int, int]] = []
        self.before = 0
        self._streams: List[Any] = [torch.cpu.current_stream()]
        self._now = BEFORE
        self._most = 0

    def enter(self, name: str) -> None:
        self._now = name
        self._most = getattr(self.phases.get(name), "total", 0)

    def note(self, snapshot: Dict[Any, Dict[Any, int]]) -> None:
        """Keeps the snapshot of a tracker if it is the largest of this stretch."""
        for held in snapshot.values():
            if held["Total"] > self._most:
                self._most = held["Total"]
                kinds: Dict[str, int] = {}
                for kind, size in held.items():
                    if kind != "Total":
                        name = _KINDS.get(kind.value, "temporary")
                        kinds[name] = kinds.get(name, 0) + size
                self.phases[self._now] = MemoryPhase(self._now, **kinds)

    def hold(self, tensor: int, size: int) -> None:
        """Notes the bytes that a tensor holds from now on, allocated on the current stream: FSDP2
        changes streams on a CPU, too."""
        stream = torch.cpu.current_stream()
        if stream not in self._streams:
            self._streams.append(stream)
        self.events.append((tensor, size, self._streams.index(stream)))

    def tracker(self, model: nn.Module) -> Any:
        """Returns torch's tracker for ``model``, which tells this timeline. Raises
        NotApplicable."""
        try:
            sharded = importlib.import_module(f"{_TOOLS}.fsdp2_mem_tracker")
            whole = importlib.import_module(f"{_TOOLS}.mem_tracker")
            fsdp: Any = importlib.import_module("torch.distributed.fsdp").FSDPModule
        except (ImportError, AttributeError) as error:
            raise NotApplicable(f"torch {torch.__version__} has no FSDPMemTracker") from error
        is_sharded = isinstance(model, fsdp)
        kind: Any = sharded.FSDPMemTracker if is_sharded else whole.MemTracker
        timeline = self

        class Tracker(kind):
            def _update_snap(self, update: Any, info: Any, *rest: Any, **others: Any) -> None:
                super()._update_snap(update, info, *rest, **others)
                if update.name != "REF":
                    timeline.hold(id(info), 0 if update.name == "DEL" else info.mem_consumed)

            def _update_peak_stats(self, _: Any) -> None:
                timeline.note(self._curr_mem_snap)

        made: Any = Tracker(model) if is_sharded else Tracker()
        # FSDP's tracker knows the parameters of its groups alone.
        kinds = made._ref_class
        held = kinds["SHARDED_PARAM" if is_sharded else "PARAM"]
        for parameter in model.parameters():
            made._update_and_maybe_create_winfos(parameter, held)
        for buffer in model.buffers():
            made._update_and_maybe_create_winfos(buffer, kinds["BUFFER"])
        self.before = len(self.events)
        return made

    @contextlib.contextmanager
    def following(self, layers: Sequence[Tuple[int, nn.Module]], tracker: Any) -> Iterator[None]:
        """Enters the stretches of ``layers``, (number, module), while they run."""
        hooks: List[Any] = []
        last = layers[-1][0] if layers else None

        def follow(number: int, layer: nn.Module) -> None:
            def before(*_: Any) -> None:
                if not tracker._mod_tracker.is_bw:  # recomputation is a part of backward
                    self.enter(f"forward of layer {number}")

            def after(_module: Any, _args: Any, output: Any) -> None:
                if tracker._mod_tracker.is_bw:
                    return
                hidden = output[0] if isinstance(output, tuple) else output
                hidden.register_hook(lambda _: self.enter(f"backward of layer {number}"))
                if number == last:
                    self.enter(LOSS)

            hooks.append(layer.register_forward_pre_hook(before))
            hooks.append(layer.register_forward_hook(after))

        for number, layer in layers:
            follow(number, layer)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
