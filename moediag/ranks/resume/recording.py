"""Records steps of a user's program from inside its processes, without communication: the state
that wanted steps begin with, and what the program saves and loads.

A step begins with the first forward that trains after an update. Its state is complete just before
the update (of a step with a closure, before its backward): by then nothing can set it back without
an effect on training.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Union

import torch.distributed as dist

from moediag.protocol.recorded_state import (
    SAVED,
    Recorded,
    RecordedStep,
    StateRequest,
    Transfer,
    recorded_file,
    state_file,
)
from moediag.ranks.resume.program_state import Objects, StateOf
from moediag.ranks.verify import samples
from moediag.ranks.verify.ending import Continuing, Ending
from moediag.ranks.verify.model_pieces import Piece, part_of, pieces, shard_again
from moediag.recorder.step import instrument
from moediag.recorder.step.checkpoint_files import SAVE, CheckpointFiles
from moediag.recorder.step.hooks import StepHooks
from moediag.recorder.step.pieces import distributed

_OTHERS = 5.0  # seconds that a forward waits until all ranks have recorded enough
_PAUSE = 0.05  # seconds between two looks at a save in a thread
_KEPT = 3  # states, while the checkpoint is not known
_MOST = 50  # transfers of a kind
_TRAINER = "transformers.trainer"


class StateRecording:
    """The recording of this process. Only the first process of each rank records."""

    def __init__(self, request: StateRequest, ending: Union[Ending, Continuing]) -> None:
        self._request, self._ending = request, ending
        self._folder = Path(request.folder)
        self._hooks = StepHooks()
        self._files = CheckpointFiles(lambda: self._made, self._transferred)
        self._pid = os.getpid()
        self._off = False
        self._answer: Optional[Recorded] = None
        self._early: List[Any] = []  # transfers before the first forward
        self._pieces: Dict[str, Piece] = {}
        self._roots: List[Any] = []
        self._made = 0
        self._begun = False  # a forward of the next step was seen
        self._stepped = False  # an update was made since then
        self._now: Optional[StateOf] = None
        self._optimizer: Any = None  # whose closure makes this step's forward and backward
        self._rows: List[str] = []
        self._losses: List[float] = []

    def install(self) -> None:
        """Replaces what the program will call. Call it once, right after torch was imported."""
        self._hooks.around_forward(
            self._outermost,
            functools.partial(self._guarded, self._before_forward),
            lambda *_: None,
            lambda *_: None,
        )
        self._hooks.before_backward(self._before_backward)
        self._hooks.before_step(self._before_step)
        self._hooks.after_step(self._after_step)
        self._files.install()
        atexit.register(self._at_exit)
        if self._request.checkpoint:
            self._guarded(self._trainer_resumes)

    def remove(self) -> None:
        """Takes everything back that :meth:`install` has replaced."""
        atexit.unregister(self._at_exit)
        self._hooks.remove()
        self._files.remove()

    # ------------------------------------------------------------------------ hooks

    def _active(self) -> bool:
        return not self._off and os.getpid() == self._pid

    def _guarded(self, act: Callable[..., Any], *args: Any) -> Any:
        """An error in the recording ends the recording, not the program."""
        return instrument.guarded("recording", self._problem, act, args)

    def _problem(self, text: str) -> None:
        if self._answer is not None and not self._answer.done:
            self._tell(problems=[*self._answer.problems, text], done=True)
            self._ending.begin()

    def _tell(self, **fields: Any) -> None:
        assert self._answer is not None
        self._answer = dataclasses.replace(self._answer, **fields)
        self._answer.write(self._folder)

    @property
    def _open(self) -> bool:
        return self._active() and self._answer is not None and not self._answer.done

    def _outermost(self, module: Any) -> bool:
        """Whether a forward that trains begins here."""
        return self._active() and instrument.trains(module)

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if self._answer is None and not self._claim():
            return
        if not self._open:
            self._ending.wait(_OTHERS)
            return
        if self._stepped or not self._begun:
            self._begin()
        if not part_of(module, self._roots):
            self._add_root(module)
        self._rows.extend(samples.hashes(args, kwargs))

    def _before_backward(self, tensor: Any) -> None:
        if self._open and tensor.numel() == 1 and not distributed(tensor):
            self._losses.append(float(tensor.detach().float()))
        if self._optimizer is not None:
            self._at_update(self._optimizer)

    def _before_step(self, optimizer: Any, closure: bool, *_: Any) -> None:
        self._optimizer = optimizer if closure else None
        self._at_update(optimizer)  # nothing, if its forward is still to come

    def _at_update(self, optimizer: Any) -> None:
        if not self._active() or self._answer is None:
            return
        if self._answer.done:
            self._ending.wait()
        elif self._begun and not self._stepped and self._now is not None:
            self._guarded(self._complete, optimizer)
            self._now = None
            if self._answer.done:
                self._ending.wait()

    def _after_step(self, _optimizer: Any) -> None:
        if not self._open or self._stepped or not self._begun:
            return
        self._stepped = True
        self._made += 1
        self._guarded(self._end_of_step)

    def _at_exit(self) -> None:
        if self._open:
            self._guarded(self._tell)

    # ------------------------------------------------------------------------ one step

    def _claim(self) -> bool:
        """Starts the answer of this rank, unless another process has it."""
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            (self._folder / recorded_file(rank)).touch(exist_ok=False)
        except FileExistsError:
            self._off = True
            return False
        self._answer = Recorded(rank, size, self._pid)
        for which, one in self._early:
            self._keep(which, one)
        self._ending.begin()
        return True

    def _wanted(self, step: int) -> bool:
        first = self._request.first
        return first == 0 or first <= step < first + self._request.steps

    def _begin(self) -> None:
        self._begun, self._stepped = True, False
        self._rows, self._losses = [], []
        self._now = None
        if self._wanted(self._made + 1):
            self._now = StateOf()
            self._now.generators()
            self._now.models(self._pieces.values(), self._roots)

    def _add_root(self, module: Any) -> None:
        number = len(self._roots)
        self._roots.append(module)
        known = {id(p.owner) for p in self._pieces.values() if p.owner is not None}
        shard_again(module)
        found = pieces(module, f"model{number + 1}." if number else "")
        new = [p for p in found if p.owner is None or id(p.owner) not in known]
        self._pieces.update((p.name, p) for p in new)
        if self._now is not None:
            self._now.models(new, self._roots[number:] if not number else ())

    def _complete(self, optimizer: Any) -> None:
        """Writes the state that this step began with."""
        assert self._answer is not None
        assert self._now is not None
        now, step, held = self._now, self._made + 1, list(self._pieces.values())
        objects = Objects(self._roots, held, optimizer)
        names = {id(piece.owner): piece.name for piece in held if piece.owner is not None}
        now.optimizers(objects.optimizers, names)
        now.schedulers(objects.schedulers)
        now.scalers(objects.scalers)
        now.copies(objects.copies(self._files.was_loaded))
        items = now.items()
        del objects
        RecordedStep(step, items).write(self._folder, self._answer.rank)
        first = self._request.first
        if first == 0:
            old = self._folder / state_file(self._answer.rank, step - _KEPT)
            old.unlink(missing_ok=True)
            saved = self._saved()
            last = saved is not None and saved < step  # another rank may be a step ahead
        else:
            last = step == first + self._request.steps - 1
        if last:
            self._add_step()
            if not self._request.to_end:
                while self._files.busy:  # a save in a thread, which does not need this one
                    time.sleep(_PAUSE)
                self._tell(done=True)

    def _saved(self) -> Optional[int]:
        """The steps after which a rank saved the checkpoint."""
        found = [int(p.name[len(SAVED) :]) for p in self._folder.glob(f"{SAVED}*")]
        return min(found, default=None)

    def _end_of_step(self) -> None:
        assert self._answer is not None
        if len(self._answer.batches) < self._made:
            self._add_step()
        self._tell(made=self._made, trainer=self._answer.trainer or self._in_trainer())

    def _add_step(self) -> None:
        assert self._answer is not None
        batch = f"{sum(int(row, 16) for row in self._rows):x}" if self._rows else ""
        self._tell(
            batches=[*self._answer.batches, batch], losses=[*self._answer.losses, self._losses]
        )

    # ------------------------------------------------------------------------ files

    def _transferred(self, which: str, one: Transfer) -> None:
        if not self._active():
            return
        if self._answer is None:
            self._early.append((which, one))
        elif not self._answer.done:
            self._guarded(self._keep, which, one)

    def _keep(self, which: str, one: Transfer) -> None:
        assert self._answer is not None
        known = getattr(self._answer, which)
        if len(known) < _MOST:
            self._tell(**{which: [*known, one]})
        first = self._answer.saved_after is None or self._request.to_end
        if which == SAVE and first and self._is_checkpoint(one):
            self._tell(saved_after=one.step)
            (self._folder / f"{SAVED}{one.step}").touch()

    def _is_checkpoint(self, one: Transfer) -> bool:
        """Whether it holds as much as the parameters that are trained."""
        trained = [p for p in self._pieces.values() if p.trainable]
        size = sum(piece.read().numel() for piece in trained)
        return one.step >= max(self._request.after, 1) and 2 * one.elements >= size > 0

    # ------------------------------------------------------------------------ transformers

    def _in_trainer(self) -> bool:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__") == _TRAINER:
                return True
            frame = frame.f_back
        return False

    def _trainer_resumes(self) -> None:
        """Gives the checkpoint to a ``Trainer.train`` of transformers that is given none."""
        checkpoint = self._request.checkpoint

        def act() -> None:
            def make(original: Any) -> Any:
                @functools.wraps(original)
                def train(
                    trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
                ) -> Any:
                    return original(trainer, resume_from_checkpoint or checkpoint, *args, **kwargs)

                return train

            self._hooks.replace(sys.modules[_TRAINER].Trainer, "train", make)

        self._hooks.when_imported(_TRAINER, act)
