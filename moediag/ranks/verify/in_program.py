"""One step inside a running program, and the same step in one process of it.

Each rank measures its own step. Then rank 0 builds the model again, gives it the weights that all
ranks had before the step and the samples of all ranks, and measures that step as often as
`moediag verify` runs its reference.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
import socket
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional

import torch
import torch.distributed as dist

from moediag.protocol import MeasureRequest, read_measured
from moediag.protocol.measured import coarsest_dtype
from moediag.ranks.verify import optimizer_copies, whole_batch
from moediag.ranks.verify.ending import Continuing
from moediag.ranks.verify.measuring import Measuring, Scope
from moediag.ranks.verify.model_pieces import pieces
from moediag.ranks.verify.optimizer_copies import CannotCopy, Settings
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step.pieces import WHOLE, distributed

SEVERAL_MACHINES = "the ranks run on several machines, and only those of one can be compared"
_READ = 10.0  # seconds that rank 0 waits for the others to read
_EVERY = 0.1  # seconds between two looks for rank 0's end


def world() -> int:
    return dist.get_world_size() if _distributed() else 1


def own_rank() -> int:
    return dist.get_rank() if _distributed() else 0


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def exchanged(value: Any) -> List[Any]:
    """Returns the values of all ranks. Collective."""
    if not _distributed():
        return [value]
    found: List[Any] = [None] * world()
    dist.all_gather_object(found, value)
    return found


def on_rank_zero(work: Callable[[], None], name: str) -> None:
    """Runs ``work`` on rank 0. Returns on every rank when it is done, and raises its error on every
    rank. ``name``: the same on all ranks, another one for each call.

    The ranks wait at the store, which has no timeout as collectives have."""
    if not _distributed():
        work()
        return
    store, key = dist.distributed_c10d._get_default_store(), f"moediag/{name}"
    if own_rank() == 0:
        raised: Optional[BaseException] = None
        try:
            work()
        except BaseException as error:
            raised = error
            raise
        finally:
            store.set(key, pickle.dumps(sendable(raised)))
            _wait_for_readers(store, key)
        return
    while not store.check([key]):
        time.sleep(_EVERY)
    found = pickle.loads(store.get(key))  # noqa: S301 - written by rank 0 of this job
    store.add(f"{key}/read", 1)
    if found is not None:
        raise found from RuntimeError("moediag.verify.step failed on rank 0")


def _wait_for_readers(store: Any, key: str) -> None:
    """Waits until the other ranks have read the value: without torchrun the store ends with rank 0,
    which may be the program's last line. Not for ever: a rank may be gone."""
    until = time.monotonic() + _READ
    while store.add(f"{key}/read", 0) < world() - 1 and time.monotonic() < until:
        time.sleep(_EVERY)


