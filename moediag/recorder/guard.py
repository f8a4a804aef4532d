"""``MOEDIAG_GUARD=1``: checks before each reduction that all ranks reduce the same parameters.

FSDP2 reduces the parameters of a group that have a gradient. If these differ between ranks, the
reduction hangs, aborts, or silently adds gradients of different parameters. Before each reduction
of an FSDP2 group, the guard compares a fingerprint of every rank's parameters over a side channel
(:mod:`side_channel`). A difference raises the same :class:`ReductionMismatch` on all ranks.

It reads only names, sizes and dtypes, never a device. Its wrappers are *under* the recorder's: an
operation that the guard stops is already recorded, and a rank that waits in the guard is recorded
as waiting in that operation. If the guard fails on one rank, all ranks continue without it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from moediag.protocol import ENV_GUARD_TIMEOUT, GUARD_TIMEOUT
from moediag.protocol.names import plain_name
from moediag.recorder import guard_messages
from moediag.recorder.calls import METHODS
from moediag.recorder.core import ByObject, Recorder
from moediag.recorder.side_channel import Absent, Board, Lost, Side, Told

WATCHER = "guard"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_REDUCTIONS = ("reduce_scatter", "all_reduce")
_MISMATCH, _OFF = "mismatch", "off"
_made = 0  # guards in this process so far; each has its own keys in the job's store


class ReductionMismatch(RuntimeError):
    """Ranks reached an FSDP2 reduction with different parameters, or a rank did not reach it. All
    ranks get the same text: each rank's parameters and what to do next."""


def install(recorder: Recorder, timeout: Optional[float] = None) -> Optional[Guard]:
    """Installs the guard; call it before the recorder's other watchers. ``timeout`` is the seconds
    after which a missing rank counts as absent; default: from the environment. Returns None, and
    records this, if torch has no FSDP2 reductions to guard."""
    global _made
    try:
        module = importlib.import_module(_FSDP)
    except ImportError as error:
        recorder.note_not_seen(f"what ranks reduce, before they do: {error}")
        return None
    _made += 1
    guard = Guard(recorder, _timeout() if timeout is None else timeout, _made)
    replace = recorder.patches.replace
    if not replace(module, "foreach_reduce", guard.reducing):
        recorder.note_not_seen("what ranks reduce, before they do: no foreach_reduce in this torch")
        return None
    for name in ("unshard", "wait_for_unshard", "post_backward"):
        replace(module.FSDPParamGroup, name, guard.named)
    for name, shape in METHODS.items():
        if shape.op in _REDUCTIONS:
            replace(dist.ProcessGroup, name, guard.checked(shape.op))
    recorder.on_end.append(guard.report)
    recorder.on_uninstall.append(guard.close)
    return guard


def _timeout() -> float:
    text = os.environ.get(ENV_GUARD_TIMEOUT, "")
    try:
        seconds = float(text) if text else GUARD_TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        print(
            f"moediag guard: {ENV_GUARD_TIMEOUT}={text} is not a positive number of seconds; "
            f"using {GUARD_TIMEOUT:.0f} s",
            file=sys.stderr,
        )
        return GUARD_TIMEOUT
    return seconds


class Brought:
    """The parameters that this rank reduces; ``numbers`` are their fingerprint."""

    __slots__ = ("details", "numbers")

    def __init__(self, module: str, whole: List[str], carried: Sequence[Tuple[str, int, str]]):
        self.details = {"module": module, "whole": whole, "carries": [list(c) for c in carried]}
        texts = (json.dumps([module, whole]), json.dumps(carried))
        self.numbers = [_number(text) for text in texts]


