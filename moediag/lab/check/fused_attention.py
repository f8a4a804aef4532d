"""Attention of fake tensors by a fused kernel wherever a GPU has one.

torch's fused kernel of the CPU refuses dropout, and values of another width than keys (latent
attention): it would make whole score matrices, which no GPU holds.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator
from unittest import mock

from torch.nn import functional


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Leaves dropout out and pads narrow values, as callers of flash attention do. A mode of torch
    would not be active where backward computes a layer again."""
    original = functional.scaled_dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        *rest: Any, **others: Any,
    ) -> Any:  # fmt: skip
        width = value.shape[-1]
        if width < query.shape[-1]:
            value = functional.pad(value, (0, query.shape[-1] - width))
        return original(query, key, value, attn_mask, 0.0, *rest, **others)[..., :width]

    with mock.patch.object(functional, "scaled_dot_product_attention", attention):
        yield
