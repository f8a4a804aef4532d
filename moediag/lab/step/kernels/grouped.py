"""Grouped matrix products in Triton: one matrix per expert, rows sorted by expert.

Forward and the gradient of the input are one kernel (only the order of walking the weight differs),
the gradient of the weight is the second. Each output element is written exactly once, by one
program, without atomics. So the result is the same in every run; rows of no expert are zero, and so
is the gradient of an expert without rows. Products are summed in fp32 for every tensor type; fp32
itself is multiplied in fp32, not tf32.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Optional, Tuple

import torch
import triton
import triton.language as tl

from moediag.lab.step.kernels import interpreted
from moediag.lab.step.kernels.tiles import Groups

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Tile sizes of one program: ``rows`` x ``columns`` outputs, ``height`` x ``columns`` of the
    weight's gradient, ``depth`` products summed at once. Powers of two, at least 16, the minimum of
    ``tl.dot``."""

    rows: int
    columns: int
    height: int
    depth: int
    warps: int
    stages: int


def blocks(x: torch.Tensor, experts: int) -> Blocks:
    """Returns the tile sizes for ``x`` (rows, inner). Fixed instead of autotuned, so that two runs
    do the same.

    Two-byte types: tiles that fill a Hopper or Ampere multiprocessor without spilling registers
    (four stages of 128 x 64 and 64 x 256 operands: 192 KiB of shared memory; three, or 64 x 128,
    if there is less). With few rows per expert: lower tiles, or most of one would be padding. fp32
    is bound by the ordinary cores, so small tiles are sufficient.
    """
    if INTERPRETED:
        return Blocks(16, 32, 32, 32, 1, 1)
    if x.dtype == torch.float32:
        return Blocks(64, 64, 64, 32, 4, 2)
    if x.shape[0] >= 64 * experts:
        kib = _shared_memory(x) // 1024
        return Blocks(128, 256 if kib >= 160 else 128, 128, 64, 8, 4 if kib >= 200 else 3)
    return Blocks(64 if x.shape[0] >= 16 * experts else 16, 128, 128, 64, 4, 3)


def _shared_memory(x: torch.Tensor) -> int:
    """Returns the bytes that one program may use; 0 if torch does not report it."""
    properties: Any = torch.cuda.get_device_properties(x.device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))


@triton.jit
def _rows_kernel(
    x, weight, y, tile_expert, tile_begin, tile_end, experts, inner, outer,
    x_row, x_inner, w_expert, w_inner, w_outer, y_row, y_outer,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """y[r] = x[r] @ weight[expert of r], (inner) x (inner, outer); zero for rows of no expert.
    ``EVEN``: DEPTH divides inner."""
    across = tl.cdiv(outer, COLUMNS)
    tile = tl.program_id(0) // across
    expert = tl.load(tile_expert + tile).to(tl.int64)
    # Rows of no expert: writes zeros without reading a weight.
    depth = tl.where(expert < experts, inner, 0)
    row = tl.load(tile_begin + tile) + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    rows = (row < tl.load(tile_end + tile))[:, None]
    columns = (column < outer)[None, :]
    row64 = row.to(tl.int64)  # rows x columns of a large step do not fit 32 bits
    column64 = column.to(tl.int64)
    at64 = at.to(tl.int64)
    left = x + row64[:, None] * x_row + at64[None, :] * x_inner
    right = weight + expert * w_expert + at64[:, None] * w_inner + column64[None, :] * w_outer
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, depth, DEPTH):
        if EVEN:
            a = tl.load(left, mask=rows, other=0.0)
            b = tl.load(right, mask=columns, other=0.0)
        else:
            inside = first + at < inner
            a = tl.load(left, mask=rows & inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None] & columns, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += DEPTH * x_inner
        right += DEPTH * w_inner
    tl.store(
        y + row64[:, None] * y_row + column64[None, :] * y_outer,
        total.to(y.dtype.element_ty),
        mask=rows & columns,
    )


