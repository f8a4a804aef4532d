"""Records every collective and point-to-point call of this process, at two places.

Calls from Python reach a method of the pybind class ``ProcessGroup``, whatever name was imported;
those methods are replaced. Calls from C++ (DDP's reducer, the functional collectives that DTensor
and compiled code use) reach an operator ``c10d::*``. A kernel at the dispatch key BackendSelect
records them and redispatches: every call passes that key, and no torch kernel of these operators
uses it.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from moediag.recorder.calls import METHODS, OPERATORS, REDUCES, Shape, describe, making
from moediag.recorder.capturing import Captures
from moediag.recorder.completion import Completion
from moediag.recorder.core import Recorder
from moediag.recorder.groups import Makers
from moediag.recorder.native_wait import DeviceWait, NativeWait

WATCHER = "collectives"
_ScriptObject = torch.ScriptObject


def install(recorder: Recorder) -> None:
    """Replaces the methods of ProcessGroup and Work and hooks the c10d operators."""
    captures = Captures()
    captures.install(recorder.patches)
    recorder.captures = captures
    completion = Completion(recorder, captures)
    recorder.on_flush.append(completion.poll)
    device = DeviceWait(recorder.heartbeat, captures)
    waits = NativeWait(recorder.heartbeat, completion, device=device.look)
    recorder.on_stop += [completion.look, waits.look]
    recorder.on_finish.append(completion.settle)
    for name, shape in METHODS.items():
        recorder.patches.replace(dist.ProcessGroup, name, _method(recorder, completion, shape))
    recorder.patches.replace(dist.ProcessGroup, "_start_coalescing", _start(recorder))
    recorder.patches.replace(dist.ProcessGroup, "_end_coalescing", _end(recorder, completion))
    recorder.patches.replace(dist.Work, "wait", _wait(recorder, completion))
    # What new_group, new_subgroups, device meshes and others call.
    recorder.patches.replace(dist.distributed_c10d, "_new_group_with_tag", _making(recorder))
    _install_operators(recorder, completion)


def _method(recorder: Recorder, completion: Completion, shape: Shape) -> Callable[[Any], Any]:
    blocking = shape.op == "barrier"

    def make(original: Any) -> Any:
        name = getattr(original, "__name__", shape.op)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            thread = recorder.thread
            if thread.inside or not recorder.active or recorder.broken(WATCHER):
                return original(self, *args, **kwargs)
            number, call = _record(recorder, completion, shape, self, args, kwargs)
            if number < 0:
                return original(self, *args, **kwargs)
            thread.inside = True
            held = recorder.heartbeat.enter(number, 1)
            try:
                work = original(self, *args, **kwargs)
            except Exception as error:
                recorder.failed(number, error)
                raise
            finally:
                thread.inside = False
                recorder.heartbeat.leave(held)
            try:
                if work is not None:
                    completion.expect(work, (number,), call.device)
                elif blocking:
                    recorder.done(number)
            except Exception as error:
                recorder.fault(WATCHER, error)
            return work

        method.__name__ = method.__qualname__ = name
        method.__doc__ = getattr(original, "__doc__", None)
        return method

    return make


def _record(
    recorder: Recorder,
    completion: Completion,
    shape: Shape,
    group: Any,
    args: Tuple[Any, ...],
    kwargs: Dict[str, Any],
    python: bool = True,
) -> Tuple[int, Any]:
    """Describes and writes the call; returns index -1 if there is nothing to record. ``python``:
    Python issued it. A call from C++ is never awaited by its caller."""
    try:
        call = describe(shape, args, kwargs, None if python else False)
        if call.fake:
            return -1, call
        if call.waits is None:
            call = call._replace(waits=_caller_waits())
        completion.poll()
        return recorder.before(call, group), call
    except Exception as error:
        recorder.fault(WATCHER, error)
        return -1, None


def _caller_waits() -> bool:
    """Whether the caller waits, for torch before ``opts.asyncOp`` (2.8): read from a local variable
    of the torch.distributed function."""
    frame = sys._getframe(3)
    if frame.f_code.co_filename.endswith("distributed_c10d.py"):
        return not frame.f_locals.get("async_op", True)
    return False


def _making(recorder: Recorder) -> Callable[[Any], Any]:
    """Records what makes process groups. All ranks must do so in one order, members or not, and
    members wait for each other."""

    def make(original: Any) -> Any:
        def _new_group_with_tag(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            thread = recorder.thread
            if thread.inside or not recorder.active or recorder.broken(WATCHER):
                return original(ranks, *args, **kwargs)
            number = -1
            try:
                everyone = list(range(dist.get_world_size()))
                members = everyone if ranks is None else sorted(map(int, ranks))
                local = bool(kwargs.get("use_local_synchronization"))
                if not local or dist.get_rank() in members:
                    number = recorder.before(
                        making(members), Makers(members if local else everyone)
                    )
            except Exception as error:
                recorder.fault(WATCHER, error)
            if number < 0:
                return original(ranks, *args, **kwargs)
            thread.inside = True
            held = recorder.heartbeat.enter(number, 1)
            try:
                group = original(ranks, *args, **kwargs)
            except Exception as error:
                recorder.failed(number, error)
                raise
            finally:
                thread.inside = False
                recorder.heartbeat.leave(held)
            recorder.done(number)
            return group

        return _new_group_with_tag

    return make


def _start(recorder: Recorder) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def _start_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.active:
                recorder.thread.coalescing = []
            return original(self, *args, **kwargs)

        return _start_coalescing

    return make


def _end(recorder: Recorder, completion: Completion) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def _end_coalescing(self: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(self, *args, **kwargs)
            numbers, recorder.thread.coalescing = recorder.thread.coalescing, None
            try:
                if recorder.active and numbers and work is not None:
                    completion.expect(work, tuple(numbers), True)
            except Exception as error:
                recorder.fault(WATCHER, error)
            return work

        return _end_coalescing

    return make


def _wait(recorder: Recorder, completion: Completion) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.active:
                return original(self, *args, **kwargs)
            expected = completion.of_work(self)
            if expected is None:
                return original(self, *args, **kwargs)
            held = recorder.heartbeat.enter(expected.numbers[0])
            try:
                result = original(self, *args, **kwargs)
            except Exception as error:
                completion.failed(self, expected, error)
                raise
            finally:
                recorder.heartbeat.leave(held)
            try:
                completion.waited(self, expected)
            except Exception as error:
                recorder.fault(WATCHER, error)
            return result

        wait.__doc__ = getattr(original, "__doc__", None)
        return wait

    return make


# ---------------------------------------------------------------------------- calls from C++


def _install_operators(recorder: Recorder, completion: Completion) -> None:
    key = torch._C.DispatchKey.BackendSelect
    below = torch._C._dispatch_keyset_full_after(key)
    missing: List[str] = []
    library = torch.library.Library("c10d", "IMPL")
    for name, shape in OPERATORS.items():
        operator = getattr(getattr(torch.ops.c10d, name, None), "default", None)
        if operator is None:
            continue
        try:
            at = _index_of_group(operator)
            kernel = _kernel(recorder, completion, shape, operator, below, at)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
        except (RuntimeError, TypeError, StopIteration) as error:
            missing.append(f"{name} ({error})")
    functional = torch.library.Library("_c10d_functional", "IMPL")
    try:
        operator = torch.ops._c10d_functional.wait_tensor.default
        kernel = _wait_tensor(recorder, completion, operator, below)
        functional.impl("wait_tensor", kernel, "BackendSelect", with_keyset=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        missing.append(f"wait_tensor ({error})")
    recorder.on_uninstall += [library._destroy, functional._destroy]
    if missing:
        recorder.note_not_seen(
            "collectives issued from C++ (DDP, functional collectives): " + ", ".join(missing)
        )


def _kernel(
    recorder: Recorder, completion: Completion, shape: Shape, operator: Any, below: Any, at: int
) -> Any:
    heartbeat = recorder.heartbeat

    def kernel(keyset: Any, *args: Any) -> Any:
        thread = recorder.thread
        if thread.inside or not recorder.active or recorder.broken(WATCHER):
            return operator.redispatch(keyset & below, *args)
        number, call = _record_operator(recorder, completion, shape, args, at)
        if number < 0:
            return operator.redispatch(keyset & below, *args)
        thread.inside = True
        held = heartbeat.enter(number, 1)
        try:
            result = operator.redispatch(keyset & below, *args)
        finally:
            thread.inside = False
            heartbeat.leave(held)
        try:
            work = result[-1] if isinstance(result, (tuple, list)) else result
            completion.expect_native(work, number, call)
        except Exception as error:
            recorder.fault(WATCHER, error)
        return result

    return kernel


def _index_of_group(operator: Any) -> int:
    """Returns which argument of a c10d operator is the process group."""
    types = [str(argument.type) for argument in operator._schema.arguments]
    return next(i for i, name in enumerate(types) if name.endswith("ProcessGroup"))


def _record_operator(
    recorder: Recorder, completion: Completion, shape: Shape, args: Tuple[Any, ...], at: int
) -> Tuple[int, Any]:
    try:
        group: Optional[Any]
        try:
            group = dist.ProcessGroup.unbox(args[at])
        except (AttributeError, RuntimeError):
            group = recorder.groups.only()
        if group is None:
            recorder.note_not_seen("collectives issued from C++: their process group")
            return -1, None
    except Exception as error:
        recorder.fault(WATCHER, error)
        return -1, None
    plain = args[:at] + args[at + 1 :]
    if shape.op in REDUCES:
        plain = tuple(map(_unboxed, plain))
    return _record(recorder, completion, shape, group, plain, {}, python=False)


def _unboxed(argument: Any) -> Any:
    """Unboxes the reduction of an operator's call; torch before 2.15 cannot."""
    if isinstance(argument, _ScriptObject) and hasattr(dist.ReduceOp, "unbox"):
        return dist.ReduceOp.unbox(argument)
    return argument


def _wait_tensor(recorder: Recorder, completion: Completion, operator: Any, below: Any) -> Any:
    def kernel(keyset: Any, tensor: Any) -> Any:
        number = completion.of_tensor(tensor) if recorder.active else None
        if number is None:
            return operator.redispatch(keyset & below, tensor)
        held = recorder.heartbeat.enter(number)
        try:
            result = operator.redispatch(keyset & below, tensor)
        finally:
            recorder.heartbeat.leave(held)
        try:
            completion.tensor_waited(number)
        except Exception as error:
            recorder.fault(WATCHER, error)
        return result

    return kernel
