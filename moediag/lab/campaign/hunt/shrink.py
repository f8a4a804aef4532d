"""Searches the smallest size of a model at which a difference still shows. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from moediag.protocol import Size

# In the order in which they are reduced: what a reader has to understand first.
FIELDS = ("experts", "top_k", "heads", "kv_heads", "hidden", "head_dim", "width")


def smallest(shows: Callable[[Size], bool], size: Size) -> Size:
    """Returns the smallest size that ``shows``, field by field, beginning with ``size``, which
    does. Another order of the fields may find another size."""
    for field in FIELDS:
        size = next((one for one in _smaller(size, field) if shows(one)), size)
    return size


def _smaller(size: Size, field: str) -> Iterator[Size]:
    """Yields sizes with less of ``field``, the smallest first."""
    value = 1
    while value < getattr(size, field):
        found = dataclasses.replace(size, **{field: value})
        if found.top_k <= found.experts and found.heads % found.kv_heads == 0:
            yield found
        value *= 2
