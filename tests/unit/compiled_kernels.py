"""Compiles the bf16 kernels for sm_90 as a launch on a Hopper GPU would. Run as a separate
program, because the test process may interpret them. Prints one line per kernel;
fails if one needs too much memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moediag.lab.step.kernels import grouped

SHARED = 227 * 1024  # bytes that one program may use on sm_90


def compiled(kernel: Any, contiguous: tuple[str, ...], sizes: dict[str, int]) -> Any:
    """``contiguous``: strides that are 1, which a launch makes constants of."""
    constants: dict[str, Any] = {**sizes, **dict.fromkeys(contiguous, 1), "WIDEN": False}
    pointers = {"x": "bf16", "weight": "bf16", "y": "bf16", "dy": "bf16", "dw": "bf16"}
    pointers |= dict.fromkeys(("tile_expert", "tile_begin", "tile_end", "offsets"), "i32")
    signature, aligned = {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = f"*{pointers[name]}" if name in pointers else "i32"
        if name != "experts":
            aligned[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 8, "num_stages": 4}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main() -> None:
    rows = {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64, "EVEN": True}
    tile = {"HEIGHT": 128, "COLUMNS": 256, "DEPTH": 64}
    kernels = (
        (grouped._rows_kernel, ("x_inner", "w_inner", "y_outer"), rows),
        (grouped._rows_kernel, ("x_inner", "w_outer", "y_outer"), rows),
        (grouped._weight_kernel, ("dy_outer", "x_inner", "w_inner"), tile),
    )
    for kernel, contiguous, sizes in kernels:
        found = compiled(kernel, contiguous, sizes)
        shared = found.metadata.shared
        if shared > SHARED:
            sys.exit(f"{kernel.fn.__name__} wants {shared} bytes of shared memory")
        units = "tensor cores" if "wgmma" in found.asm["ptx"] else "ordinary cores"
        print(kernel.fn.__name__, sizes, f"{shared} bytes", units)


if __name__ == "__main__":
    main()
