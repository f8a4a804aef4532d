"""Answers the collectives of a simulated rank, whose process group moves no data. What roots
broadcast is written beside their logs, as long as it is real itself and small, for ranks that are
simulated later."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Callable, List, Tuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moediag.protocol import ROOT_FILES
from moediag.recorder.core import Recorder

COMMUNICATION = ("c10d", "_c10d_functional")
_LARGEST = 64 << 20  # bytes of one broadcast
_MOST = 512 << 20  # bytes of all


class Answers(TorchDispatchMode):
    """Answers collectives as if every other rank sent what this rank sends: sizes are then those of
    a job whose ranks have equal batches."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if "inputBuffer is empty" not in str(error):
                raise
            # The fake backend of torch 2.13 cannot answer a rank that sends nothing; the call
            # itself is legitimate, and recorded.
            result = args[0].new_zeros((sum(args[1]), *args[0].shape[1:]))
        if func.namespace in COMMUNICATION:
            name = func._schema.name.rpartition("::")[2]
            if "all_gather" in name or "allgather" in name:
                _each(result, args, name, _gathered)
            elif "reduce_scatter" in name:
                _each(result, args, name, _scattered)
            elif "alltoall" in name or "all_to_all" in name:
                _each(result, args, name, lambda o, i: _exchanged(o, i, group_of(func, args)))
            result = _completed(result, args[0])
        return result


def _completed(result: Any, tensors: Any) -> Any:
    """Returns the result of a call with a Work whose future holds the tensors, as DDP needs it:
    that of the fake backend holds nothing."""
    make = getattr(torch._C._distributed_c10d, "_create_work_from_future", None)
    if (
        make is None
        or not isinstance(result, tuple)
        or not isinstance(result[-1], torch.ScriptObject)
    ):
        return result
    held = list(tensors)
    return (*result[:-1], make(torch._C.fork(lambda: held)).boxed())


def _each(
    result: Any, args: Tuple[Any, ...], name: str, fill: Callable[[torch.Tensor, Any], None]
) -> None:
    """Calls ``fill`` with each output and its input. Operators that end in ``_`` write into their
    first argument; functional ones return the output."""
    outputs, inputs = (args[0], args[1]) if name.endswith("_") else (result, args[0])
    for output, given in zip(as_list(outputs), as_list(inputs)):  # noqa: B905 - Python 3.9
        fill(output, given)


def as_list(value: Any) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _gathered(output: Any, given: torch.Tensor) -> None:
    if isinstance(output, (list, tuple)):
        for part in output:
            _gathered(part, given)
    elif given.numel():
        output.copy_(given.reshape(-1).repeat(-(-output.numel() // given.numel()))[
            : output.numel()
        ].reshape(output.shape))  # fmt: skip
    else:
        output.zero_()


def _scattered(output: torch.Tensor, given: Any) -> None:
    first = given[0] if isinstance(given, (list, tuple)) else given
    output.copy_(first.reshape(-1)[: output.numel()].reshape(output.shape))


def _exchanged(output: torch.Tensor, given: torch.Tensor, group: Any) -> None:
    """Counts of tokens (integers) are exact: the part for this rank, from each rank. Other values
    do not decide what is called, and their parts may have another size."""
    if output.is_floating_point() or output.shape != given.shape or not output.numel():
        output.zero_()
        return
    parts = given.reshape(group.size(), -1)
    output.copy_(parts[group.rank()].expand_as(parts).reshape(output.shape))


def group_of(func: Any, args: Tuple[Any, ...]) -> Any:
    """Returns the process group of a call, which is an object or the name of one."""
    for described, given in zip(func._schema.arguments, args):  # noqa: B905 - Python 3.9
        if isinstance(given, str) and described.name == "group_name":
            return dist.distributed_c10d._resolve_process_group(given)
        if str(described.type).endswith("ProcessGroup") and isinstance(given, torch.ScriptObject):
            return dist.ProcessGroup.unbox(given)
    return dist.group.WORLD


class RootPayloads:
    """The broadcasts of one rank. ``real``: whether tensors and this rank's branches are real."""

    def __init__(
        self, folder: Path, recorder: Recorder, real: Callable[[List[torch.Tensor]], bool]
    ) -> None:
        self._folder = folder
        self._recorder = recorder
        self._real = real
        self._room = _MOST

    def known(self, func: Any, args: Any, tensors: List[torch.Tensor]) -> bool:
        """Whether ``tensors`` hold what the root of this call sends. Call it after the call."""
        name = func._schema.name.rpartition("::")[2]
        if name not in ("broadcast", "broadcast_"):
            return False
        group = group_of(func, args)
        root = args[2] if func.namespace == "c10d" else args[1]
        path = self._path(group)
        if group.rank() == root:
            size = sum(t.numel() * t.element_size() for t in tensors)
            if self._real(tensors) and size <= min(_LARGEST, self._room):
                self._room -= size
                torch.save([t.detach().cpu().clone() for t in tensors], path)
            # The own data of a root are as real as they were.
            return True
        return path.exists() and _filled(tensors, torch.load(path, weights_only=True))

    def _path(self, group: Any) -> Path:
        """The recorder has counted this call already, so all ranks of the group agree on it."""
        info = self._recorder.groups.info(group)
        call = f"{info.name} {info.ranks} {info.issued}"
        return self._folder / ROOT_FILES.replace(
            "*", hashlib.sha256(call.encode()).hexdigest()[:24]
        )


def _filled(tensors: List[torch.Tensor], sent: List[torch.Tensor]) -> bool:
    def kinds(those: List[torch.Tensor]) -> List[Any]:
        return [(t.numel(), t.dtype) for t in those]

    if kinds(tensors) != kinds(sent):
        return False  # the calls do not match
    for tensor, value in zip(tensors, sent):  # noqa: B905 - Python 3.9
        tensor.copy_(value.reshape(tensor.shape))
    return True
