"""A process group of any size in which only this process exists.

torch's ``fake`` backend moves no data. A rank that reads what another rank sends gets what it would
send itself (:class:`Answers`): sizes are then those of a job whose ranks have equal batches.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Tuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moediag.recorder import lifeline

_COMMUNICATION = ("c10d", "_c10d_functional")
_LIBRARIES = ("transformers", "torch", "accelerate")
_TEXT = 400  # characters of an exception's message


@dataclass(frozen=True)
class Raised:
    """An exception in a child process."""

    kind: str
    text: str
    where: str  # file and line of the library that raised it
    refused: bool = False  # NotApplicable: the text says why

    @property
    def words(self) -> str:
        return f"{self.kind}: {self.text}" if self.kind else self.text


class ChildRaised(Exception):
    """``args[0]`` is :class:`Raised`."""


@contextlib.contextmanager
def joined(rank: int, world_size: int) -> Iterator[None]:
    """Joins the simulated process group as ``rank``. Once per process: meshes and groups outlive
    it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_child(work: Callable[[], Any], folder: Path) -> Any:
    """Returns what ``work`` returns in a forked process. Raises ChildRaised for its exception, or
    if the process ended without an answer."""
    answer = folder / f".answer-{os.getpid()}"
    child = os.fork()
    if child == 0:
        try:
            lifeline.die_with_parent()
            try:
                result = work()
            except BaseException as error:
                result = raised(error)
            answer.write_bytes(pickle.dumps(result))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    try:
        found = pickle.loads(answer.read_bytes())  # noqa: S301 - this program wrote it
        answer.unlink()
    except (OSError, EOFError, pickle.UnpicklingError):
        ended = f"ended by signal {status & 127}" if status & 127 else "left no answer"
        raise ChildRaised(Raised("", f"the process {ended}", "")) from None
    if isinstance(found, Raised):
        raise ChildRaised(found)
    return found


def raised(error: BaseException) -> Raised:
    from moediag.worker.not_applicable import NotApplicable

    text = " ".join(str(error).split())
    short = text if len(text) <= _TEXT else f"{text[:_TEXT]} …"
    if isinstance(error, NotApplicable):
        return Raised("", short, "", refused=True)
    frames = traceback.extract_tb(error.__traceback__)
    libraries = [f for f in frames if place(f.filename, f.lineno or 0)]
    chosen = [f for f in libraries if "/transformers/" in f.filename] or libraries
    where = place(chosen[-1].filename, chosen[-1].lineno or 0) if chosen else ""
    return Raised(type(error).__name__, short, where)


def place(path: str, line: int) -> str:
    """Returns ``transformers/distributed/mixin.py:233``; "" for a file of no library."""
    for name in _LIBRARIES:
        root = Path(str(getattr(sys.modules.get(name), "__file__", None) or "/")).parent
        if name in sys.modules and root in Path(path).parents:
            return f"{name}/{Path(path).relative_to(root).as_posix()}:{line}"
    return ""


class Answers(TorchDispatchMode):
    """Answers collectives as if every other rank sent what this rank sends."""

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
        if func.namespace in _COMMUNICATION:
            name = func._schema.name.rpartition("::")[2]
            if "all_gather" in name or "allgather" in name:
                _each(result, args, name, _gathered)
            elif "reduce_scatter" in name:
                _each(result, args, name, _scattered)
            elif "alltoall" in name or "all_to_all" in name:
                _each(result, args, name, lambda o, i: _exchanged(o, i, _group(args)))
        return result


def _each(
    result: Any, args: Tuple[Any, ...], name: str, fill: Callable[[torch.Tensor, Any], None]
) -> None:
    """Calls ``fill`` with each output and its input. Operators that end in ``_`` write into their
    first argument; functional ones return the output."""
    outputs, inputs = (args[0], args[1]) if name.endswith("_") else (result, args[0])
    for output, given in zip(_tensors(outputs), _tensors(inputs)):  # noqa: B905 - Python 3.9
        fill(output, given)


def _tensors(value: Any) -> Any:
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


def _group(args: Tuple[Any, ...]) -> Any:
    """Returns the process group of a call, which is an object or the name of one."""
    for argument in reversed(args):
        if isinstance(argument, str):
            return dist.distributed_c10d._resolve_process_group(argument)
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    return dist.group.WORLD
