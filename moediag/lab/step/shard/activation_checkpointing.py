"""Ways to checkpoint activations of a mixture-of-experts model, and the fixes proposed for them.

The released way is transformers' own switch: every decoder layer is a checkpointed region.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from types import MethodType
from typing import Any, Dict, Iterator, List, Optional

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from moediag.lab.step.models.tiny import Anatomy
from moediag.recorder.not_applicable import NotApplicable

# What selective checkpointing saves in the forward and reuses instead of recomputing.
SAVED: Dict[str, List[Any]] = {
    "nothing": [],
    "top-k": [torch.ops.aten.topk.default],
    "matmul": [torch.ops.aten.mm.default, torch.ops.aten.bmm.default],
    "matmul-attention": [
        getattr(torch.ops.aten, name).default
        for name in (
            "mm", "bmm", "_grouped_mm", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        )
        if hasattr(torch.ops.aten, name)
    ],
}  # fmt: skip


def enable(model: nn.Module, kind: str, options: Dict[str, Any]) -> None:
    """Makes each decoder layer a region, through transformers. ``kind``: none | reentrant |
    non-reentrant; ``options``: of the program, ``preserve_rng`` and ``save`` (a key of SAVED) with
    ``mutate``, whether saved tensors may be modified."""
    if kind == "none":
        return
    arguments: Dict[str, Any] = dict(use_reentrant=kind == "reentrant")
    if not options["preserve_rng"]:
        arguments["preserve_rng_state"] = False
    if options["save"] != "nothing":
        arguments["context_fn"] = functools.partial(
            torch_checkpoint.create_selective_checkpoint_contexts,
            SAVED[options["save"]],
            allow_cache_entry_mutation=options["mutate"],
        )
    switchable: Any = model
    switchable.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def router_outside(anatomy: Anatomy) -> None:
    """Makes attention and experts separate regions and leaves the router between them outside: its
    choice in the forward is an input of the experts' region. Raises NotApplicable for a block of
    another structure."""
    for _, layer in anatomy.layers:
        attention: Any = getattr(layer, "self_attn", None)
        if attention is None:
            raise NotApplicable("the decoder layer has no self_attn to be checkpointed alone")
        attention.forward = functools.partial(_region, attention.forward)
    if not anatomy.fused:
        _rewrite(anatomy, _region, every=False)
        return
    for block in anatomy.blocks:  # transformers 5 passes the selection to the experts
        experts: Any = block.module.experts
        experts.forward = functools.partial(_region, experts.forward)


def rewritten(anatomy: Anatomy, block: str) -> None:
    """Rewrites the blocks. ``block``: ``released``, unchanged; ``not-in-place``, the router's
    weights are normalised into a new tensor; ``every-expert``, that, and the loop visits each
    expert, also without tokens (SkyRL #1370). Raises NotApplicable."""
    if block != "released":
        _rewrite(anatomy, _inline, every=block == "every-expert")


def _rewrite(anatomy: Anatomy, region: Any, every: bool) -> None:
    for block in anatomy.blocks:
        if not block.experts or not isinstance(getattr(block.module, "gate", None), nn.Linear):
            name = type(block.module).__name__
            raise NotApplicable(f"another order of router and experts is not written for {name}")
        module: Any = block.module
        module.forward = MethodType(functools.partial(_block, region=region, every=every), module)


def _region(function: Any, *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def _inline(function: Any, *args: Any) -> Any:
    return function(*args)


def _block(self: Any, hidden_states: torch.Tensor, region: Any, every: bool) -> Any:
    """Maps (batch, seq, hidden) to the same and the router's logits, as the released block."""
    shape = hidden_states.shape
    hidden = hidden_states.reshape(-1, shape[-1])
    logits = self.gate(hidden)
    weights = F.softmax(logits, dim=1, dtype=torch.float)
    weights, chosen = torch.topk(weights, self.top_k, dim=-1)
    if getattr(self, "norm_topk_prob", True):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    output = region(_experts, self.experts, hidden, weights.to(hidden.dtype), chosen, every)
    return output.reshape(shape), logits


def _experts(
    experts: Any, hidden: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, every: bool
) -> torch.Tensor:
    """Runs the released loop over experts that have tokens, or over ``every`` expert. hidden
    (tokens, hidden); weights, chosen (tokens, top_k)."""
    output = torch.zeros_like(hidden)
    for number in range(len(experts)) if every else chosen.unique().tolist():
        token, place = torch.where(chosen == number)
        part = experts[number](hidden[token]) * weights[token, place, None]
        output = output.index_add(0, token, part)
    return output


@contextmanager
def tolerant_unpack(substitute: str) -> Iterator["Tolerance"]:
    """For the duration of the context, backward does not raise if the recomputation saved other
    tensors than the forward, and replaces missing ones. ``substitute``: ``scalar``, a zero without
    dimensions, as proposed; ``zeros``, of the saved shape, also for tensors recomputed in another
    shape."""
    hook: Any = torch_checkpoint._checkpoint_hook
    found = Tolerance()

    class Tolerant(hook):
        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            hooks: Any = self
            strict = hooks.unpack_hook
            hooks.unpack_hook = functools.partial(_unpack, strict, frame, substitute, found)

    module: Any = torch_checkpoint
    module._checkpoint_hook = Tolerant
    try:
        yield found
    finally:
        module._checkpoint_hook = hook


class Tolerance:
    """``replaced``: number of tensors that backward got and no forward had computed."""

    def __init__(self) -> None:
        self.replaced = 0


def _unpack(strict: Any, frame: Any, substitute: str, found: Tolerance, holder: Any) -> Any:
    try:
        value = strict(holder)
    except (torch_checkpoint.CheckpointError, AssertionError):
        value = _again(strict, holder)
    saved = _saved(frame, holder)
    if value is not None and (substitute == "scalar" or value.shape == saved["shape"]):
        return value
    found.replaced += 1
    shape = () if substitute == "scalar" else saved["shape"]
    return torch.zeros(shape, dtype=saved["dtype"], device=saved["device"])


def _again(strict: Any, holder: Any) -> Optional[torch.Tensor]:
    """Returns the tensor, if any; the region is already recomputed and not checked again."""
    try:
        value: torch.Tensor = strict(holder)
    except (torch_checkpoint.CheckpointError, AssertionError):
        return None
    return value


def _saved(frame: Any, holder: Any) -> Dict[str, Any]:
    """Returns shape, dtype and device of what the forward saved."""
    for number, reference in enumerate(frame.weak_holders):
        if reference() is holder:
            known: Dict[str, Any] = frame.x_metadatas[number]
            return known
    raise LookupError("a saved tensor that this checkpointed region does not know")
