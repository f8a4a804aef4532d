"""Cuts the rows of each expert into tiles, without synchronising with the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Groups:
    """Rows sorted by expert. Expert e has rows ``offsets[e - 1]`` (0 for the first) to
    ``offsets[e]``; rows from ``offsets[-1]`` on belong to no expert.

    A tile is at most ``block`` rows of one expert, or of none. Only the device knows their number,
    so the maximum is allocated; surplus tiles are empty. All int32, one entry per tile: ``expert``
    (``experts`` for rows of no expert), first row and last + 1.
    """

    offsets: torch.Tensor
    rows: int
    block: int
    expert: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor

    @property
    def experts(self) -> int:
        return self.offsets.numel()

    @property
    def tiles(self) -> int:
        return self.expert.numel()

    @classmethod
    def of(cls, offsets: torch.Tensor, rows: int, block: int) -> Groups:
        """Returns the tiles. ``offsets``: (experts,), not decreasing, at most ``rows``; any integer
        type. Issues a dozen small operations on its device and does not wait for them."""
        experts = offsets.numel()
        ends = torch.cat([offsets, offsets.new_full((1,), rows)]).long()
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        tiles = (ends - begins + block - 1) // block
        last = tiles.cumsum(0)
        number = torch.arange(rows // block + experts + 1, device=offsets.device)
        group = torch.searchsorted(last, number, right=True)
        surplus = group > experts
        group = group.clamp(max=experts)
        begin = begins[group] + (number - (last - tiles)[group]) * block
        end = torch.minimum(begin + block, ends[group])
        return cls(
            offsets.to(torch.int32),
            rows,
            block,
            group.to(torch.int32),
            begin.masked_fill(surplus, 0).to(torch.int32),
            end.masked_fill(surplus, 0).to(torch.int32),
        )
