"""Records, at checked steps, whether modules that activation checkpointing runs again in the
backward get the inputs of the forward again.

recomputed  step line(that called checkpoint) compared(calls of modules)
            apart[[module, sketch of its input in the forward, and in the backward]]   some of them
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import Any, Callable, Iterator, List, Tuple

import torch
from torch.nn.modules import module as torch_module

from moediag.recorder.laws.context import LawContext
from moediag.recorder.modules import Handles
from moediag.recorder.step.numbers import Fingerprints, capturing, traced

WATCHER = "laws of recomputation"
_MODULE = "torch.utils.checkpoint"
_MOST_REGIONS = 32  # of one step
_MOST_CALLS = 64  # of modules in one region
_MOST_NAMES = 4


class _Calls:
    """The modules that a region called, and sketches of their first input."""

    def __init__(self) -> None:
        self.modules: List[Any] = []
        self.prints = Fingerprints()

    def add(self, module: Any, args: Tuple[Any, ...]) -> None:
        given = next((one for one in args if type(one) is torch.Tensor), None)
        if given is not None and len(self.modules) < _MOST_CALLS and not capturing():
            self.prints.add_sketch(len(self.modules), given)
            self.modules.append(module)


class _Region:
    """One call of ``checkpoint``."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.forward = _Calls()
        self.again = _Calls()
        self.began_again = False


class CheckpointedInputs:
    """Follows the calls of modules inside ``checkpoint``. The hook of all modules exists only while
    such a region runs in a checked step: dynamo, for one, looks whether there is one."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._running = threading.local()  # .calls: of the innermost region of the thread
        self._regions: List[_Region] = []
        self._step = 0
        self._context.on_check.append(self._write)
        later = functools.partial(self._context.replace_late, _MODULE)
        later("", "_checkpoint_without_reentrant_generator", self._generator)
        later("CheckpointFunction", "apply", self._reentrant)

    def _generator(self, original: Any) -> Any:
        """Wraps the generator between whose two halves ``checkpoint`` runs the forward."""

        @functools.wraps(original)
        def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = len(args) > 1 and args[1] is not sys.modules[_MODULE].noop_context_fn
            region = None if chosen else self._region(3)
            if region is None:
                return original(function, *args, **kwargs)
            return self._around(region, original(self._again(region, function), *args, **kwargs))

        return generator

    def _reentrant(self, original: Any) -> Any:
        def apply(function: Any, *args: Any) -> Any:
            region = self._region(3)
            if region is None:
                return original(function, *args)
            first = [True]

            def run(*given: Any, **more: Any) -> Any:
                if first:
                    first.clear()
                    with self._followed(region.forward):
                        return function(*given, **more)
                return self._again(region, function)(*given, **more)

            return original(run, *args)

        return staticmethod(apply)

    def _region(self, depth: int) -> Any:
        """The region that begins; None if it is not followed: dynamo has compiled something, and a
        hook of all modules would make it compile again."""
        context = self._context
        step = context.step
        if traced() or not context.recorder.active or not context.checking:
            return None
        if step != self._step:
            self._step, self._regions = step, []
        full = len(self._regions) >= _MOST_REGIONS
        if full or not torch.is_grad_enabled() or _compiled() or context.recorder.broken(WATCHER):
            return None
        region = _Region(context.line(sys._getframe(depth)))
        self._regions.append(region)
        return region

    def _around(self, region: _Region, generator: Any) -> Iterator[Any]:
        with self._followed(region.forward):
            yield from generator

    def _again(self, region: _Region, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            once, region.began_again = not region.began_again, True
            if not once:
                return function(*args, **kwargs)
            with self._followed(region.again):
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _followed(self, calls: _Calls) -> Iterator[None]:
        before = getattr(self._running, "calls", None)
        self._running.calls = calls
        handles = Handles()
        if before is None:  # else it is a region inside another one: there is a hook
            handles.append(torch_module.register_module_forward_pre_hook(self._called))
        try:
            yield
        finally:  # a recomputation that has all that it needs stops by an exception
            handles.remove_all()
            self._running.calls = before

    def _called(self, module: Any, args: Any) -> None:
        calls = getattr(self._running, "calls", None)
        if calls is not None:
            self._context.guarded(WATCHER, calls.add, module, args)

    def _write(self, step: int) -> None:
        regions, self._regions = self._regions, []
        names = self._context.recorder.module_names
        if self._step != step:
            return
        for region in regions:
            one, two = region.forward.prints.sketches(), region.again.prints.sketches()
            pairs = zip(region.forward.modules, region.again.modules)  # noqa: B905 - Python 3.9
            apart: List[List[Any]] = []
            compared = 0
            for at, (module, other) in enumerate(pairs):
                if module is not other:
                    break  # another path: what comes now belongs to other calls
                compared += at in one and at in two
                if at in one and at in two and one[at] != two[at]:
                    name = names.get(module) or type(module).__name__
                    apart.append([name, one[at], two[at]])
            self._context.log.event(
                "recomputed", step=step, line=region.line, compared=compared,
                apart=apart[:_MOST_NAMES],
            )  # fmt: skip


def _compiled() -> bool:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters and (counters.get("frames") or counters.get("stats")))
