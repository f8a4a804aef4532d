"""Records, at checked steps, fingerprints of what the model is called with, and the passes of data
loaders: which samples a rank trains on.

loss        step loss(of the first backward)
repeated    step line made workers   of a stream of which all workers give the same batches
beside      step sampler given made[the line that made a loader which divides nothing] divided[that
            of one whose samples are divided, of the same update]
drawn       step batches[since the check before: [made(the loader) pass(counts those of the rank)
            batch updates(so far) [index or fingerprint of each sample]]]
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import random
import sys
import weakref
from collections import deque
from itertools import islice
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from moediag.recorder.core import ByObject
from moediag.recorder.laws.context import LawContext, several_ranks
from moediag.recorder.modules import unwrapped
from moediag.recorder.step.numbers import Fingerprints, capturing, row_fingerprints

WATCHER = "laws of data"
_MAX_FORWARDS = 8  # of one model in one step
_MAX_DEPTH = 4  # of nested inputs
_MAX_INSIDE = 16  # parts of a loader
_MAX_USED = 8  # iterators of one update
_ORDER = 200  # characters of the first indices of a pass
_DATA = 16  # elements of a sequence that a dataset has because it has data
_MAX_BATCHES = 512  # of which rows are kept
_MAX_ROWS = 64  # of one, and elements of a row
_ENDS = 4  # of its elements that are read, at the beginning and at the end


class _Pass:
    """One pass over a data loader."""

    def __init__(self, loader: Any, made: str) -> None:
        """``made``: the line that made the loader."""
        sampler = _sampler_of(loader)
        given = _length(getattr(loader, "dataset", None))
        ours = hasattr(sampler, "set_epoch") and hasattr(sampler, "num_replicas")
        # All samples, which nothing divides.
        every = type(sampler) is RandomSampler and not sampler.replacement
        every = every and sampler.num_samples == _length(sampler.data_source)
        every = every or (ours and sampler.num_replicas == 1)
        every = every and type(getattr(loader, "batch_sampler", None)) is BatchSampler
        contents: List[str] = []
        self.has_data = every and _describe(loader.dataset, contents, 0)
        digest = hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
        self.sampler, self.number = sampler, 0
        self.shuffled = ours and bool(getattr(sampler, "shuffle", False))
        # Then indices are of one dataset, whose samples may be transformed at random.
        self.by_index = _divided(loader) > _divided(getattr(loader, "dataset", None))
        self.batches: List[Any] = []  # fingerprints of the first ones of the workers of a stream
        self.began: Optional[int] = None  # optimizer steps when it gave its first batch
        self.known: Dict[str, Any] = {
            "sampler": type(sampler).__name__, "made": made, "line": "", "order": "",
            "replicas": int(sampler.num_replicas) if ours else 0,
            "number": int(getattr(sampler, "rank", -1)) if ours else -1,
            "drawn": _length(getattr(sampler, "dataset", None)) if ours else 0,
            "given": given if ours or every else 0,
            "data": digest if every else "", "batch": getattr(loader, "batch_size", None) or 0,
            "divided": _divided(loader),
            "seed": getattr(sampler, "seed", 0) if self.shuffled else 0,
            "epoch": getattr(sampler, "epoch", None) if self.shuffled else 0,
        }  # fmt: skip


class ModelInputs:
    """Reads what models are called with, and follows the passes of data loaders."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._forwards: Tuple[int, int] = 0, 0  # step, forwards of it so far
        self._loss: Tuple[int, Any] = 0, None  # step, the loss of its first backward
        self._made = ByObject()  # data loader -> the user's line that made it
        self._passes = ByObject()  # iterator -> _Pass
        self._drawn = ByObject()  # iterator -> first indices, random states, sampler's, later ones
        self._latest: Optional[_Pass] = None  # the pass that gave the last batch
        self._updates = -1  # optimizer steps when it did
        self._used: List[Any] = []  # weak references to iterators that gave batches since then
        self._batches: List[Tuple[str, int, int, int, Any]] = []  # since the check before
        self._kept = self._number = 0  # batches and passes so far
        self._orders = ByObject()  # sampler -> {(epoch, seed): complete training passes}
        recorder = context.recorder
        guarded = functools.partial(functools.partial, context.guarded, WATCHER)
        context.forward.add(WATCHER, self._called, checked=True)
        context.before_backward.add(WATCHER, self._computed, checked=True)
        context.on_check.append(self._tell_loss)
        context.on_step.append(self._tell_drawn)
        recorder.patches.replace(DataLoader, "__init__", context.around(WATCHER, self._makes))
        drawn = context.around(WATCHER, after=self._draws)
        recorder.patches.replace(_BaseDataLoaderIter, "_next_index", drawn)
        worked = context.around(WATCHER, after=self._worked)
        recorder.patches.replace(_MultiProcessingDataLoaderIter, "_next_data", worked)
        recorder.on_end.append(lambda: context.guarded(WATCHER, self._tell_drawn, context.step))
        recorder.on_pass.append(guarded(self._began))
        recorder.on_batch.append(guarded(self._given))
        recorder.on_pass_end.append(guarded(self._ended))

    # ------------------------------------------------------------------ inputs of models

    def _computed(self, loss: Any) -> None:
        if self._loss[0] != self._context.step and loss.numel() == 1:
            self._loss = self._context.step, loss.detach()

    def _tell_loss(self, step: int) -> None:
        if self._loss[0] == step and not capturing():
            self._context.log.event("loss", step=step, loss=float(self._loss[1]))

    def _called(self, root: Any, args: Any, kwargs: Any) -> None:
        step = self._context.step
        if not unwrapped(root).training:
            return
        before = self._forwards[1] if self._forwards[0] == step else 0
        self._forwards = step, before + 1
        if before >= _MAX_FORWARDS or capturing():
            return
        prints = Fingerprints()
        given = list(_tensors((args, kwargs)))
        for one in given:
            if type(one) in (torch.Tensor, torch.nn.Parameter):
                prints.add(one)
        read = prints.read()
        if not read or None in read:
            return
        known = self._latest.known if self._latest is not None else {}
        self._context.log.event(
            "inputs", step=step, forward=before, digest="-".join(str(one) for one in read),
            over=list(self._context.sets.averaged(root)),
            rows=next((len(one) for one in given if one.dim() and len(one)), 0),
            graded=any(one.requires_grad for one in given), **known,
        )  # fmt: skip
        if not before:
            self._tell_beside(step)

    def _tell_drawn(self, step: int) -> None:
        new, self._batches = self._batches, []
        rows = [[*of, x if type(x) is list else row_fingerprints(x, _MAX_ROWS)] for *of, x in new]
        if rows:
            self._context.log.event("drawn", step=step, batches=rows)

    def _tell_beside(self, step: int) -> None:
        """Iterators that ended, or do not exist any more, are those of an evaluation."""
        passes = [self._passes.get(one()) for one in self._used if one() is not None]
        known = [of.known for of in passes if of is not None]
        divided = next((of for of in known if of["replicas"] > 1), None)
        whole = next((of for of in known if of["data"]), None)
        if divided is not None and whole is not None:
            shown = {name: whole[name] for name in ("sampler", "given", "made")}
            self._context.log.event("beside", step=step, divided=divided["made"], **shown)

    # ------------------------------------------------------------------ data loaders

    def _draws(self, _frame: Any, drawn: Any, iterator: Any) -> None:
        known: Any = self._drawn.get(iterator)
        of = iterator._sampler_iter
        if known is None or known[2] is not of:
            known = repr(drawn)[:_ORDER], random_states(), of, deque[Any]()
            self._drawn.set(iterator, known)
        known[3].append(drawn)

    def _worked(self, frame: Any, batch: Any, iterator: Any) -> None:
        """Compares the first two batches of each worker of a stream: those of a worker differ, and
        all workers give the same ones."""
        workers, of = iterator._num_workers, self._passes.get(iterator)
        first = iterator._num_yielded < 2 * workers and 1 < workers <= _MAX_INSIDE
        if of is None or not first or not isinstance(iterator._dataset, IterableDataset):
            return
        prints = Fingerprints()
        for one in _tensors(batch):
            prints.add(one)
        of.batches.append(tuple(prints.read()))
        once, again = {*of.batches[:workers]}, {*of.batches[workers:]}
        if len(of.batches) == 2 * workers and len(once) == len(again) == 1 and once != again:
            more = {"line": self._context.line(frame), "made": of.known["made"]}
            self._context.event("repeated", keep=True, workers=workers, **more)

    def _makes(self, loader: Any, frame: Any) -> None:
        self._made.set(loader, self._context.line(frame))

    def _began(self, loader: Any, iterator: Any) -> None:
        of = self._passes.set(iterator, _Pass(loader, self._made.get(loader) or ""))
        self._number, of.number = self._number + 1, self._number

    def _given(self, iterator: Any, frame: Any, batch: Any) -> None:
        of, updates = self._passes.get(iterator), self._context.steps
        order, states, _, waiting = self._drawn.get(iterator) or ("", None, None, deque[Any]())
        drawn = waiting.popleft() if waiting else None
        if of is not None and self._kept < _MAX_BATCHES and several_ranks():
            self._kept += 1
            place = of.known["made"], of.number, iterator._num_yielded, updates
            indices = drawn if isinstance(drawn, list) and of.by_index else []
            if indices:
                self._batches.append((*place, [*map(str, indices[:_MAX_ROWS])]))
            for one in () if indices else islice((x for x in _tensors(batch) if x.dim() > 1), 1):
                if one.device.type == "cpu" and one.layout is torch.strided and one.numel():
                    rows = one.detach()[:_MAX_ROWS].flatten(1)
                    part = rows[:, :: max(1, rows.shape[1] // _MAX_ROWS)][:, :_MAX_ROWS].clone()
                    self._batches.append((*place, part))
        known = of is self._latest and updates == self._updates
        if not known:
            old = self._used if updates == self._updates else []
            self._used, self._updates = [*old[-_MAX_USED:], weakref.ref(iterator)], updates
        if of is None or (known and of.began is not None):
            return
        self._latest = of
        if of.began is None:
            of.began = of.known["began"] = self._context.steps
            of.known["order"] = order
            # A dataset without data may make them up. One that draws nothing makes up the same.
            alone = getattr(iterator, "_num_workers", 1) == 0 and states == random_states()
            if not of.has_data and not alone:
                of.known["data"] = ""
            of.known["line"] = self._context.line(frame)

    def _ended(self, iterator: Any, _frame: Any) -> None:
        """A pass in which an optimizer stepped is a pass of training."""
        self._used = [one for one in self._used if one() is not iterator]
        of = self._passes.get(iterator)
        if of is None or of.began is None or not of.shuffled:
            return
        if self._context.steps == of.began:
            return
        seen: Dict[Any, int] = self._orders.setdefault(of.sampler, {})
        order = of.known["epoch"], of.known["seed"]
        seen[order] = seen.get(order, 0) + 1
        if seen[order] == 2:
            shown = {name: of.known[name] for name in ("line", "epoch", "sampler")}
            self._context.event("same_order", keep=True, **shown)


def _sampler_of(loader: Any) -> Any:
    """What draws the samples: inside batch samplers that take a rank's part, as accelerate's do,
    and of which the loader itself does not know."""
    of: Any = getattr(loader, "batch_sampler", None)
    for _ in range(_MAX_INSIDE):
        of = getattr(of, "batch_sampler", None) or of
    own = getattr(of, "sampler", None)
    return getattr(loader, "sampler", None) if own is None else own


def _divided(loader: Any) -> int:
    """Into how many parts the samplers and streams in a loader divide the samples, together."""
    found, waiting, seen = 1, [loader], {0}
    while waiting and len(seen) < _MAX_INSIDE:
        of = waiting.pop()
        seen.add(id(of))
        stream = getattr(of, "_distributed", None)  # of Hugging Face
        for one, many, at in (
            (of, "num_replicas", "rank"), (of, "num_processes", "process_index"),
            (stream, "world_size", "rank"),
        ):  # fmt: skip
            number = getattr(one, many, None)
            found *= number if type(number) is type(getattr(one, at, None)) is int else 1
        inner = (getattr(of, name, None) for name in ("batch_sampler", "sampler", "dataset"))
        waiting += [one for one in inner if one is not None and id(one) not in seen]
    return found


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        return 0


def random_states() -> int:
    """A hash of the states of the random numbers that a program may draw."""
    states = [torch.get_rng_state()]
    states += [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    numpy: Any = sys.modules.get("numpy")
    of_numpy = str(numpy.random.get_state()[1:3]) if numpy is not None else ""
    return hash((*(one.numpy().tobytes() for one in states), random.getstate(), of_numpy))


def _describe(value: Any, found: List[str], depth: int) -> bool:
    """Adds the type and the fields or elements of a value; returns whether there is a path or a
    long sequence among them."""
    length = _length(value)
    found.append(f"{type(value).__name__} {length}")
    if isinstance(value, (bool, int, float, str, bytes, os.PathLike)):
        # A dataset may be one text of gigabytes.
        found.append(str(value[:_ORDER] if isinstance(value, (str, bytes)) else value))
        return isinstance(value, os.PathLike) or (isinstance(value, str) and os.sep in found[-1])
    if isinstance(value, torch.Tensor) or type(value).__name__ in ("ndarray", "memmap"):
        found.append(str([*value[:_ENDS], *value[-_ENDS:]])[:_ORDER] if length else "")
        return length >= _DATA
    if depth >= _MAX_DEPTH:
        return False
    if any(word in type(value).__name__ for word in ("Generator", "Random")):
        found.append(str(id(value)))  # nothing is known of it
        return False
    if isinstance(value, (list, tuple)):
        inner = [*value[:_ENDS], *value[-_ENDS:]]
    elif hasattr(value, "__getitem__"):
        fields = vars(value) if hasattr(value, "__dict__") else {}
        found += sorted(fields)
        inner = [fields[name] for name in sorted(fields)]
        length = _DATA if "_fingerprint" in fields else 0  # of Hugging Face
    else:
        return False
    data = [_describe(one, found, depth + 1) for one in inner]
    return any(data) or length >= _DATA


def _tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors in ``value``, in an order that is the same on every rank."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _MAX_DEPTH:
        inner: Any = ()
        if isinstance(value, Mapping):
            inner = [value[name] for name in sorted(value, key=str)]
        elif isinstance(value, (list, tuple)):
            inner = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        for one in inner:
            yield from _tensors(one, depth + 1)