def _number(text: str) -> int:
    """Returns a 64-bit hash that is equal in all processes."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.reducing: Optional[Tuple[Any, Any]] = None  # (FSDPParams, their dtypes)


class Guard:
    """One rank's guard."""

    def __init__(self, recorder: Recorder, timeout: float, number: int) -> None:
        self.checks = 0
        # In all, with the wait for the slowest rank, for which the reduction would wait as well.
        self.seconds = 0.0
        self.longest = 0.0
        self._recorder = recorder
        self._timeout = timeout
        self._prefix = f"moediag-guard/{number}"
        self._off = False
        self._reported = False
        self._thread = _Thread()
        self._board: Optional[Board] = None
        self._sides: Dict[str, Side] = {}  # by group name
        self._last: Dict[str, str] = {}  # group name -> module last reduced on it
        self._known = ByObject()  # FSDPParamGroup -> {ids and dtypes of parameters: Brought}

    # ------------------------------------------------------------------ around FSDP2 and c10d

    def reducing(self, original: Any) -> Callable[..., Any]:
        """Wraps ``foreach_reduce(fsdp_params, gradients, …)``; notes what it is about to reduce."""

        def function(fsdp_params: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._off or not self._recorder.active:
                return original(fsdp_params, gradients, *args, **kwargs)
            thread = self._thread
            thread.reducing = fsdp_params, tuple(gradient.dtype for gradient in gradients)
            try:
                return original(fsdp_params, gradients, *args, **kwargs)
            finally:
                thread.reducing = None

        function.__name__ = getattr(original, "__name__", "foreach_reduce")
        return function

    def checked(self, op: str) -> Callable[[Any], Any]:
        """Wraps the methods of ProcessGroup that FSDP2's reductions call."""

        def make(original: Any) -> Any:
            def method(group: Any, *args: Any, **kwargs: Any) -> Any:
                reducing = self._thread.reducing
                if reducing is not None and not self._off:
                    self._thread.reducing = None  # it may call another checked method
                    try:
                        self._check(group, op, *reducing)
                        return original(group, *args, **kwargs)
                    finally:
                        self._thread.reducing = reducing
                return original(group, *args, **kwargs)

            method.__name__ = method.__qualname__ = getattr(original, "__name__", op)
            method.__doc__ = getattr(original, "__doc__", None)
            return method

        return make

    def named(self, original: Any) -> Callable[..., Any]:
        """Wraps methods of FSDPParamGroup. A rank in another collective loses its peers when they
        raise; this gives its error their reason."""

        def method(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except ReductionMismatch:
                raise
            except RuntimeError as error:
                text = self._notice()
                if text is None:
                    raise
                raise ReductionMismatch(text) from error

        method.__name__ = getattr(original, "__name__", "method")
        return method

    def _notice(self) -> Optional[str]:
        if self._off or not self._recorder.active:
            return None
        try:
            notice = self._on_board().read()
        except Exception:  # the host of the job's store is gone
            return None
        return notice[1] if notice is not None and notice[0] == _MISMATCH else None

    # ------------------------------------------------------------------ one check

    def _check(self, group: Any, op: str, fsdp_params: Any, dtypes: Tuple[Any, ...]) -> None:
        began = time.perf_counter()
        try:
            self._compare(group, op, self._brings(fsdp_params, dtypes))
        except ReductionMismatch:
            self._stop()
            raise
        except Told as told:
            if told.kind == _MISMATCH:
                self._stop()
                raise ReductionMismatch(told.text) from None
            self._leave(f"another rank's guard failed: {told.text}")
        except Lost as error:
            # A lost rank is another failure, which the reduction itself will report.
            self._leave(f"a rank that others wait for has ended: {error}")
        except Exception as error:
            self._recorder.fault(WATCHER, error)
            self._fail(error)
        finally:
            took = time.perf_counter() - began
            self.checks += 1
            self.seconds += took
            self.longest = max(self.longest, took)

    def _compare(self, group: Any, op: str, brought: Brought) -> None:
        name = str(group.group_name)
        side = self._sides.get(name)
        if side is None:
            side = self._sides[name] = self._side(group)
        label = guard_messages.Label(
            op, self._recorder.groups.info(group), self._recorder.current_step
        )
        try:
            rows = side.exchange([*brought.numbers, _REDUCTIONS.index(op)])
            if any(row != rows[0] for row in rows):
                told = side.exchange_texts(json.dumps({**brought.details, "op": op}))
                text = guard_messages.mismatch(label, [json.loads(one) for one in told])
                self._raise(text)
        except Absent as absent:
            last = self._last.get(name, "")
            self._raise(
                guard_messages.absent(label, brought.details, absent.members, self._timeout, last)
            )
        self._last[name] = str(brought.details["module"])

    def _raise(self, text: str) -> None:
        kind, first = self._on_board().put(_MISMATCH, text)
        raise ReductionMismatch(first if kind == _MISMATCH else text)

    def _side(self, group: Any) -> Side:
        # The group's own part of the job's store, where its name is unique.
        store = dist.distributed_c10d._get_process_group_store(group)
        own = dist.PrefixStore(self._prefix, store)
        return Side(own, self._on_board(), group.rank(), group.size(), self._timeout)

    def _on_board(self) -> Board:
        if self._board is None:
            store = dist.distributed_c10d._get_default_store()
            self._board = Board(dist.PrefixStore(self._prefix, store))
        return self._board

    def _brings(self, fsdp_params: Any, dtypes: Tuple[Any, ...]) -> Brought:
        group = self._recorder.thread.fsdp_group
        known = self._known.setdefault(fsdp_params[0] if group is None else group, {})
        key = tuple(map(id, fsdp_params)), dtypes
        brought = known.get(key)
        if brought is None:
            if len(known) > 256:
                known.clear()
            brought = known[key] = _brought(group, fsdp_params, dtypes)
        return brought

    # ------------------------------------------------------------------ the end

    def _fail(self, error: Exception) -> None:
        """Turns the guard off here and tells the other ranks, so that none waits for this one."""
        self._leave(f"the guard failed: {error!r}")
        try:
            self._on_board().put(_OFF, repr(error)[:500])
        except Exception as second:  # the others will find this rank absent
            self._recorder.fault(WATCHER, second)

    def _leave(self, why: str) -> None:
        self._recorder.note_not_seen(f"what ranks reduce, before they do: {why}")
        self._stop()

    def _stop(self) -> None:
        """Turns the guard off permanently: a job that survives a mismatch runs without it."""
        self._off = True
        self.close()

    def close(self) -> None:
        """Closes the side channels; ranks that wait for this one notice. Idempotent."""
        for side in self._sides.values():
            side.close()
        self._sides = {}

    def report(self) -> None:
        """Reports the cost once: a line on stderr and, on rank 0, a note in the log."""
        if self._reported or not self.checks:
            return
        self._reported = True
        rank = self._recorder.rank
        text = guard_messages.cost(rank, self.checks, self.seconds, self.longest)
        print(f"moediag {text}", file=sys.stderr, flush=True)
        if rank == 0:
            self._recorder.event("note", keep=True, text=text)


def _brought(group: Any, fsdp_params: Any, dtypes: Tuple[Any, ...]) -> Brought:
    whole = [_fqn(p) for p in (fsdp_params if group is None else group.fsdp_params)]
    names = [(_fqn(p), _numel(p)) for p in fsdp_params]
    carried = [
        (fqn, numel, str(dtype).replace("torch.", ""))
        for (fqn, numel), dtype in zip(names, dtypes)  # noqa: B905 - Python 3.9
    ]
    module = plain_name(getattr(group, "_module_fqn", None) or "") or guard_messages.common(whole)
    return Brought(module, whole, carried)


def _fqn(parameter: Any) -> str:
    info = parameter._module_info
    return plain_name(getattr(parameter, "_param_fqn", None) or info.param_name)


def _numel(parameter: Any) -> int:
    """The number of elements of the unsharded parameter."""
    size = getattr(parameter, "_orig_size", None)
    return int((parameter.sharded_param.shape if size is None else size).numel())
