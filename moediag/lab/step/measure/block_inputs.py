"""The gradient of each MoE block's input, which trains the layers below.

A router or an expert with a correct own gradient can still pass a wrong one down (only this
distinguishes torchtitan #2416 from its rejected alternatives).
"""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch

from moediag.lab.step.models.tiny import Anatomy


class InputGradients:
    """A context in which every backward stores, per MoE block (FQN), the gradient of the block's
    first floating-point input: one per forward, in the order of the backwards."""

    def __init__(self, anatomy: Anatomy) -> None:
        self._blocks = [(block.fqn, block.module) for block in anatomy.blocks]
        self._kept: Dict[str, List[torch.Tensor]] = {}
        self._handles: List[Any] = []

    def __enter__(self) -> InputGradients:
        for fqn, module in self._blocks:
            hook = self._hook(fqn)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def take(self) -> Dict[str, torch.Tensor]:
        """Returns FQN -> fp32, shape (forwards, *shape of the input), of all backwards since the
        last call. Omits a block whose input needed no gradient."""
        kept, self._kept = self._kept, {}
        return {fqn: torch.stack(parts) for fqn, parts in kept.items()}

    def _hook(self, fqn: str) -> Any:
        def before(module: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
            values = [*args, *kwargs.values()]
            for place, value in enumerate(values):
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    if not value.requires_grad:  # the first pass of reentrant checkpointing
                        return None
                    # Of a view, so that what else reads the tensor adds nothing.
                    values[place] = value.view_as(value)
                    values[place].register_hook(keep)
                    named = zip(kwargs, values[len(args) :])  # noqa: B905 - Python 3.9
                    return tuple(values[: len(args)]), dict(named)
            return None

        def keep(gradient: Any) -> None:
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            self._kept.setdefault(fqn, []).append(whole.detach().float().cpu())

        return before