def sendable(error: Optional[BaseException]) -> Optional[BaseException]:
    """Returns the error, or one with its text if other ranks could not read it."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:
        return RuntimeError(repr(error))
    return error


def host() -> str:
    return socket.gethostname()


@dataclass(frozen=True)
class Asked:
    """What the caller of ``moediag.verify.step`` gave."""

    model: Any
    optimizer: Any
    reference: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    batch: Any
    clip: Optional[float] = None
    collate: Optional[whole_batch.Collate] = None


@dataclass(frozen=True)
class _OfRank:
    """What one rank tells the others about its step."""

    batch: str = ""  # hash
    settings: Settings = dataclasses.field(default_factory=dict)
    no_copy: str = ""  # why its optimizer cannot be copied
    problem: str = ""


class Step:
    """One step of all ranks. Use it as a context around the step; then call :meth:`references`."""

    def __init__(self, asked: Asked, measured: Path) -> None:
        self._asked = asked
        self._folder = measured
        self._own = _OfRank()
        self._of_ranks: List[_OfRank] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures what runs inside. Collective at the end, unless it raises."""
        request = MeasureRequest(str(self._folder), 1)
        scope = Scope(self._asked.model, own_rank(), world())
        measuring = Measuring(request, Continuing(), scope)
        measuring.install()
        try:
            self._own = self._before(measuring)
            yield
        finally:
            measuring.remove()
        measuring.no_more()
        self._of_ranks = exchanged(self._own)

    def _before(self, measuring: Measuring) -> _OfRank:
        asked, found = self._asked, _OfRank()
        own = list(measuring.held())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            digest = whole_batch.write(self._folder, own_rank(), asked.batch)
            found = dataclasses.replace(found, batch=digest)
            settings = optimizer_copies.settings(asked.optimizer, own)
            measuring.keep_states(optimizer_copies.states(asked.optimizer, own))
            return dataclasses.replace(found, settings=settings)
        except CannotCopy as error:
            return dataclasses.replace(found, no_copy=str(error))
        except NotApplicable as error:
            return dataclasses.replace(found, problem=str(error))
        except Exception as error:
            return dataclasses.replace(found, problem=f"measuring failed: {error!r}")

    def references(self, folders: List[Path]) -> str:
        """Measures the step in this process, once for each folder, the last time from weights
        changed by a rounding error. Returns why that is impossible, or ""."""
        problem = next((one.problem for one in self._of_ranks if one.problem), "")
        settings, differ = optimizer_copies.agreed([one.settings for one in self._of_ranks])
        if differ and not problem:
            problem = f"ranks have different settings of the optimizer ({differ})"
        if problem:
            return problem
        no_copy = next((one.no_copy for one in self._of_ranks if one.no_copy), "")
        try:
            hashes = {rank: one.batch for rank, one in enumerate(self._of_ranks)}
            batch = whole_batch.read(self._folder, hashes, self._asked.collate)
            answers = read_measured(self._folder)
            for folder in folders:
                rounding = None
                if folder == folders[-1]:
                    first = read_measured(folders[0])
                    rounding = coarsest_dtype([*answers.values(), *first.values()])
                request = MeasureRequest(str(folder), 1, str(self._folder), rounding)
                with _unchanged_random_state():
                    self._reference(request, batch, settings, no_copy)
        except NotApplicable as error:
            return str(error)
        except Exception as error:  # of the program's functions: it continues without a result
            return f"the reference failed: {error!r}"
        return ""

    def _clips_by_hand(self) -> bool:
        """Whether no function of torch clipped the gradients of the ranks: then the program did it
        itself, before they were measured."""
        steps = [step for one in read_measured(self._folder).values() for step in one.steps]
        return all(step.clips == 0 for step in steps)

    def _reference(
        self, request: MeasureRequest, batch: Any, settings: Settings, no_copy: str
    ) -> None:
        asked = self._asked
        model = asked.reference()
        model.train(asked.model.training)
        own = [piece for piece in pieces(model) if piece.owner is not None]
        if any((piece.where.kind != WHOLE or distributed(piece.owner)) for piece in own):
            raise NotApplicable("reference= must build the model of one process, without wrappers")
        measuring = Measuring(request, Continuing(), Scope(model, 0, 1))
        measuring.install()
        if len({one.batch for one in self._of_ranks}) < len(self._of_ranks):
            measuring.leave_out("whether the ranks that have the same batch should have others")
        try:
            if measuring.problems():
                raise NotApplicable(f"the reference: {measuring.problems()[0]}")
            optimizer = None
            try:
                if not no_copy:
                    optimizer = optimizer_copies.copy(asked.optimizer, settings, own, self._folder)
            except CannotCopy as error:
                no_copy = str(error)
            device = next(model.parameters()).device
            with torch.enable_grad():
                asked.loss(model, whole_batch.moved(batch, device)).backward()
            if optimizer is None:
                measuring.leave_out(f"weights after the step: {no_copy}")
                measuring.gradients_alone()
                return
            if asked.clip is not None and self._clips_by_hand():
                _clip_by_hand([p.grad for p in model.parameters()], asked.clip)
            elif asked.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), asked.clip)
            optimizer.step()
        finally:
            measuring.remove()


def _clip_by_hand(gradients: List[Any], limit: float) -> None:
    """Scales gradients as ``torch.nn.utils.clip_grad_norm_``, which is measured before it acts."""
    own = [one for one in gradients if one is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in own]))
    for one in own:
        one.mul_(min(limit / float(norm + 1e-6), 1.0))


@contextmanager
def _unchanged_random_state() -> Iterator[None]:
    """Restores the random states of this process: the program continues after the comparison."""
    plain, states = random.getstate(), torch.get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    of_device = torch.cuda.get_rng_state() if cuda else None
    try:
        yield
    finally:
        random.setstate(plain)
        torch.set_rng_state(states)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device)
