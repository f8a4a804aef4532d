"""The samples that ranks drew, given to one process whose program would draw others: another
sampler for one process, a shuffle, a seed for each rank."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
from torch.utils.data import dataloader

from moediag.protocol import read_measured
from moediag.protocol.measured import JOINED, drawn_tensors
from moediag.ranks.verify.model_pieces import shells
from moediag.ranks.verify.samples import tensors
from moediag.ranks.verify.whole_batch import plain, together
from moediag.recorder.core import ByObject
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import instrument, numbers
from moediag.recorder.step.hooks import StepHooks

_MOST = 1 << 28  # bytes of samples that a rank keeps
_OURS = str(Path(__file__).parents[2]), str(Path(dataloader.__file__).parent)
BATCHES, INPUTS = "batches", "inputs"
NOT_SEEN = (
    "how ranks choose and prepare their samples: the reference would have drawn others, so it was "
    "given those of the ranks"
)

Draws = Dict[str, List[Any]]  # of a loader, or a class of models: what it gave, or was called with


class _Loaders:
    """Calls ``act(loader, batch)`` with each batch of a data loader, and returns what it returns.
    ``loader``: the line that asks for its batches, and which loader of this line it is."""

    def __init__(self, act: Callable[[str, Any], Any]) -> None:
        self._act = act
        self._names = ByObject()  # iterator -> name of its loader
        self._of: Dict[str, List[Any]] = {}  # line -> its loaders

    def install(self, hooks: StepHooks) -> None:
        hooks.replace(dataloader._BaseDataLoaderIter, "__next__", self._wrapped)

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def __next__(iterator: Any) -> Any:
            batch = original(iterator)
            if self._names.get(iterator) is None:
                self._names.set(iterator, self._name(iterator, sys._getframe(1)))
            return self._act(self._names.get(iterator), batch)

        return __next__

    def _name(self, iterator: Any, frame: Any) -> str:
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
            frame = frame.f_back
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        own, dataset = self._of.setdefault(line, []), iterator._dataset
        if all(dataset is not one for one in own):
            own.append(dataset)
        return f"{line} {next(at for at, one in enumerate(own) if one is dataset)}"


class Drawn:
    """Keeps what the data loaders of a rank give, and what its models are called with."""

    def __init__(self) -> None:
        self._kept: Dict[str, Draws] = {BATCHES: {}, INPUTS: {}}
        self._size = 0
        self._losses = True  # each model returned its loss: it was called with all samples
        self._whole = True  # everything could be kept

    def install(self, hooks: StepHooks) -> None:
        _Loaders(self._given).install(hooks)

    def _given(self, loader: str, batch: Any) -> Any:
        self._keep(BATCHES, loader, batch)
        return batch

    def called(self, module: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keeps the arguments of an outermost call that trains."""
        self._keep(INPUTS, _kind(module), [args, kwargs])
        self._losses = self._losses and _has_loss(result)

    def _keep(self, what: str, key: str, value: Any) -> None:
        if self._whole:
            try:
                own = plain(value)
            except Exception:  # values that no file can hold, or no memory: the job goes on
                self._whole = False
                return
            self._size += sum(t.numel() * t.element_size() for t in tensors(own))
            self._whole = self._size <= _MOST
            self._kept[what].setdefault(key, []).append(own)

    def write(self, folder: Path, rank: int) -> Dict[str, str]:
        """Writes what was kept until now; returns what the answer says of it: ``drawn``, which is
        :data:`BATCHES`, :data:`INPUTS` or "", and ``form``."""
        called = sum(map(len, self._kept[INPUTS].values()))
        batches = max(map(len, self._kept[BATCHES].values()), default=0)
        what = BATCHES if batches * len(self._kept[INPUTS]) >= called else ""
        what = what or (INPUTS if self._losses else "")
        if not what or not self._whole:
            return {"drawn": "", "form": ""}
        torch.save(self._kept[what], folder / drawn_tensors(rank))
        sizes = {
            key: [[str((t.dtype, t.shape[1:])) for t in tensors(one)] for one in draws]
            for key, draws in self._kept[what].items()
        }
        return {"drawn": what, "form": numbers.digest(sizes)}


class Replayed:
    """Gives this process the samples of the ranks whose measurements are in ``folder``: the first
    of each rank, the second of each, and so on, one after the other or :data:`JOINED`."""

    def __init__(self, folder: str, how: str, problem: Callable[[str], None]) -> None:
        answers = read_measured(folder)
        self._joined = how == JOINED
        self.what = next(iter(answers.values())).drawn
        self._ranks: List[Draws] = [
            torch.load(Path(folder) / drawn_tensors(rank), map_location="cpu", weights_only=True)
            for rank in sorted(answers)
        ]
        self._problem = problem
        self._taken: Dict[str, int] = {}  # by key
        self._inside = False

    def install(self, hooks: StepHooks) -> None:
        """Call it after whatever looks at the arguments of models was installed."""
        if self.what == BATCHES:
            _Loaders(self._next).install(hooks)
        else:
            hooks.replace(torch.nn.Module, "__call__", self._called)

    def _next(self, key: str, own: Any) -> Any:
        taken = self._taken[key] = self._taken.get(key, -1) + 1
        number, rank = (taken, 0) if self._joined else divmod(taken, len(self._ranks))
        of_ranks = [draws[key][number : number + 1] for draws in self._ranks if key in draws]
        if len(of_ranks) < len(self._ranks) or not all(of_ranks):
            return own  # after the last step that is compared, or of an evaluation
        given = [one for of_rank in of_ranks for one in of_rank]

        def fill() -> Any:
            return _filled(own, together(given) if self._joined else given[rank])

        found = instrument.guarded("replaying samples", self._problem, fill, ())
        return own if found is None else found

    def _called(self, original: Any) -> Any:
        @functools.wraps(original)
        def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or torch.compiler.is_compiling() or not instrument.trains(module):
                return original(module, *args, **kwargs)
            self._inside = True
            try:
                args, kwargs = self._next(_kind(module), [args, kwargs])
                return original(module, *args, **kwargs)
            finally:
                self._inside = False

        return __call__


def _kind(module: Any) -> str:
    return type(shells(module)[-1]).__name__


def _filled(own: Any, given: Any) -> Any:
    """Returns ``own`` with the tensors of ``given``. Raises NotApplicable if it has others."""
    if isinstance(own, torch.Tensor) and isinstance(given, torch.Tensor):
        return given.to(own.device)
    inside = getattr(own, "data", None)  # transformers' BatchEncoding
    if isinstance(inside, dict):
        found = copy.copy(own)
        found.data = _filled(inside, given)
        return found
    if isinstance(own, dict) and isinstance(given, dict) and own.keys() == given.keys():
        found = copy.copy(own)
        found.update((key, _filled(one, given[key])) for key, one in own.items())
        return found
    if isinstance(own, (list, tuple)) and isinstance(given, (list, tuple)):
        if len(own) == len(given):
            make = getattr(own, "_make", type(own))
            return make(_filled(one, two) for one, two in zip(own, given))  # noqa: B905
    elif not any(isinstance(one, (torch.Tensor, dict, list, tuple)) for one in (own, given)):
        return own
    raise NotApplicable("one process draws samples of another form than the ranks do")


def _has_loss(result: Any) -> bool:
    loss = getattr(result, "loss", None)
    several = [loss, *(result if isinstance(result, (list, tuple)) else [result])]
    return any(isinstance(t, torch.Tensor) and t.requires_grad and not t.dim() for t in several)
