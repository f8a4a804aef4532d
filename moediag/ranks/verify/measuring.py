"""Measures the first steps of a user's program from inside its processes, without communication.

The program's own calls show everything: the outermost call of a module is a forward, a hook of
torch's optimizers is the step, and clipping goes through functions of ``torch.nn.utils``.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, Union

import torch
import torch.distributed as dist

from moediag.protocol import MeasuredStep, MeasureRequest
from moediag.ranks.verify import model_facts, samples, zero_pieces
from moediag.ranks.verify.clips import Clips
from moediag.ranks.verify.ending import Continuing, Ending
from moediag.ranks.verify.first_weights import FirstWeights
from moediag.ranks.verify.merged_steps import MergedSteps
from moediag.ranks.verify.model_facts import LossCalls, Reduction
from moediag.ranks.verify.model_pieces import (
    NotReduced,
    Piece,
    owners,
    part_of,
    pieces,
    shard_again,
    shells,
    tied,
)
from moediag.ranks.verify.module_calls import ModuleCalls
from moediag.ranks.verify.rank_answer import Answer
from moediag.ranks.verify.replayed_samples import NOT_SEEN, Drawn, Replayed
from moediag.ranks.verify.tensor_files import Stored, Tensors, enough_room
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import instrument
from moediag.recorder.step.hooks import StepHooks
from moediag.recorder.step.pieces import WHOLE, distributed

_STRANGE = (
    "its optimizer holds no parameter of the model that was called (DeepSpeed's ZeRO and other "
    "wrappers keep copies), so its gradients cannot be read"
)

_OTHERS = 5.0  # seconds that a forward waits until all ranks have measured enough


@dataclass(frozen=True)
class Scope:
    """One model, in a process that says itself which rank it is."""

    model: Any
    rank: int
    world_size: int


class Measuring:
    """The measurements of this process: of every model that it trains, or of one ``scope``. Only
    the first process of each rank measures."""

    def __init__(
        self,
        request: MeasureRequest,
        ending: Union[Ending, Continuing],
        scope: Optional[Scope] = None,
    ) -> None:
        self._request = request
        self._folder = Path(request.folder)
        self._ending = ending
        self._scope = scope
        self._hooks = StepHooks()
        self._pid = os.getpid()
        self._off = False  # another process has this rank, or measuring failed
        self._answer = Answer(self._folder)
        self._pieces: Dict[str, Piece] = {}
        self._roots: List[weakref.ref[Any]] = []
        self._start: Tensors = {}
        self._states: Tensors = {}  # of the optimizer at the start
        self._first = FirstWeights(request)
        # Of an optimizer, by id, and the parameters that it updated in one call: DeepSpeed calls it
        # once for each group.
        self._steps_of: Dict[Tuple[int, Tuple[str, ...]], int] = {}
        self._keep: List[Any] = []  # those optimizers: ids stay theirs
        self._now = MeasuredStep()
        self._clips = Clips(self._hooks, self._before_clip)
        self._dtypes: Set[torch.dtype] = set()  # of what modules have returned
        self._gradients: Tensors = {}  # of this step, before clipping
        self._modules = ModuleCalls()
        self._reduction = Reduction()
        self._loss_calls = LossCalls()
        self._drawn = Drawn()
        self._tied: Dict[str, str] = {}  # other name of a parameter -> its first name
        self._total = self._elements = 0  # of the samples of this step
        self._unsettled = False  # the program may still change the weights of the last step
        self._complete = False  # all steps were made
        self._strange = 0  # steps of optimizers that hold no parameter of the model

    def install(self) -> None:
        """Replaces what the program will call. Call it once, right after torch was imported, or
        where the model of the scope is about to make a step."""
        self._hooks.around_forward(
            self._outermost,
            functools.partial(self._guarded, self._before_forward),
            functools.partial(self._guarded, self._after_forward),
            self._returned,
        )
        self._hooks.before_backward(self._before_backward)
        self._clips.install()
        if self._request.merged > 1:
            MergedSteps(self._request.merged, self._hooks).install()
        self._hooks.before_step(self._before_step)
        self._hooks.after_step(self._after_step)
        if self._scope is not None:
            self._guarded(self._begin, self._scope.model)
        else:
            atexit.register(self._at_exit)
            model_facts.turn_dropout_off(self._hooks)
            self._loss_calls.install(self._hooks)
            self._guarded(self._follow_samples)

    def _follow_samples(self) -> None:
        if self._request.replayed:
            Replayed(str(self._request.start_from), self._request.replayed, self._problem).install(
                self._hooks
            )
        elif self._request.start_from is None:
            self._drawn.install(self._hooks)

    def remove(self) -> None:
        """Takes everything back that :meth:`install` has replaced."""
        atexit.unregister(self._at_exit)
        self._hooks.remove()

    def _at_exit(self) -> None:
        if self._active() and self._answer.open and self._complete:
            self._guarded(self._settle, False)

    def _begin(self, module: Any) -> None:
        if self._claim():
            self._add_root(module)

    def held(self) -> List[Piece]:
        """Returns what this process holds of the models that were called."""
        return list(self._pieces.values())

    def keep_states(self, states: Tensors) -> None:
        """Writes the optimizer's state before the step beside the weights."""
        self._states = states
        self._guarded(self._write_start)

    def problems(self) -> List[str]:
        """Returns why the measured numbers cannot be compared."""
        return self._answer.value.problems if self._answer.value is not None else []

    def leave_out(self, text: str) -> None:
        """Says what this run does not show."""
        if self._answer.open:
            self._answer.not_checked(text)

    def gradients_alone(self) -> None:
        """Makes a step of gradients only, in place of an optimizer's."""
        if self._answer.open:
            self._guarded(self._gradients_alone)

    def _gradients_alone(self) -> None:
        for piece in self._pieces.values():
            if piece.trainable:
                self._keep_gradient(piece)
        self._write_step(1, {"gradients": dict(self._gradients), "weights": {}}, {})
        self._enough()

    def no_more(self) -> None:
        """Says that the step of the scope is over, whatever was measured."""
        if self._answer.open:
            self._guarded(self._settle)
        if self._answer.open and not self._answer.known.steps:
            self._problem(_STRANGE if self._strange else "no optimizer of it made a step")

    def _active(self) -> bool:
        return not self._off and os.getpid() == self._pid

    def _guarded(self, act: Callable[..., Any], *args: Any) -> Any:
        """An error in the measuring ends the measuring, not the program."""
        return instrument.guarded("measuring", self._problem, act, args)

    def _problem(self, text: str) -> None:
        if self._answer.open:
            self._answer.tell(problems=[*self._answer.known.problems, text])
            self._enough()

    # ------------------------------------------------------------------ forward and backward

    def _outermost(self, module: Any) -> bool:
        """Whether a forward that trains begins here."""
        if self._scope is not None and all(module is not one for one in shells(self._scope.model)):
            return False
        return self._active() and instrument.trains(module)

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        if self._answer.value is None and not self._claim():
            return None
        if self._answer.open:
            self._settle()
        if not self._answer.open:
            self._ending.wait(_OTHERS)
            return None
        models = [one for one in (root() for root in self._roots) if one is not None]
        if self._scope is None and not part_of(module, models):
            self._add_root(module)
        rows: List[str] = []
        if self._scope is not None or self._roots[0]() is module:
            rows = samples.hashes(args, kwargs)
            self._now.samples.extend(rows)
            self._total += samples.total(args, kwargs)
            self._elements += samples.elements(args, kwargs)
        self._reduction.forward(module)
        self._modules.begin(rows, samples.first(args, kwargs) if rows else None)
        self._loss_calls.open = True
        return module, args, kwargs, model_facts.random_state()

    def _returned(self, module: Any, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._dtypes.add(result.dtype)
        if self._modules.open:
            self._guarded(self._modules.returned, module, args, kwargs, result)

    def _after_forward(self, called: Any, result: Any) -> None:
        answer = self._answer.value
        if called is None or answer is None:
            return
        module, args, kwargs, before = called
        self._modules.returned(module, args, kwargs, result)
        if self._request.start_from is None and self._scope is None:
            self._drawn.called(module, args, kwargs, result)
        found = {model_facts.dtype_name(d) for d in self._dtypes if d.is_floating_point}
        if not found <= set(answer.dtypes):
            self._answer.tell(dtypes=sorted({*answer.dtypes, *found}))
        if getattr(result, "aux_loss", None) is not None and not answer.auxiliary:
            self._answer.tell(auxiliary=True)
        if answer.random:
            return
        after = model_facts.random_state()
        if not all(torch.equal(a, b) for a, b in zip(before, after)):  # noqa: B905 - Python 3.9
            self._answer.tell(random=True)

    def _claim(self) -> bool:
        """Starts the answer of this rank, unless another process has it."""
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if self._scope is not None:
            rank, size = self._scope.rank, self._scope.world_size
        elif dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        self._off = not self._answer.claim(rank, size, self._request)
        return not self._off

    def _add_root(self, module: Any) -> None:
        if self._scope is None and model_facts.has_dropout(module):
            self._answer.not_checked("dropout: it is turned off in all runs")
        answer = self._answer.known
        prefix = f"model{len(self._roots) + 1}." if self._roots else ""
        self._roots.append(weakref.ref(module))
        known = {id(p.owner) for p in self._pieces.values() if p.owner is not None}
        shard_again(module)
        found = [p for p in pieces(module, prefix) if p.owner is None or id(p.owner) not in known]
        self._clips.of_fsdp1(module)
        enough_room(found, self._request, alone=self._answer.known.world_size == 1)
        others = tied(module, prefix)
        self._tied.update(others)
        self._first.give(found, others)
        self._modules.add(module, prefix)
        self._start.update({p.name: _stored(p, p.read()) for p in found})
        self._pieces.update((p.name, p) for p in found)
        self._write_start()
        layout = dict(answer.layout)
        for piece in found:
            layout.update(piece.mesh)
        dtypes = {model_facts.dtype_name(p.read().dtype) for p in found if p.owner is not None}
        dtypes |= model_facts.computes_in(module)
        self._answer.tell(
            layout=layout,
            dtypes=sorted({*answer.dtypes, *dtypes}),
            across_samples=answer.across_samples or model_facts.across_samples(module),
            by_bytes=self._first.by_bytes,
            clears=answer.clears or zero_pieces.holds(module),
            averages_over=answer.averages_over or model_facts.averages_over(module),
            tied={**answer.tied, **others} if answer.world_size == 1 else {},
            absent=self._first.absent,
            renamed=self._first.renamed,
        )

    def _write_start(self) -> None:
        self._answer.write_start(self._start, self._states)

    def _before_backward(self, tensor: Any) -> None:
        self._loss_calls.open = False
        if self._active() and self._answer.value is not None and tensor.numel() == 1:
            self._guarded(self._loss, tensor)

    def _loss(self, tensor: Any) -> None:
        if not distributed(tensor):
            self._now.losses.append(float(tensor.detach().float()))

    # ------------------------------------------------------------------ gradients

    def _before_clip(self, parameters: Optional[List[Any]]) -> bool:
        """Keeps the gradients of ``parameters`` (None: of all) as they are before clipping."""
        if not self._active() or self._answer.value is None:
            return False
        every = {id(piece.owner) for piece in self._pieces.values() if piece.owner is not None}
        wanted = every if parameters is None else every & {id(p) for p in parameters}
        if wanted:
            self._guarded(self._keep_gradients, wanted)
        return bool(wanted)

    def _keep_gradients(self, owners: Any) -> None:
        for name, piece in self._pieces.items():
            if id(piece.owner) in owners and name not in self._gradients:
                self._keep_gradient(piece)

    def _keep_gradient(self, piece: Piece, scale: float = 1.0) -> None:
        try:
            gradient = piece.gradient()
        except NotReduced:
            self._answer.not_checked(f"gradient of {piece.name}: it is not reduced at the step")
            return
        if gradient is not None and scale != 1.0:
            gradient = gradient / scale
        self._gradients[piece.name] = _stored(piece, gradient)

    # ------------------------------------------------------------------ the step

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if not self._active() or self._answer.value is None:
            return
        if self._complete:
            self._guarded(self._settle)
        if self._answer.open:
            self._guarded(self._gradients_of, optimizer)
        else:
            self._ending.wait()

    def _after_step(self, optimizer: Any) -> None:
        if self._active() and self._answer.open:
            self._guarded(self._weights_of, optimizer)

    def _own(self, optimizer: Any) -> Dict[str, Tuple[Piece, float]]:
        """Returns the pieces that ``optimizer`` updates, and their learning rates."""
        rates = {
            id(parameter): float(group.get("lr", 0.0))
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return {
            name: (piece, rates[id(piece.owner)])
            for name, piece in self._pieces.items()
            if piece.owner is not None and id(piece.owner) in rates
        }

    def _gradients_of(self, optimizer: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # of a GradScaler, for a fused optimizer
        by = float(scale) if scale is not None else 1.0
        known = self._gradients
        own = self._own(optimizer)
        if known:
            own_pieces = {name: piece for name, (piece, _) in own.items()}
            norm = self._clips.norm(known, own_pieces)
            self._now = dataclasses.replace(self._now, norm=norm, clips=self._clips.calls)
        for name, (piece, _) in own.items():
            if name not in known:
                self._keep_gradient(piece, by)

    def _weights_of(self, optimizer: Any) -> None:
        answer = self._answer.known
        own = self._own(optimizer)
        if not own:
            self._strange += 1
            if not answer.steps and self._strange >= max(2, self._request.steps):
                raise NotApplicable(_STRANGE)
            return
        key = id(optimizer), tuple(own)
        if key not in self._steps_of:
            self._steps_of[key] = 0
            self._keep.append(optimizer)
        if not answer.foreign and len(own) < sum(len(g["params"]) for g in optimizer.param_groups):
            self._answer.tell(foreign=self._has_foreign(optimizer))
        self._steps_of[key] += 1
        number = self._steps_of[key]
        gradients = self._gradients
        groups: Dict[str, Tensors] = {
            "gradients": {name: gradients.pop(name) for name in own if name in gradients},
            "weights": {name: _stored(piece, piece.read()) for name, (piece, _) in own.items()},
        }
        self._now = dataclasses.replace(self._now, updates=_updates(optimizer, own))
        self._write_step(number, groups, {name: rate for name, (_, rate) in own.items()})
        self._unsettled = True
        self._complete = min(self._steps_of.values()) >= self._request.steps
        if self._complete and answer.world_size == 1:
            self._enough()

    def _settle(self, ends: bool = True) -> None:
        """Reads the weights of the last step again: between the optimizer's step and the next
        forward the program may send updates to other ranks, or copy main weights back."""
        if self._unsettled and self._answer.known.world_size > 1:
            self._unsettled = False
            weights = {p.name: _stored(p, p.read()) for p in self._pieces.values() if p.trainable}
            weights.update(self._replaced())
            self._answer.add_weights(len(self._answer.known.steps), weights)
        if self._complete and ends:
            self._enough()
        elif self._complete:
            self._answer.tell(done=True)

    def _replaced(self) -> Tensors:
        """Returns the plain tensors that took the place of parameters after the first forward."""
        if any(p.where.kind != WHOLE for p in self._pieces.values() if p.owner is not None):
            return {}
        found: Tensors = {}
        for number, root in enumerate(self._roots, start=1):
            prefix = f"model{number}." if number > 1 else ""
            for name, now in owners(root(), prefix).items() if root() is not None else ():
                piece = self._pieces.get(self._tied.get(name, name))
                if piece is not None and piece.owner is not now and now.shape == piece.where.shape:
                    found[name] = _stored(piece, now)
                    self._start.setdefault(name, self._start[piece.name])
        if found:
            self._write_start()
        return found

    def _has_foreign(self, optimizer: Any) -> bool:
        known = {id(piece.owner) for piece in self._pieces.values()}
        return any(id(p) not in known for group in optimizer.param_groups for p in group["params"])

    def _write_step(self, number: int, groups: Dict[str, Tensors], rates: Dict[str, float]) -> None:
        total = f"{self._total % (1 << 64):x}" if self._now.samples else ""
        step = dataclasses.replace(self._now, rates=rates, total=total, elements=self._elements)
        if self._modules.open:
            self._modules.write(self._folder, self._answer.known.rank)
            self._answer.tell(reduction=self._reduction.found())
            if self._modules.full_at:
                self._answer.not_checked(
                    f"outputs of modules from {self._modules.full_at} on: they take too much memory"
                )
        self._tell_samples()
        if self._answer.write_step(number, groups, step):
            self._now, self._total, self._elements = MeasuredStep(), 0, 0
            self._clips.next_step()

    def _tell_samples(self) -> None:
        if self._request.start_from is None and self._scope is None:
            self._answer.tell(**self._drawn.write(self._folder, self._answer.known.rank))
        if self._loss_calls.made and all(p.where.kind == WHOLE for p in self._pieces.values()):
            self._answer.tell(gathers=[list(ranks) for ranks in sorted(self._loss_calls.made)])
        if self._request.replayed:
            self._answer.not_checked(NOT_SEEN)

    def _enough(self) -> None:
        self._answer.tell(done=True)
        self._ending.begin()


def _updates(optimizer: Any, own: Dict[str, Tuple[Piece, float]]) -> Dict[str, float]:
    counts = {
        name: optimizer.state.get(piece.owner, {}).get("step") for name, (piece, _) in own.items()
    }
    return {name: float(count) for name, count in counts.items() if count is not None}


def _stored(piece: Piece, tensor: Optional[torch.Tensor]) -> Stored:
    kept = None if tensor is None else tensor.detach().cpu().clone()
    return Stored(piece.where, kept, piece.placement, piece.trainable, piece.owner is None)
