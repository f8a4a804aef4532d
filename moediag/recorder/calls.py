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
    tag: int = 0  # of a send or receive
    members: Optional[List[int]] = None  # global ranks of the group that new_group makes
    inputs: Tuple[Any, ...] = ()  # of an all_gather


def describe(
    shape: Shape, args: Sequence[Any], kwargs: Mapping[str, Any], waits: Optional[bool] = None
) -> Call:
    """Reads one call. ``args`` excludes the process group. ``waits``: whether the caller waits, if
    the options do not say. This runs for every call of the job: it must not do needless work."""
    op, layout = shape.op, shape.layout
    outputs: List[Any] = []
    inputs: List[Any] = []
    if layout == "same":
        outputs = inputs = _tensors(args[0] if args else _argument(args, kwargs, 0, _SAME))
    elif layout == "out_in":
        outputs = _tensors(args[0] if args else _argument(args, kwargs, 0, _OUTPUTS))
        inputs = _tensors(args[1] if len(args) > 1 else _argument(args, kwargs, 1, _INPUTS))
    options = _options(args, kwargs)
    splits_in = splits_out = None
    if op == "all_to_all":
        splits_out, splits_in = _splits(shape, args, kwargs, outputs, inputs)
    if options is not None:
        is_async = getattr(options, "asyncOp", None)
        waits = waits if is_async is None else not is_async
    numel_in = inputs[0].numel() if len(inputs) == 1 else sum([t.numel() for t in inputs])
    numel_out = numel_in
    if outputs is not inputs:
        numel_out = outputs[0].numel() if len(outputs) == 1 else sum([t.numel() for t in outputs])
    dtype, fake, device = "", False, False
    if outputs or inputs:
        first = (outputs or inputs)[0]
        dtype = _dtype_name(first.dtype)
        kind = first.device.type
        fake = kind == "meta" or type(first).__name__ == "FakeTensor"
        device = kind != "cpu"
    return Call(
        op,
        numel_in,
        numel_out,
        dtype,
        splits_in,
        splits_out,
        _peer(shape, args, kwargs, options) if shape.peer >= 0 or shape.root or kwargs else None,
        _reduction(options, args, kwargs) if op in REDUCES else None,
        waits,
        fake,
        device,
        tuple(outputs),
        _tag(args, kwargs) if op in ("send", "recv") else 0,
        inputs=tuple(inputs) if op == "all_gather" else (),
    )


def making(members: List[int]) -> Call:
    """Returns the call that makes a process group of these global ranks."""
    return Call("new_group", 0, 0, "", None, None, None, None, True, False, False, (), 0, members)


def _tag(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The tag of a send or receive; 0 of one from any source, which meets no certain send."""
    tag = kwargs.get("tag", args[2] if len(args) > 2 else 0)
    return tag if isinstance(tag, int) else 0


def _argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], index: int, names: Tuple[str, ...]
) -> Any:
    if index < len(args):
        return args[index]
    for name in names:
        if name in kwargs:
            return kwargs[name]
    return ()


def _tensors(value: Any) -> List[Any]:
    """All tensors of a tensor, a list, or a list of lists."""
    if not isinstance(value, (list, tuple)):
        return [value]
    if len(value) == 1 and not isinstance(value[0], (list, tuple)):
        return list(value)
    found: List[Any] = []
    for item in value:
        if isinstance(item, (list, tuple)):
            found += item
        else:
            found.append(item)
    return found


def _options(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    found = kwargs.get("opts") if kwargs else None
    if found is None and args:
        kind = type(args[-1])
        known = _option_types.get(kind)
        if known is None:
            known = _option_types[kind] = kind.__name__.endswith("Options")
        return args[-1] if known else None
    return found


def _peer(
    shape: Shape, args: Sequence[Any], kwargs: Mapping[str, Any], options: Any
) -> Optional[int]:
    if shape.root and options is not None:
        return int(getattr(options, shape.root))
    for name in ("root", "dstRank", "srcRank", "dst", "src") if kwargs else ():
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
_reduce_names: Dict[Any, str] = {}
_option_types: Dict[type, bool] = {}
REDUCES = ("all_reduce", "reduce_scatter", "reduce")


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
    op = getattr(op, "op", op)
    try:
        return _reduce_names[op]
    except (KeyError, TypeError):
        # str(ReduceOp) is an address; str of its ``op`` or of the enum RedOpType is the name.
        name = str(op).rsplit(".", 1)[-1].lower()
        if type(op).__name__ == "RedOpType":
            _reduce_names[op] = name
        return name
