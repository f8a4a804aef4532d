"""A stand-in for an inference engine that gets its weights from a trainer.

Like vLLM and SGLang it knows the names of the checkpoint, one per expert and projection, and after
loading it stores the experts in another layout than it loads them in: up before gate.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, Dict, Iterator, Set, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from moediag.lab.step import data
from moediag.lab.step.models import tiny
from moediag.protocol import Trial

_PACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
Named = Iterator[Tuple[str, torch.Tensor]]


def named(name: str, tensor: torch.Tensor, names: str) -> Named:
    """Yields a parameter of transformers as it is sent. ``names``: an option of weight-sync."""
    match = _PACKED.match(name)
    if match is None or names == "packed":
        yield name, tensor
        return
    for expert, matrix in enumerate(tensor):
        projections = {"down": matrix}
        if match[2] == "gate_up_proj":
            halves = matrix.chunk(2)
            gate, up = reversed(halves) if names == "per-expert-up-first" else halves
            projections = {"gate": gate, "up": up}
        for projection, part in projections.items():
            yield f"{match[1]}.{expert}.{projection}_proj.weight", part.contiguous()


class Engine:
    """One whole model. ``options``: of weight-sync."""

    def __init__(self, trial: Trial, options: Dict[str, Any]) -> None:
        self._trial = trial
        self._options = options
        self._model = tiny.build(trial.model, trial.step.seed, dtype="float32", experts="eager")
        self._parameters: Dict[str, torch.Tensor] = {
            name: p.detach() for name, p in self._model.named_parameters()
        }
        self._loading: Set[str] = set()  # in the layout in which they are loaded
        for name in self._parameters:
            self._convert(name)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Loads one tensor of an update. Raises KeyError for a name that it refuses."""
        match = _OF_EXPERT.match(name)
        if match is None:
            if name in self._parameters and not _PACKED.match(name):
                self._parameters[name].copy_(tensor)
            elif self._options["unknown"] == "refused":
                raise KeyError(f"no parameter of this engine is called {name}")
            return
        experts, expert, projection = match[1], int(match[2]), match[3]
        packed = f"{experts}.{'down' if projection == 'down' else 'gate_up'}_proj"
        if packed not in self._loading:
            self._convert(packed)
            self._loading.add(packed)
        place = self._parameters[packed][expert]
        if projection != "down":
            place = place.chunk(2)[projection == "up"]
        place.copy_(tensor)

    def finish(self) -> None:
        """Ends an update: stores what was loaded as it computes with it."""
        every = self._options["converted"] == "all"
        for name in self._parameters if every else self._loading:
            self._convert(name)
        self._loading.clear()

    @contextlib.contextmanager
    def computing(self) -> Iterator[nn.Module]:
        """Yields the model as it computes."""
        for name in self._parameters:
            self._convert(name)
        yield self._model
        for name in self._parameters:
            self._convert(name)

    def _convert(self, name: str) -> None:
        """Exchanges gate and up; its own inverse."""
        if name.endswith(".gate_up_proj"):
            packed = self._parameters[name]  # (experts, gate and up, hidden)
            packed.copy_(packed.roll(packed.shape[1] // 2, dims=1))


@torch.no_grad()
def loss(model: nn.Module, trial: Trial) -> float:
    """Returns the loss of a whole model on a batch that is always the same."""
    called: Any = model
    tokens = data.batch(trial, 0, 1, 0)
    logits = called(input_ids=tokens).logits
    return float(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
