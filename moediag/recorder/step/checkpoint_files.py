"""Records what a program writes to checkpoints, reads from them, and puts into its objects.

Only fingerprints are kept: of every tensor in what is saved or loaded, and the plain values beside
them. Calls inside others (a checkpoint of many files) count once."""

from __future__ import annotations

import functools
import random
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

from moediag import protocol
from moediag.protocol.recorded_state import DRAWN, Transfer
from moediag.recorder.late_imports import when_imported
from moediag.recorder.library_folders import library_folders
from moediag.recorder.patches import Patches
from moediag.recorder.step.numbers import Fingerprints, digest
from moediag.recorder.step.pieces import held

SAVE, LOAD, PUT = "saves", "loads", "puts"
_DEEPEST = 12  # nested containers that are looked into
_MOST_SCALARS = 400  # names of plain values of one call
_PLAIN = (bool, int, float, str)
_MOST_DRAWN = 4
_PYTHON_STATE = 625  # numbers in the state of Python's generator


class CheckpointFiles:
    """Wraps what saves and loads. ``tell(which, transfer)`` gets each call, ``step()`` returns the
    number of optimizer steps made so far."""

    def __init__(self, step: Callable[[], int], tell: Callable[[str, Transfer], None]) -> None:
        self._step, self._tell = step, tell
        self._patches = Patches()
        self._cancel: List[Callable[[], None]] = []
        self._inside = threading.local()
        self._folders: List[str] = []
        self._loaded: Dict[int, Any] = {}  # id -> weak reference of a tensor that was loaded
        self._open: Set[int] = set()  # saves that have not returned
        self._number = 0

    @property
    def busy(self) -> bool:
        """Whether a save in another thread is not complete."""
        return bool(self._open)

    def was_loaded(self, tensor: Any) -> bool:
        """Whether this tensor itself came out of a file."""
        known = self._loaded.get(id(tensor))
        return known is not None and known() is tensor

    def install(self) -> None:
        for owner in (torch, torch.serialization):
            self._file(owner, "save", SAVE, "torch.save")
            self._file(owner, "load", LOAD, "torch.load")
        self._objects(torch.nn.Module, "model")
        self._objects(torch_optimizer.Optimizer, "optimizer")
        self._objects(lr_scheduler.LRScheduler, "scheduler")
        self._generators()
        for module, act in (
            ("torch.amp.grad_scaler", self._scaler),
            ("safetensors.torch", self._safetensors),
            ("torch.distributed.checkpoint.state_dict_saver", self._dcp_save),
            ("torch.distributed.checkpoint.state_dict_loader", self._dcp_load),
        ):
            self._cancel.append(when_imported(module, act))

    def remove(self) -> None:
        for cancel in self._cancel:
            cancel()
        self._patches.restore()

    # ------------------------------------------------------------------------ what is wrapped

    def _scaler(self) -> None:
        self._objects(sys.modules["torch.amp.grad_scaler"].GradScaler, "scaler")

    def _safetensors(self) -> None:
        module = sys.modules["safetensors.torch"]
        for name in ("save_file", "save"):
            self._file(module, name, SAVE, f"safetensors.{name}")
        for name in ("load_file", "load"):
            self._file(module, name, LOAD, f"safetensors.{name}")

    def _dcp_save(self) -> None:
        module = sys.modules["torch.distributed.checkpoint.state_dict_saver"]
        for name in ("save", "async_save"):
            self._file(module, name, SAVE, f"dcp.{name}")

    def _dcp_load(self) -> None:
        module = sys.modules["torch.distributed.checkpoint.state_dict_loader"]
        # Within `load`: a Stateful object puts its state back afterwards, and its state_dict()
        # would be called once more.
        self._file(module, "_load_state_dict", LOAD, "dcp.load", fills=True)

    def _file(self, owner: Any, name: str, which: str, what: str, fills: bool = False) -> None:
        """Records calls of a function of files. ``fills``: it loads into its argument."""

        def act(original: Any, args: Any, kwargs: Any) -> Any:
            frame = sys._getframe(2)
            if which == SAVE:
                content = args[0] if args else next(iter(kwargs.values()), None)
                self._guarded(which, what, frame, content, _path((*args[1:], *kwargs.values())))
            result = self._followed(which, original, args, kwargs)
            if which == LOAD:
                content = args[0] if fills and args else kwargs.get("state_dict", result)
                rest = (*(args[1:] if fills else args), *kwargs.values())
                self._guarded(which, what, frame, content, _path(rest))
            return result

        self._wrap(owner, name, act)

    def _objects(self, kind: Any, what: str) -> None:
        """Records calls of ``load_state_dict`` of a class and of those that override it."""

        def act(original: Any, args: Any, kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._guarded(PUT, what, sys._getframe(2), _content_of(args[0]), "")
            return result

        waiting = [kind]
        while waiting:
            one = waiting.pop()
            waiting += one.__subclasses__()
            if "load_state_dict" in vars(one):
                self._wrap(one, "load_state_dict", act)

    def _generators(self) -> None:
        def act(original: Any, args: Any, kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            given = (*args, *kwargs.values())
            self._guarded(PUT, "generator", sys._getframe(2), given, "")
            if given and isinstance(given[0], torch.Tensor):
                self._guarded(PUT, DRAWN, sys._getframe(2), _drawn(given[0]), "")
            return result

        for owner, name in (
            (torch, "set_rng_state"), (torch.random, "set_rng_state"), (random, "setstate"),
        ):  # fmt: skip
            self._wrap(owner, name, act)

    def _wrap(self, owner: Any, name: str, act: Callable[[Any, Any, Any], Any]) -> None:
        def make(original: Any) -> Any:
            @functools.wraps(original)
            def function(*args: Any, **kwargs: Any) -> Any:
                if getattr(self._inside, "call", False):
                    return original(*args, **kwargs)
                self._inside.call = True
                try:
                    return act(original, args, kwargs)
                finally:
                    self._inside.call = False

            return function

        self._patches.replace(owner, name, make)

    def _followed(self, which: str, original: Any, args: Any, kwargs: Any) -> Any:
        """Calls ``original``; a save that returns a future is complete when that is."""
        if which != SAVE:
            return original(*args, **kwargs)
        self._number += 1
        number = self._number
        self._open.add(number)
        result = None
        try:
            result = original(*args, **kwargs)
        finally:
            wait = getattr(result, "add_done_callback", None)
            if wait is None:
                self._open.discard(number)
            else:
                wait(lambda _: self._open.discard(number))
        return result

    # ------------------------------------------------------------------------ what is recorded

    def _guarded(self, which: str, what: str, frame: Any, content: Any, path: str) -> None:
        try:
            self._record(which, what, frame, content, path)
        except Exception as error:
            self._tell(which, Transfer(self._step(), f"{what}: {error!r}", path=path))

    def _record(self, which: str, what: str, frame: Any, content: Any, path: str) -> None:
        walked = _Walked(self._loaded if which == LOAD else None)
        walked.add(content, "", _DEEPEST)
        values = dict.fromkeys([v for v in walked.prints.read() if v is not None] + walked.texts)
        self._tell(
            which,
            Transfer(
                self._step(), what, self._line(frame), path, list(values),
                {key: list(found) for key, found in walked.scalars.items()}, walked.elements,
            ),
        )  # fmt: skip

    def _line(self, frame: Any) -> str:
        """``train.py:12 save``, the innermost line of the user's own code, or ""."""
        self._folders = self._folders or library_folders()
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        at = protocol.innermost_user([f.f_code.co_filename for f in frames], self._folders)
        if at is None:
            return ""
        code = frames[at].f_code
        return f"{Path(code.co_filename).name}:{frames[at].f_lineno} {code.co_name}"


def _drawn(state: Any) -> List[Any]:
    """The states of torch's generator after a few numbers were drawn, as iter(DataLoader) does."""
    generator = torch.Generator()
    generator.set_state(state.cpu())
    found = []
    for _ in range(_MOST_DRAWN):
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        found.append(generator.get_state())
    return found


class _Walked:
    """Tensors and plain values of nested containers."""

    def __init__(self, known: Optional[Dict[int, Any]]) -> None:
        self.prints = Fingerprints()
        self.texts: List[str] = []  # values of Python's generator
        self.scalars: Dict[str, Dict[str, None]] = {}
        self.elements = 0
        self._known = known

    def add(self, value: Any, key: str, deep: int) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(value, key)
        elif isinstance(value, _PLAIN) or value is None:
            self._scalar(key, value)
        elif type(value).__module__ == "numpy" and hasattr(value, "dtype"):
            if getattr(value, "ndim", 0) and value.dtype.kind in "iufb":
                self._array(value)
        elif deep and isinstance(value, dict):
            for name, one in value.items():
                self.add(one, str(name), deep - 1)
        elif isinstance(value, (list, tuple)):
            self._sequence(value, key, deep)
        elif deep and callable(getattr(value, "state_dict", None)):
            self.add(_content_of(value), key, deep - 1)

    def _tensor(self, value: Any, key: str) -> None:
        part = held(value)
        self.prints.add(part)
        if part.is_floating_point():
            self.elements += part.numel()
        if part.numel() == 1 and not part.is_meta:
            self._scalar(key, float(part.detach()))
        if self._known is not None:
            self._known[id(value)] = weakref.ref(value)

    def _array(self, value: Any) -> None:
        copy = value.copy()
        if copy.dtype.kind == "u" and copy.dtype.itemsize > 1:
            copy = copy.view(copy.dtype.str.replace("u", "i"))
        self.prints.add(torch.from_numpy(copy))

    def _sequence(self, value: Any, key: str, deep: int) -> None:
        if len(value) == 3 and isinstance(value[1], tuple) and len(value[1]) == _PYTHON_STATE:
            self.texts.append(generator_value(value))
        elif all(isinstance(one, _PLAIN) for one in value):
            self._scalar(key, list(value))
        elif deep:
            for one in value:
                self.add(one, key, deep - 1)

    def _scalar(self, key: str, value: Any) -> None:
        if key in self.scalars or len(self.scalars) < _MOST_SCALARS:
            self.scalars.setdefault(key, {}).setdefault(plain_text(value))


def plain_text(value: Any) -> str:
    """Returns a plain value as text, in which a whole number has no fraction."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(plain_text, value))}]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)[:80]


def generator_value(state: Any) -> str:
    """Returns a hash of a state of Python's generator."""
    return digest(state, size=8)


def _content_of(value: Any) -> Any:
    """The state of an object, without hooks of the user's where that is possible."""
    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers()]
    plain = torch_optimizer.Optimizer
    # A container of optimizers (torchtitan's) is one, without a state of its own.
    if isinstance(value, plain) and (value.state or type(value).state_dict is plain.state_dict):
        groups = [{k: v for k, v in g.items() if k != "params"} for g in value.param_groups]
        own = [p for group in value.param_groups for p in group["params"]]
        return [list(value.state.values()), groups, own]
    return value.state_dict()


def _path(values: Tuple[Any, ...]) -> str:
    """The first path among the arguments."""
    for value in values:
        if isinstance(value, (str, Path)):
            return str(value)
        name = getattr(value, "name", None) or getattr(value, "path", None)
        if isinstance(name, (str, Path)):
            return str(name)
    return ""
