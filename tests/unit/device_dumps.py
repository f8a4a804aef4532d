"""Made-up dumps of NCCL's Flight Recorder for a device that is stuck at some call, in the format of
torch 2.13 (2.10), for machines without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moediag.evidence.model import Collective, Evidence, Frame, Stack, Stall

_NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base",
          "barrier": "all_reduce_barrier"}  # fmt: skip


def dump(
    calls: Sequence[Collective], done: int, begun: bool = True, first: int = 0, **more: Any
) -> dict[str, Any]:
    """The dump of one rank: ``done`` of its ``calls`` completed, the next is ``begun``; the ring
    holds those from ``first`` on."""
    counts: dict[str, int] = {}
    entries = []
    for index, call in enumerate(calls):
        counts[call.group] = counts.get(call.group, 0) + 1
        state = "completed" if index < done else "scheduled"
        if begun and index == done:
            state = "started"
        barrier = call.op == "barrier"
        entries.append({
            "record_id": index, "pg_id": 0, "process_group": (call.group, "mesh_dp_shard"),
            "collective_seq_id": counts[call.group], "p2p_seq_id": 0, "op_id": index + 1,
            "profiling_name": f"nccl:{_NAMES.get(call.op, call.op)}", "is_p2p": False,
            "time_created_ns": 1_000 + index,
            "input_sizes": [[1 if barrier else call.numel_in]], "input_dtypes": ["Float"],
            "output_sizes": [[1 if barrier else call.numel_out]], "output_dtypes": ["Float"],
            "state": state, "retired": index < done,
        })  # fmt: skip
    config = {"0": {"name": "0", "desc": "mesh_dp_shard", "ranks": "[0, 1]"}}
    return {
        "version": "2.10", "comm_lib_version": "2.29.3", "pg_config": config,
        "entries": entries[first:], **more,
    }  # fmt: skip


def on_nccl(evidence: Evidence, waiting: Sequence[int] = ()) -> Evidence:
    """As our own recorder leaves it: calls return at once, their completion is unknown, and
    all of them are issued."""
    ranks = {
        rank: replace(
            seen,
            collectives=tuple(
                replace(c, completed=False, site=f"train.py:{20 + c.index} step")
                for c in seen.collectives
            ),
            groups={n: replace(g, backend="nccl") for n, g in seen.groups.items()},
        )
        for rank, seen in evidence.ranks.items()
    }
    stall = Stall(1.0, 3.0, tuple(waiting)) if waiting else None
    return replace(evidence, ranks=ranks, backend="nccl", stall=stall)


def in_clip(native: bool = True) -> Stack:
    """A main thread that waits in clip_grad_norm_."""
    frames = [
        Frame("/env/site-packages/torch/nn/utils/clip_grad.py", 80, "clip_grad_norm_"),
        Frame("/home/me/train.py", 31, "step"),
        Frame("/home/me/train.py", 44, "<module>"),
    ]  # fmt: skip
    if native:
        spinning = [Frame("libcuda.so.570.86", 0, f"0x7f2a1c3d4e{n:02x}", True) for n in range(9)]
        frames = [
            *spinning,
            Frame("libcudart.so.12", 0, "cudaStreamSynchronize", True),
            Frame("libtorch_cuda.so", 0, "at::native::_local_scalar_dense_cuda(at::Tensor)", True),
            *frames,
        ]
    return Stack("MainThread", "py-spy", tuple(frames))
