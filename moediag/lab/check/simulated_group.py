"""A process group of any size in which only this process exists.

torch's ``fake`` backend moves no data; :class:`moediag.lab.simulation.Answers` fills what other
ranks would send.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, List, Sequence

import torch.distributed as dist

from moediag.recorder import lifeline

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
    (found,) = in_children([work], folder)
    if isinstance(found, Raised):
        raise ChildRaised(found)
    return found


def in_children(works: Sequence[Callable[[], Any]], folder: Path) -> List[Any]:
    """Returns what each returns in a forked process of its own, all at the same time; Raised for an
    exception, or a process that ended without an answer."""
    children = []
    for number, work in enumerate(works):
        answer = folder / f".answer-{os.getpid()}-{number}"
        children.append((_forked(work, answer), answer))
    return [_answered(child, answer) for child, answer in children]


def _forked(work: Callable[[], Any], answer: Path) -> int:
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
    return child


def _answered(child: int, answer: Path) -> Any:
    _, status = os.waitpid(child, 0)
    try:
        found = pickle.loads(answer.read_bytes())  # noqa: S301 - this program wrote it
        answer.unlink()
    except (OSError, EOFError, pickle.UnpicklingError):
        ended = f"ended by signal {status & 127}" if status & 127 else "left no answer"
        return Raised("", f"the process {ended}", "")
    return found


def raised(error: BaseException) -> Raised:
    from moediag.recorder.not_applicable import NotApplicable

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
