"""Both call conventions of c10d give the same sizes, dtype, splits, peers and reduction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moediag.protocol import OPS
from moediag.recorder.calls import METHODS, OPERATORS, describe

A, B = torch.zeros(3), torch.zeros(2, 3, dtype=torch.bfloat16)


def test_every_shape_uses_protocol_names() -> None:
    assert {shape.op for shape in (*METHODS.values(), *OPERATORS.values())} == set(OPS)


def test_every_collective_method_of_this_torch_is_known() -> None:
    words = ("reduce", "gather", "all_to", "alltoall", "broadcast", "scatter", "send", "recv")
    present = {n for n in dir(dist.ProcessGroup) if any(w in n for w in words) and n[:2] != "__"}
    assert present - set(METHODS) == set()


def test_every_c10d_operator_of_this_torch_is_known() -> None:
    names = {n[len("c10d::") :] for n in torch._C._dispatch_get_all_op_names() if n[:6] == "c10d::"}
    # check_for_nan moves nothing; monitored_barrier_ is only issued from Python.
    assert names - set(OPERATORS) == {"check_for_nan", "monitored_barrier_"}


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        ("allreduce", ([A, A],), {}, ("all_reduce", 6, 6, "float32")),
        ("allreduce", (), {"tensor": A}, ("all_reduce", 3, 3, "float32")),
        ("allgather", ([[A, A]], [A]), {}, ("all_gather", 3, 6, "float32")),
        ("_allgather_base", (B, A), {}, ("all_gather", 3, 6, "bfloat16")),
        ("_allgather_base", (), {"output": B, "input": A}, ("all_gather", 3, 6, "bfloat16")),
        ("reduce_scatter", ([A], [[A, A]]), {}, ("reduce_scatter", 6, 3, "float32")),
        ("scatter", ([A], []), {}, ("scatter", 0, 3, "float32")),
        ("barrier", (), {}, ("barrier", 0, 0, "")),
    ],
)
def test_sizes_and_dtype_are_recorded(
    name: str, args: tuple, kwargs: dict, expected: tuple
) -> None:  # type: ignore[type-arg]
    call = describe(METHODS[name], args, kwargs)
    assert (call.op, call.numel_in, call.numel_out, call.dtype) == expected


def test_splits_of_both_all_to_alls_are_recorded() -> None:
    call = describe(METHODS["alltoall_base"], (A, A, [1, 2], [3, 0]), {})
    assert (call.splits_out, call.splits_in) == ([1, 2], [3, 0])
    call = describe(METHODS["alltoall"], ([A, B], [B]), {})
    assert (call.splits_out, call.splits_in) == ([3, 6], [6])
    call = describe(OPERATORS["alltoall_base_"], (A, A, [], []), {})
    assert (call.splits_out, call.splits_in) == ([], [])


def test_peers_and_reductions_are_recorded() -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    assert describe(METHODS["allreduce"], ([A], options), {}).reduce == "max"
    assert describe(METHODS["allreduce"], ([A],), {"op": dist.ReduceOp.AVG}).reduce == "avg"
    assert describe(METHODS["allreduce"], ([A],), {}).reduce is None
    root = dist.BroadcastOptions()
    root.rootRank = 3
    assert describe(METHODS["broadcast"], ([A], root), {}).peer == 3
    assert describe(METHODS["send"], ([A], 1, 0), {}).peer == 1
    assert describe(METHODS["recv"], ([A],), {"srcRank": 2}).peer == 2
    assert describe(METHODS["recv_anysource"], ([A], 0), {}).peer is None
    assert describe(OPERATORS["reduce_"], ([A], None, 1, 0), {}).peer == 1


def test_calls_on_meta_tensors_are_fake() -> None:
    assert describe(METHODS["allreduce"], ([torch.zeros(2, device="meta")],), {}).fake
    assert not describe(METHODS["allreduce"], ([A],), {}).fake


def test_new_groups_are_recorded_with_their_members(tmp_path: Path) -> None:
    from moediag.recorder import install

    recorder = install(str(tmp_path), 0, 1)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group([0])
        dist.new_group([0], use_local_synchronization=True)
    finally:
        recorder.uninstall()
        dist.destroy_process_group()
    log = (tmp_path / "rank-0.events.jsonl").read_text().splitlines()
    calls = [event for line in log if (event := json.loads(line))["e"] == "collective"]
    assert [(c["op"], c["members"]) for c in calls] == [("new_group", [0])] * 2
    assert sum('"e":"done"' in line for line in log) == 2


def test_tags_are_recorded() -> None:
    assert describe(METHODS["send"], ([A], 1, 7), {}).tag == 7
    assert describe(METHODS["recv"], ([A], 1), {"tag": 3}).tag == 3
    assert describe(OPERATORS["recv_"], ([A], 1, 5), {}).tag == 5
    assert describe(METHODS["recv_anysource"], ([A], 4), {}).tag == 0
