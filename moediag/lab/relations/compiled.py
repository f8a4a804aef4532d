"""A compiled model computes what the eager one does."""

from __future__ import annotations

import contextlib
import signal
from typing import Any, Callable, Iterator, Sequence

import torch

from moediag.lab.relations.relation import Case, Relation, Tensors, Undecided, alike, gradients

AOT = "aot_eager"  # traces forward and backward, and runs both without generated code
TRACED = "eager"  # runs the traced forward; autograd computes the backward
SECONDS = 10.0  # of CPU time


class _Late(BaseException):
    """The time is up. No ``except Exception`` of torch takes it for a failed trace."""


class Compiled(Relation):
    name = "compile"
    says = "torch.compile gives the logits, the loss and the gradients of the model as it is"
    route = "the traced forward with autograd's backward agrees with one of the two"

    def ways(self, case: Case) -> Sequence[str]:
        return (AOT,)

    def plain(self, case: Case, way: str) -> Tensors:
        model: Any = case.model(train=True)
        return _computed(case, model, model)

    def other(self, case: Case, way: str) -> Tensors:
        with _limited(SECONDS, f"it was not compiled in {SECONDS:.0f} s of CPU time"):
            return _compiled(case, way)

    def second(self, case: Case, way: str, wrong: Sequence[str]) -> bool:
        third = _compiled(case, TRACED)
        sides = (self.plain(case, way), _compiled(case, way))
        return any(all(alike(side[n], third[n], 1e-5) for n in wrong) for side in sides)


def _compiled(case: Case, backend: str) -> Tensors:
    import torch._dynamo

    torch._dynamo.reset()  # of a model before
    model: Any = case.model(train=True)
    return _computed(case, torch.compile(model, backend=backend), model)


def _computed(case: Case, called: Callable[..., Any], model: torch.nn.Module) -> Tensors:
    tokens = case.tokens()
    found = called(input_ids=tokens, labels=tokens, use_cache=False)
    found.loss.backward()
    return {"logits": found.logits.detach(), "loss": found.loss.detach(), **gradients(model)}


@contextlib.contextmanager
def _limited(seconds: float, why: str) -> Iterator[None]:
    """Ends what runs inside after so much CPU time of this process. Raises Undecided then."""

    def late(number: int, frame: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    except _Late as error:
        raise Undecided(why) from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
