"""Records, at checked steps, by how many micro-batches accelerate divides a loss, and whether the
program lets it accumulate them.

accumulation   step micro_batches backwards(accelerate's since the update before) line(the user's
               of the last one) entered(whether `accumulate` ever was)
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from moediag.recorder.laws.context import LawContext

WATCHER = "laws of accumulation"
_ACCELERATOR = "accelerate.accelerator", "Accelerator"


class Accumulation:
    """Counts the calls of ``Accelerator.backward`` between updates."""

    def __init__(self, context: LawContext) -> None:
        self._context = context
        self._micro_batches = 1
        self._backwards = 0
        self._line = ""
        self._entered = False

    def install(self) -> None:
        context = self._context
        context.replace_late(*_ACCELERATOR, "backward", self._backward)
        context.replace_late(*_ACCELERATOR, "accumulate", self._accumulate)
        context.on_step.append(self._write)
        context.recorder.hooks.after_step(self._updated)

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            self._context.guarded(WATCHER, self._divided, accelerator, sys._getframe(1))
            return original(accelerator, *args, **kwargs)

        return backward

    def _accumulate(self, original: Any) -> Any:
        @functools.wraps(original)
        def accumulate(accelerator: Any, *models: Any) -> Any:
            self._entered = True
            return original(accelerator, *models)

        return accumulate

    def _divided(self, accelerator: Any, frame: Any) -> None:
        self._backwards += 1
        self._micro_batches = int(accelerator.gradient_accumulation_steps)
        if self._context.checking:
            self._line = self._context.recorder.user_lines.innermost(frame)

    def _write(self, step: int) -> None:
        if self._micro_batches > 1 and self._backwards:
            self._context.log.event(
                "accumulation", step=step, micro_batches=self._micro_batches, line=self._line,
                backwards=self._backwards, entered=self._entered,
            )  # fmt: skip

    def _updated(self, _optimizer: Any) -> None:
        self._backwards = 0
