"""Routing that changes when activation checkpointing reruns the forward in backward.

This imitates a nondeterministic kernel, a differently broken tie, or router noise that is drawn
again: ``torch.topk`` over the experts selects by other scores in the recomputation than in the
forward. The scores themselves are unchanged, so the forward is the model's own and defines the
correct result.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from moediag.lab.step.models import skew

_FAR = 1e4  # larger than any router score
NOISE = 0.05  # of the router's noise; scores are probabilities of 8 experts, about 1/8 each

NOTES = {
    "count": "bent on purpose, for a kernel that does not repeat itself: in the recomputation the "
    "router's top-k leaves one expert out",
    "metadata": "bent on purpose, for a tie broken in another way: in the recomputation the "
    "router's top-k sends one token to another expert",
    "permuted": "bent on purpose, for choices that differ while the counts coincide: in the "
    "recomputation tokens exchange the experts that the router's top-k chose for them",
    "noise": "the router's top-k chooses by scores with noise from torch's global generator, as "
    "noisy routers do; this release's model draws none by itself",
    "none": "",
}


class Rerouted:
    """A context that changes the choices of top-k over ``experts`` scores. ``change``: a key of
    NOTES; ``pair``: under ``permuted`` only two tokens exchange their experts. ``noise`` also draws
    in the forward; the others do not change it."""

    def __init__(self, change: str, experts: int, pair: bool = False) -> None:
        self._change = change
        self._experts = experts
        self._pair = pair

    @contextmanager
    def installed(self, active: bool = True) -> Iterator[None]:
        """Installs the patch. ``active``: this rank recomputes otherwise (noise: draws any)."""
        if self._change == "none" or not active:
            yield
            return
        with skew.chosen_by(self._experts, self._choose):
            yield

    def _choose(self, scores: torch.Tensor, k: int, best: skew.Best) -> torch.Tensor:
        # The forward and the recomputation must run the same operations, or checkpointing would
        # detect that instead: the computation of the other scores is hidden from it. Selective
        # checkpointing returns the saved top-k of the forward, whatever the scores.
        by = scores.detach()
        if self._change == "noise" or recomputing():
            with _disable_current_modes():
                by = self._other(by, k)
        return best(by)

    def _other(self, scores: torch.Tensor, k: int) -> torch.Tensor:
        """Returns the scores (tokens, experts) to select by instead."""
        if self._change == "noise":
            # From the CPU's generator, as in the reference, whatever the device of the scores.
            return scores + NOISE * torch.randn(scores.shape).to(scores)
        if self._change == "permuted" and not self._pair:
            return scores.flip(0)
        chosen = scores.argsort(-1, descending=True)[:, :k]
        counts = torch.bincount(chosen.reshape(-1), minlength=self._experts)
        other = scores.clone()
        if self._change == "permuted":
            own = chosen.sort(-1).values
            second = int((own != own[0]).any(-1).nonzero()[0])
            other[[0, second]] = scores[[second, 0]]
        elif self._change == "count":
            other[:, int(counts.nonzero().max())] -= _FAR
        else:
            token, old, new = _move(chosen.tolist(), counts.tolist())
            other[token, old], other[token, new] = -_FAR, _FAR
        return other


def recomputing() -> bool:
    """Whether a backward is running, in which checkpointing reruns the forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def _move(chosen: Any, counts: Any) -> Any:
    """Returns (token, old expert, new expert); both experts have tokens before and after."""
    for token, own in enumerate(chosen):
        for old in own:
            for new, count in enumerate(counts):
                if counts[old] > 1 and count and new not in own:
                    return token, old, new
    raise ValueError("no token can move without an expert losing or gaining its only one")
