"""Attention of fake tensors by a fused kernel wherever a GPU has one.

torch's fused kernel of the CPU refuses dropout, and values of another width than keys (latent
attention): it would make whole score matrices, which no GPU holds.
"""

from __future__ import annotations

from typing import Any, Tuple

from torch.nn import functional
from torch.overrides import TorchFunctionMode


class FusedAttention(TorchFunctionMode):
    """Leaves dropout out and pads narrow values, as flash attention's callers do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any,
    **others: Any,
) -> Any:  # fmt: skip
    width = value.shape[-1]
    if width < query.shape[-1]:
        value = functional.pad(value, (0, query.shape[-1] - width))
    found = functional.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, *rest, **others
    )
    return found[..., :width]
