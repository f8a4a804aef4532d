"""Reads from the arguments of a c10d call what it sends and receives.

An operation has two call conventions: Python calls the methods of
``torch.distributed.ProcessGroup``; C++, including DDP's reducer and the functional collectives,
calls the operators ``torch.ops.c10d.*`` (schemas in torch/csrc/distributed/c10d/Ops.cpp).
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple


class Shape(NamedTuple):
    """How to read the arguments of one method or operator."""

    op: str  # the protocol's name for the operation
    layout: str  # same: arg 0 is input and output; out_in: arg 0 output, arg 1 input; none
    root: str = ""  # attribute of the options object that holds the root
    peer: int = -1  # index of the positional argument that holds the peer or root
    splits: int = -1  # index of output_split_sizes; input_split_sizes follows


METHODS: Dict[str, Shape] = {
    "allreduce": Shape("all_reduce", "same"),
    "allreduce_coalesced": Shape("all_reduce", "same"),
    "broadcast": Shape("broadcast", "same", root="rootRank", peer=1),
    "reduce": Shape("reduce", "same", root="rootRank", peer=1),
    "allgather": Shape("all_gather", "out_in"),
    "_allgather_base": Shape("all_gather", "out_in"),
    "all_gather_single": Shape("all_gather", "out_in"),
    "allgather_coalesced": Shape("all_gather", "out_in"),
    "allgather_into_tensor_coalesced": Shape("all_gather", "out_in"),
    "all_gather_single_coalesced": Shape("all_gather", "out_in"),
    "gather": Shape("gather", "out_in", root="rootRank", peer=2),
    "scatter": Shape("scatter", "out_in", root="rootRank", peer=2),
    "reduce_scatter": Shape("reduce_scatter", "out_in"),
    "_reduce_scatter_base": Shape("reduce_scatter", "out_in"),
    "reduce_scatter_single": Shape("reduce_scatter", "out_in"),
    "reduce_scatter_tensor_coalesced": Shape("reduce_scatter", "out_in"),
    "reduce_scatter_single_coalesced": Shape("reduce_scatter", "out_in"),
    "alltoall_base": Shape("all_to_all", "out_in", splits=2),
    "all_to_all_single": Shape("all_to_all", "out_in", splits=2),
    "alltoall": Shape("all_to_all", "out_in"),
    "send": Shape("send", "same", peer=1),
    "recv": Shape("recv", "same", peer=1),
    "recv_anysource": Shape("recv", "same"),
    "barrier": Shape("barrier", "none"),
    "monitored_barrier": Shape("barrier", "none"),
}

# Operators take the process group between tensors and options; the indices ``peer`` and ``splits``
# do not count it.
OPERATORS: Dict[str, Shape] = {
    "allreduce_": Shape("all_reduce", "same"),
    "allreduce_coalesced_": Shape("all_reduce", "same"),
    "broadcast_": Shape("broadcast", "same", peer=1),
    "reduce_": Shape("reduce", "same", peer=2),
    "allgather_": Shape("all_gather", "out_in"),
    "_allgather_base_": Shape("all_gather", "out_in"),
    "allgather_coalesced_": Shape("all_gather", "out_in"),
    "allgather_into_tensor_coalesced_": Shape("all_gather", "out_in"),
    "gather_": Shape("gather", "out_in", peer=2),
    "scatter_": Shape("scatter", "out_in", peer=2),
    "reduce_scatter_": Shape("reduce_scatter", "out_in"),
    "_reduce_scatter_base_": Shape("reduce_scatter", "out_in"),
    "reduce_scatter_tensor_coalesced_": Shape("reduce_scatter", "out_in"),
    "alltoall_base_": Shape("all_to_all", "out_in", splits=2),
    "alltoall_": Shape("all_to_all", "out_in"),
    "send": Shape("send", "same", peer=1),
    "recv_": Shape("recv", "same", peer=1),
    "recv_any_source_": Shape("recv", "same"),
    "barrier": Shape("barrier", "none"),
}

# pybind's names of the leading arguments, for callers that use keywords.
_OUTPUTS = ("output", "output_tensors", "output_lists", "outputs", "output_tensor")
_INPUTS = ("input", "input_tensors", "input_list", "inputs", "input_tensor")
_SAME = ("tensors", "tensor")


class Call(NamedTuple):
    """One call to an operation."""

    op: str
    numel_in: int
    numel_out: int
    dtype: str
    splits_in: Optional[List[int]]
    splits_out: Optional[List[int]]
    peer: Optional[int]  # rank within the group
    reduce: Optional[str]
    waits: Optional[bool]  # False for an asynchronous operation
    fake: bool  # no data: a torch.compile trace or a meta tensor
    device: bool  # runs on an accelerator, so waiting does not block the host
    tensors: Tuple[Any, ...]  # outputs, which identify the call when they are waited for


def describe(shape: Shape, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Reads one call. ``args`` excludes the process group."""
    outputs: List[Any] = []
    inputs: List[Any] = []
    if shape.layout == "same":
        _flatten(_argument(args, kwargs, 0, _SAME), inputs)
        outputs = inputs
    elif shape.layout == "out_in":
        _flatten(_argument(args, kwargs, 0, _OUTPUTS), outputs)
        _flatten(_argument(args, kwargs, 1, _INPUTS), inputs)
    options = _options(args, kwargs)
    first = outputs[0] if outputs else (inputs[0] if inputs else None)
    splits_in = splits_out = None
    if shape.op == "all_to_all":
        splits_out, splits_in = _splits(shape, args, kwargs, outputs, inputs)
    waits = getattr(options, "asyncOp", None)
    return Call(
        shape.op,
        sum([t.numel() for t in inputs]),
        sum([t.numel() for t in outputs]),
        _dtype_name(first.dtype) if first is not None else "",
        splits_in,
        splits_out,
        _peer(shape, args, kwargs, options),
        _reduction(options, args, kwargs),
        None if waits is None else not waits,
        first is not None and (first.device.type == "meta" or type(first).__name__ == "FakeTensor"),
        first is not None and first.device.type != "cpu",
        tuple(outputs),
    )


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], index: int, names: Tuple[str, ...]
) -> Any:
    if index < len(args):
        return args[index]
    for name in names:
        if name in kwargs:
            return kwargs[name]
    return ()


