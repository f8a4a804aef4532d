"""What each module of the model was called with, what it returned and which gradient its input got,
in the first step: from it follows the first module that computes something wrong."""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from moediag.protocol.measured import modules_file
from moediag.protocol.names import plain_name
from moediag.ranks.verify.model_pieces import OUTER
from moediag.recorder.step.pieces import local

_MOST = 1 << 28  # bytes on a rank
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


@dataclass
class Call:
    """One call of a module."""

    name: str  # in the user's model; "": the model itself
    kind: str  # its class
    at: str  # the line that called it, train.py:96
    forward: int  # number of the model's forward, from 0
    number: int  # among the calls of this module in that forward
    given: Optional[torch.Tensor]  # the first floating tensor of its arguments
    output: Optional[torch.Tensor]

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.number


@dataclass
class Gradient:
    """The gradient of what a call was given, or of its output."""

    call: int  # its number in the list of calls
    of_output: bool
    value: Optional[torch.Tensor]


@dataclass
class Calls:
    """The calls of one rank in order of their end, the samples of each forward, and the gradients
    in order of the backward."""

    calls: List[Call]
    rows: List[List[str]]  # by forward, a hash of each sample
    samples: List[Optional[torch.Tensor]]  # by forward, one row a sample
    gradients: List[Gradient]

    @classmethod
    def read(
        cls, folder: Path, rank: int, named: Callable[[int, str], str] = lambda _, name: name
    ) -> Optional[Calls]:
        """Returns None without such a file. ``named(rank, name)``: what a module is called."""
        path = folder / modules_file(rank)
        if not path.is_file():
            return None
        content = torch.load(path, map_location="cpu", weights_only=True)
        gradients = [Gradient(*raw) for raw in content["gradients"]]
        calls = [Call(named(rank, f"{name}.")[:-1], *raw) for name, *raw in content["calls"]]
        return cls(calls, content["rows"], content["samples"], gradients)


class ModuleCalls:
    """Keeps the calls of this process until :meth:`write`."""

    def __init__(self) -> None:
        self._names: Dict[int, str] = {}  # id of a module -> name
        self._calls: List[Call] = []
        self._rows: List[List[str]] = []
        self._samples: List[Optional[torch.Tensor]] = []
        self._seen: Dict[tuple[int, str], int] = {}
        self._left = _MOST
        self._gradients: List[Gradient] = []
        self._last: Any = None  # a gradient, and what was kept of it: a tensor may have two names
        self._last_kept: Optional[torch.Tensor] = None
        self.open = True
        self.full_at = ""  # the module whose values did not fit any more

    def add(self, root: Any, prefix: str) -> None:
        """Follows the modules of ``root``."""
        outer = [name for name, module in root.named_modules() if type(module).__name__ in OUTER]
        for name, module in root.named_modules():
            full = plain_name(f"{name}.x" if name else "x", outer)[:-1].rstrip(".")
            self._names.setdefault(id(module), prefix + full)

    def begin(self, rows: List[str], samples: Any) -> None:
        """A forward of the model begins, on these samples."""
        self._rows.append(rows)
        self._samples.append(self._kept(samples, "") if self.open else None)

    def returned(self, module: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keeps one call that has ended."""
        name = self._names.get(id(module))
        if name is None or not self.open or not self._rows or type(module).__name__ in OUTER:
            return
        forward = len(self._rows) - 1
        given = _floating([*args, *kwargs.values()])
        output = _floating(result)
        if output is None:
            return
        number = self._seen.get((forward, name), 0)
        self._seen[forward, name] = number + 1
        call = Call(
            name, type(module).__name__, _caller(), forward, number,
            self._kept(given, name), self._kept(output, name),
        )  # fmt: skip
        self._calls.append(call)
        for of_output, watched in ((False, given), (True, output)):
            if watched is not None and watched.requires_grad and not self.full_at:
                watched.register_hook(
                    functools.partial(self._gradient, len(self._calls) - 1, of_output)
                )

    def _gradient(self, call: int, of_output: bool, gradient: Any) -> None:
        if not self.open:
            return
        with contextlib.suppress(Exception):  # the program's backward goes on
            if gradient is not self._last:
                self._last_kept = self._kept(gradient, self._calls[call].name)
                self._last = gradient
            self._gradients.append(Gradient(call, of_output, self._last_kept))

    def _kept(self, tensor: Any, name: str) -> Optional[torch.Tensor]:
        if tensor is None:
            return None
        own = local(tensor)
        size = own.numel() * own.element_size()
        if self.full_at or size > self._left:
            self.full_at = self.full_at or name or "the model"
            return None
        self._left -= size
        return own.cpu().clone()

    def write(self, folder: Path, rank: int) -> None:
        """Writes the calls of the first step; later ones are not kept."""
        self.open = False
        calls = [list(vars(call).values()) for call in self._calls]
        gradients = [list(vars(one).values()) for one in self._gradients]
        content = {
            "calls": calls, "rows": self._rows, "samples": self._samples, "gradients": gradients,
        }  # fmt: skip
        torch.save(content, folder / modules_file(rank))
        self._calls, self._gradients, self._samples = [], [], []
        self._last = self._last_kept = None


def _floating(value: Any) -> Any:
    """Returns the first floating tensor in ``value``."""
    if isinstance(value, torch.Tensor):
        return value if value.is_floating_point() and value.dim() else None
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        found: Sequence[Any] = [_floating(one) for one in value]
        return next((one for one in found if one is not None), None)
    return None


def _caller() -> str:
    """Returns the innermost line outside torch and moediag."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