@triton.jit
def _weight_kernel(
    dy, x, dw, offsets, inner, outer,
    dy_row, dy_outer, x_row, x_inner, w_expert, w_inner, w_outer,
    HEIGHT: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dw[e] = (rows of e of dy)^T @ (rows of e of x), (outer, inner); zero without rows."""
    across = tl.cdiv(inner, COLUMNS)
    pieces = tl.cdiv(outer, HEIGHT) * across
    expert = tl.program_id(0) // pieces
    piece = tl.program_id(0) % pieces
    begin = tl.load(offsets + tl.maximum(expert - 1, 0))
    begin = tl.where(expert > 0, begin, 0)
    end = tl.load(offsets + expert)
    out = (piece // across) * HEIGHT + tl.arange(0, HEIGHT)
    into = (piece % across) * COLUMNS + tl.arange(0, COLUMNS)
    outs = (out < outer)[:, None]
    intos = (into < inner)[None, :]
    at = tl.arange(0, DEPTH)
    out64 = out.to(tl.int64)
    into64 = into.to(tl.int64)
    row64 = (begin + at).to(tl.int64)
    left = dy + row64[None, :] * dy_row + out64[:, None] * dy_outer
    right = x + row64[:, None] * x_row + into64[None, :] * x_inner
    total = tl.zeros((HEIGHT, COLUMNS), dtype=tl.float32)
    for first in range(begin, end, DEPTH):
        inside = first + at < end
        a = tl.load(left, mask=outs & inside[None, :], other=0.0)
        b = tl.load(right, mask=inside[:, None] & intos, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += DEPTH * dy_row
        right += DEPTH * x_row
    tl.store(
        dw + expert.to(tl.int64) * w_expert + out64[:, None] * w_outer + into64[None, :] * w_inner,
        total.to(dw.dtype.element_ty),
        mask=outs & intos,
    )


INTERPRETED = not isinstance(_rows_kernel, triton.runtime.JITFunction)
if INTERPRETED:
    interpreted.prepare()


def groups_for(x: torch.Tensor, offsets: torch.Tensor) -> Groups:
    """Returns the tiles of ``x`` (rows, inner). ``offsets``: see :class:`Groups`."""
    return Groups.of(offsets, x.shape[0], blocks(x, offsets.numel()).rows)


def linear(
    x: torch.Tensor, weight: torch.Tensor, groups: Groups, transposed: bool = False
) -> torch.Tensor:
    """Returns (rows, outer) in x's type; rows of no expert are zero. x (rows, inner) is sorted by
    expert; ``weight`` is (experts, outer, inner), or with ``transposed`` (experts, inner, outer).
    Any strides; differentiable once in x and weight. Raises ValueError for invalid shapes, types
    and devices."""
    _check(x, weight, groups, transposed)
    result: torch.Tensor = _Linear.apply(x, weight, groups, transposed)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, groups: Groups, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.transposed = groups, transposed
        return rows_product(x, _inner_outer(weight, transposed), groups)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dy: torch.Tensor
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor], None, None]:
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            across = _inner_outer(weight, not ctx.transposed)
            dx = rows_product(dy, across, ctx.groups)
        if ctx.needs_input_grad[1]:
            dw = torch.empty_like(weight, dtype=_written(weight.dtype))
            weight_product(dy, x, _inner_outer(dw, ctx.transposed), ctx.groups)
            dw = dw.to(weight.dtype)
        return dx, dw, None, None


def rows_product(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Returns (rows, outer). x (rows, inner), ``weight`` (experts, inner, outer)."""
    inner, outer = weight.shape[1:]
    y = torch.empty(x.shape[0], outer, dtype=_written(x.dtype), device=x.device)
    if not y.numel():
        return y.to(x.dtype)
    block = blocks(x, groups.experts)
    grid = (groups.tiles * triton.cdiv(outer, block.columns),)
    with _on(x):
        _rows_kernel[grid](
            x, weight, y, groups.expert, groups.begin, groups.end, groups.experts, inner, outer,
            *x.stride(), *weight.stride(), *y.stride(),
            ROWS=groups.block, COLUMNS=block.columns, DEPTH=block.depth,
            EVEN=inner % block.depth == 0, WIDEN=INTERPRETED,
            num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip
    return y.to(x.dtype)


def weight_product(
    dy: torch.Tensor, x: torch.Tensor, dw: torch.Tensor, groups: Groups
) -> torch.Tensor:
    """Fills and returns ``dw`` (experts, inner, outer). dy (rows, outer), x (rows, inner)."""
    inner, outer = dw.shape[1:]
    if not dw.numel():
        return dw
    block = blocks(x, groups.experts)
    pieces = triton.cdiv(outer, block.height) * triton.cdiv(inner, block.columns)
    with _on(x):
        _weight_kernel[(groups.experts * pieces,)](
            dy, x, dw, groups.offsets, inner, outer,
            *dy.stride(), *x.stride(), *dw.stride(),
            HEIGHT=block.height, COLUMNS=block.columns, DEPTH=block.depth, WIDEN=INTERPRETED,
            num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip
    return dw


def _written(dtype: torch.dtype) -> torch.dtype:
    """Returns the type that a kernel writes. The interpreter truncates fp32 to bf16 while a GPU
    rounds; torch rounds, so in the interpreter the kernel writes fp32 and torch casts."""
    return torch.float32 if INTERPRETED else dtype


def _inner_outer(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Returns a view (experts, inner, outer), whatever the layout of the parameter."""
    return weight if transposed else weight.transpose(1, 2)


def _on(x: torch.Tensor) -> Any:
    """Makes the tensor's device current, because Triton launches there."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _check(x: torch.Tensor, weight: torch.Tensor, groups: Groups, transposed: bool) -> None:
    if x.dtype != weight.dtype or x.dtype not in DTYPES:
        known = ", ".join(str(d).replace("torch.", "") for d in DTYPES)
        raise ValueError(
            f"rows are {x.dtype} and weights {weight.dtype}: both must be one of {known}"
        )
    inner = weight.shape[1 if transposed else 2]
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != inner:
        raise ValueError(
            f"rows {tuple(x.shape)} do not fit weights {tuple(weight.shape)}, {inner} deep"
        )
    if weight.shape[0] != groups.experts or x.shape[0] != groups.rows:
        raise ValueError(
            f"groups are of {groups.experts} experts and {groups.rows} rows, the tensors of "
            f"{weight.shape[0]} and {x.shape[0]}"
        )
    if not x.is_cuda and not INTERPRETED:
        raise ValueError(
            "Triton computes CPU tensors through its interpreter alone: set TRITON_INTERPRET=1 "
            "before triton is imported"
        )
