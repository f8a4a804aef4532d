"""What this rank has measured so far: one JSON file, complete after each change, and tensors."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any, Dict, Optional

from moediag.protocol import Measured, MeasuredStep, MeasureRequest, measured
from moediag.ranks.verify import tensor_files
from moediag.ranks.verify.tensor_files import Tensors

_MOST = 20  # lines about what was not checked


class Answer:
    """The answer of this process; nothing before :meth:`claim`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start_size = 0  # bytes of the file of the tensors at the start
        self.value: Optional[Measured] = None

    @property
    def open(self) -> bool:
        """Whether more is to be measured."""
        return self.value is not None and not self.value.done

    @property
    def known(self) -> Measured:
        """The answer of a process that has claimed it."""
        assert self.value is not None
        return self.value

    def claim(self, rank: int, world_size: int, asked: MeasureRequest) -> bool:
        """Starts the answer of ``rank``, unless another process has it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            (self._folder / measured.measured_file(rank)).touch(exist_ok=False)
        except FileExistsError:
            return False
        self.value = Measured(
            rank, world_size, os.getpid(), sys.executable, merged=asked.merged,
            replayed=asked.replayed,
        )  # fmt: skip
        self.tell()
        return True

    def tell(self, **fields: Any) -> None:
        self.value = dataclasses.replace(self.known, **fields)
        self.value.write(self._folder)

    def not_checked(self, text: str) -> None:
        lines = self.known.not_checked
        if text not in lines and len(lines) < _MOST:
            self.tell(not_checked=[*lines, text])

    def write_start(self, start: Tensors, states: Tensors) -> None:
        """Writes the weights, and the optimizer's state, as they are before the first forward."""
        path = self._folder / measured.start_tensors(self.known.rank)
        tensor_files.save(path, {"start": start, "states": states})
        self._start_size, before = path.stat().st_size, self._start_size
        self.tell(size=self.known.size + self._start_size - before)

    def add_weights(self, number: int, weights: Tensors) -> None:
        """Writes the weights of step ``number`` as they are now."""
        path = self._folder / measured.step_tensors(self.known.rank, number)
        groups = tensor_files.load(path)
        tensor_files.save(path, {**groups, "weights": {**groups["weights"], **weights}})

    def write_step(self, number: int, groups: Dict[str, Tensors], step: MeasuredStep) -> bool:
        """Writes step ``number`` (from 1). Returns whether it is a new one: several optimizers make
        one step together."""
        path = self._folder / measured.step_tensors(self.known.rank, number)
        steps = list(self.known.steps)
        new = number > len(steps)
        if new:
            steps.append(step)
        else:
            written = tensor_files.load(path)
            groups = {name: {**written[name], **group} for name, group in groups.items()}
            known = steps[number - 1]
            rates, updates = {**step.rates, **known.rates}, {**step.updates, **known.updates}
            steps[number - 1] = dataclasses.replace(known, rates=rates, updates=updates)
        tensor_files.save(path, groups)
        self.tell(steps=steps, size=self.known.size + path.stat().st_size)
        return new