def _flatten(value: Any, into: List[Any]) -> None:
    """Appends all tensors of a tensor or nested list to ``into``."""
    if hasattr(value, "numel"):
        into.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _flatten(item, into)


def _options(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    found = kwargs.get("opts")
    if found is None and args and type(args[-1]).__name__.endswith("Options"):
        found = args[-1]
    return found


def _peer(
    shape: Shape, args: Sequence[Any], kwargs: Mapping[str, Any], options: Any
) -> Optional[int]:
    if shape.root and options is not None:
        return int(getattr(options, shape.root))
    for name in ("root", "dstRank", "srcRank", "dst", "src"):
        if name in kwargs:
            return int(kwargs[name])
    if 0 <= shape.peer < len(args) and isinstance(args[shape.peer], int):
        return int(args[shape.peer])
    return None


def _splits(
    shape: Shape,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: List[Any],
    inputs: List[Any],
) -> Tuple[Optional[List[int]], Optional[List[int]]]:
    """Output and input splits: rows if each side is one tensor (empty list: equal parts), elements
    if each part is a separate tensor."""
    if shape.splits < 0:
        return [t.numel() for t in outputs], [t.numel() for t in inputs]
    out = _argument(args, kwargs, shape.splits, ("output_split_sizes",))
    into = _argument(args, kwargs, shape.splits + 1, ("input_split_sizes",))
    return [int(n) for n in out], [int(n) for n in into]


_dtype_names: Dict[Any, str] = {}


def _dtype_name(dtype: Any) -> str:
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).replace("torch.", "")
    return name


def _reduction(options: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Optional[str]:
    op = getattr(options, "reduceOp", None)
    if op is None:
        op = kwargs.get("op")
    if op is None:
        op = next((a for a in args if type(a).__name__ in ("ReduceOp", "RedOpType")), None)
    if op is None:
        return None
    # str(ReduceOp) is an address; str of its ``op`` or of the enum RedOpType is the name.
    return str(getattr(op, "op", op)).rsplit(".", 1)[-1].lower()
