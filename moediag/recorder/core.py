"""The recorder of one rank. Every watcher writes through it, and no recorder error reaches the job.

Watchers (collectives, FSDP, modules, gradients) call :meth:`Recorder.before` and
:meth:`Recorder.done` around an operation, or :meth:`Recorder.event`, inside ``try``: an error
becomes one ``not_seen`` event and the job's call continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from moediag.masking import masked
from moediag.protocol import error_text
from moediag.recorder.call_site import CallSites
from moediag.recorder.calls import Call
from moediag.recorder.groups import GroupInfo, Groups
from moediag.recorder.heartbeat import HeartbeatWriter
from moediag.recorder.log import EventLog, now
from moediag.recorder.patches import Patches
from moediag.recorder.step.hooks import StepHooks
from moediag.recorder.user_lines import UserLines

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parent) + os.sep
_NO_NAMES = ("null", "null", "null")
_MAX_REPEATED = 4096  # calls with different fields
_MAX_FAILED = 500  # characters of the message of a failed operation
_MAX_FAULTS = 20  # after which a watcher is switched off


class Block:
    """An observed module while its forward runs."""

    __slots__ = ("experts", "fqn", "recompute", "routed")

    def __init__(self, fqn: str, experts: Tuple[int, ...], recompute: bool) -> None:
        self.fqn = fqn
        self.experts = experts  # possible sizes of a top-k over experts; empty: not a MoE block
        self.recompute = recompute
        self.routed: Optional[Tuple[Any, int]] = None  # indices and size of its last top-k


class CarriedParameters(NamedTuple):
    """The FSDP group whose collective is being issued: interned names (JSON) and sizes."""

    module: str
    phase: str
    carries: str
    of: str
    sizes: str


class ByObject:
    """Maps objects to values by identity. Python reuses the id of a deleted object (a discarded
    model), so each entry also holds a weak reference to its object."""

    def __init__(self) -> None:
        self._known: Dict[int, Tuple[Any, Any]] = {}  # id -> weak reference, value
        self._most = 64  # entries, before those of deleted objects are dropped

    def owners(self) -> List[Any]:
        """Returns the objects that still exist."""
        alive = [reference() for reference, _ in list(self._known.values())]
        return [owner for owner in alive if owner is not None]

    def get(self, owner: Any) -> Any:
        """Returns the value for ``owner``, or None."""
        found = self._known.get(id(owner))
        return found[1] if found is not None and found[0]() is owner else None

    def set(self, owner: Any, value: Any) -> Any:
        """Stores and returns ``value``. Raises TypeError if ``owner`` allows no weak reference."""
        if len(self._known) > self._most:
            self._known = {k: v for k, v in self._known.items() if v[0]() is not None}
            self._most = 64 + 2 * len(self._known)
        self._known[id(owner)] = weakref.ref(owner), value
        return value

    def setdefault(self, owner: Any, value: Any) -> Any:
        found = self.get(owner)
        return self.set(owner, value) if found is None else found


class ThreadState(threading.local):
    """State of one thread: on an accelerator, autograd runs the backward in another thread."""

    def __init__(self) -> None:
        self.inside = False  # in a recorded call; nested calls belong to the same operation
        self.blocks: List[Block] = []
        self.carried: Optional[CarriedParameters] = None
        self.coalescing: Optional[List[int]] = None
        self.fsdp_group: Any = None  # the FSDPParamGroup whose method is running


class Recorder:
    """Records one rank; see :func:`moediag.recorder.install`. ``active`` is False after
    :meth:`uninstall` and in processes forked from the rank (data loader workers)."""

    def __init__(self, log: EventLog, heartbeat: HeartbeatWriter, rank: int) -> None:
        self.log = log
        self.heartbeat = heartbeat
        self.rank = rank
        self.active = True
        self._finished = False
        self.patches = Patches()
        self.hooks = StepHooks(self.patches)
        self.groups = Groups(log)
        self.thread = ThreadState()
        self.current_step = 0
        self.counts_steps = True  # until step() is called
        self.optimizer_running = False
        self.stepped = False  # the optimizer stepped since the last forward
        self.deferred_tokens: Any = None  # set by the watcher of experts
        self.roots: List[Tuple[str, Any]] = []  # weak references to observed root modules
        self.module_names = ByObject()  # module -> FQN, of observed roots
        self.models = ByObject()  # model that was seen running, with its wrapper -> True
        # Called with such a model, args and kwargs when it begins a forward that trains.
        self.on_forward: List[Callable[[Any, Any, Any], None]] = []
        self.fsdp1_handles: Callable[[], List[Tuple[Any, Any]]] = list  # seen (state, handle)
        self.fsdp2_groups: Callable[[], List[Any]] = list  # seen groups of parameters
        self.captures: Any = None  # of CUDA graphs, set by the watcher of collectives
        # Of data loaders: a pass begins (loader, iterator); an iterator gave a batch or ended (with
        # the frame that asked for it).
        self.on_pass: List[Callable[[Any, Any], None]] = []
        self.on_batch: List[Callable[[Any, Any, Any], None]] = []
        self.on_pass_end: List[Callable[[Any, Any], None]] = []
        # Called with each call and its group, before it is issued.
        self.on_call: List[Callable[[Call, GroupInfo], None]] = []
        self.on_flush: List[Callable[[], None]] = []  # write deferred events
        # Called repeatedly by the recorder's thread while the rank issues nothing.
        self.on_stop: List[Callable[[], None]] = []
        self.on_capture: List[Callable[[], None]] = []  # the rank is examined; in that thread
        self.on_end: List[Callable[[], None]] = []  # the rank ends normally or not; may run twice
        self.on_error: List[Callable[[], None]] = []  # it ends by an exception; before the above
        self.on_finish: List[Callable[[], None]] = []  # it ends normally; before the above
        # Looks for models that run, after the first step.
        self.look_for_models: Callable[[], None] = lambda: None
        # Notes a law that the program breaks on purpose; None where laws are not recorded.
        self.allow: Optional[Callable[[str], None]] = None
        self.on_uninstall: List[Callable[[], None]] = []
        self.after_uninstall: List[Callable[[], None]] = []  # after all attributes are restored
        self._next = 0
        self.faults: Dict[str, int] = {}  # watcher -> how often it failed
        self._told: Dict[str, bool] = {}
        self.user_lines = UserLines(log)
        self._sites = CallSites(log, self.user_lines)
        self._repeated: Dict[Any, str] = {}
        self._quotes: Dict[str, str] = {}

    # ------------------------------------------------------------------ for the job or worker

    def step(self, number: int) -> None:
        """Begins step ``number`` (from 1). If this is never called, optimizer steps count."""
        self.counts_steps = False
        self.set_step(number)
        self.event("phase", name=f"step {number}", step=number)

    def phase(self, text: str) -> None:
        """Records what the rank is about to do, as text for people."""
        self.event("phase", name=text, step=self.current_step)

    def finding(self, what: str, text: str, **details: Any) -> None:
        """Records an error found before it has an effect. The event is in the file before the error
        can end the rank, and is kept when the log rotates. ``details`` are JSON values."""
        self.event(
            "finding", keep=True, what=what, text=text, step=self.current_step, details=details
        )

    def decision(self, what: str, value: Any) -> None:
        """Records a branch that this rank takes; see :func:`moediag.recorder.decision`."""
        self.event("decision", what=what, value=value, step=self.current_step)

    def note_not_seen(self, text: str) -> None:
        """Records, once per text, what the recorder cannot observe in this rank."""
        if self.active and text not in self._told:
            self._told[text] = True
            # Without a beat: a capture that looks whether the rank moves can write this itself.
            self.log.event("not_seen", text=text)

    def error(self, exception: BaseException, where: str = "") -> None:
        """Records the exception that ends the rank. ``where``: by default, the innermost frame
        outside torch."""
        self._tell(self.on_error + self.on_end)
        frames = traceback.extract_tb(exception.__traceback__)
        own = [f for f in frames if not f.filename.startswith((_TORCH, _OWN))] or list(frames)
        if own and not where:
            where = f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}"
        name = type(exception).__name__
        self.event("error", type=name, message=error_text(exception), where=where)

    def finish(self) -> None:
        """Records that the rank finished normally."""
        if self.active:
            self.flush()
            self._tell(self.on_finish)
            self._tell(self.on_end)
            self.event("end")
            self.heartbeat.finish()
            self._finished = True

    def leaves(self, how: str, frame: Any) -> None:
        """Records that the program ends this process: ``os._exit(0)`` in ``frame``; nothing after
        the record's normal end."""
        if self.active and not self._finished:
            self.flush()
            self.log.line(f'{{"e":"leaves","t":{now()},"how":"{how}",{self._sites.fields(frame)}}}')

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends recording, for example while the rank computes a reference."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def uninstall(self) -> None:
        """Restores every replaced attribute and hook and closes the log. Safe to call twice."""
        if not self.active:
            return
        self.flush()
        self._tell(self.on_end)
        self.active = False
        for undo in (*reversed(self.on_uninstall), self.hooks.remove, *self.after_uninstall):
            try:
                undo()
            except Exception as error:
                print(f"moediag recorder: uninstall: {error!r}", file=sys.stderr)
        self.log.close()
        self.heartbeat.close()

    def _tell(self, those: List[Callable[[], None]]) -> None:
        if self.active:
            self._each(those, "end")

    # ------------------------------------------------------------------ for the watchers

    def set_step(self, number: int) -> None:
        self.current_step = self.heartbeat.step = number

    @property
    def issued(self) -> int:
        """The number of recorded calls so far."""
        return self._next

    def event(self, kind: str, keep: bool = False, **fields: Any) -> None:
        if self.active:
            self.log.event(kind, keep, **fields)
            self.heartbeat.beat()

    def fault(self, watcher: str, error: BaseException) -> None:
        """Counts the failures of a watcher and records the first; see :meth:`broken`."""
        count = self.faults[watcher] = self.faults.get(watcher, 0) + 1
        if count == 1:
            at = traceback.extract_tb(error.__traceback__)[-1:]
            where = f" ({Path(at[0].filename).name}:{at[0].lineno})" if at else ""
            # A failure while recording a failure cannot be recorded.
            with contextlib.suppress(Exception):
                self.note_not_seen(f"{watcher}: the recorder failed: {error!r}{where}")

    def broken(self, watcher: str) -> bool:
        """Whether ``watcher`` is switched off because it failed too often."""
        return self.faults.get(watcher, 0) >= _MAX_FAULTS

    def flush(self) -> None:
        self._each(self.on_flush, "flush")

    def stopped(self) -> None:
        """Reads the state of the devices without the rank's own threads."""
        if self.active and not self.broken("device"):
            self._each(self.on_stop, "device")

    def captured(self) -> None:
        """Writes what the rank is doing now; its own threads may be stuck."""
        if self.active:
            self._each(self.on_capture, "capture")

    def _each(self, those: List[Callable[[], None]], watcher: str) -> None:
        for act in those:
            try:
                act()
            except Exception as error:
                self.fault(watcher, error)

    def carrying(
        self, watcher: str, describe: Callable[..., Optional[CarriedParameters]]
    ) -> Callable[[Any], Any]:
        """Wraps a function that issues collectives: they carry what ``describe`` returns for its
        arguments; None: as before."""

        def make(original: Any) -> Any:
            def function(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling() or not self.active:
                    return original(*args, **kwargs)
                thread = self.thread
                held = thread.carried
                try:
                    thread.carried = describe(*args, **kwargs) or held
                except Exception as error:
                    self.fault(watcher, error)
                try:
                    return original(*args, **kwargs)
                finally:
                    thread.carried = held

            function.__name__ = getattr(original, "__name__", "function")
            return function

        return make

    def before(self, call: Call, group: Any) -> int:
        """Writes the ``collective`` event of ``call`` on ``group``; returns its index. The caller
        enters the call in the heartbeat, which counts the event."""
        info = self.groups.info(group)
        thread = self.thread
        carried = thread.carried
        if thread.blocks and thread.blocks[-1].routed is not None:
            self.flush()  # write the tokens first: this operation may never return
        if carried is not None:
            module, phase = carried.module, carried.phase
            names = carried.carries, carried.of, carried.sizes
        else:
            module = self._quoted(thread.blocks[-1].fqn) if thread.blocks else '""'
            phase, names = self.current_phase(), _NO_NAMES
        fields = self._fields(call, info, phase, module, names)
        site = self._sites.fields(sys._getframe(1))
        log = self.log
        with log.lock:
            number, self._next = self._next, self._next + 1
            position, info.issued = info.issued, info.issued + 1
            log.line(
                f'{{"e":"collective","t":{now()},"n":{number},"group":{info.json_name},'
                f'"k":{position},{fields},{site},"step":{self.current_step}}}'
            )
        if thread.coalescing is not None:
            thread.coalescing.append(number)
        for tell in self.on_call:
            tell(call, info)
        return number

    def _fields(
        self, call: Call, info: GroupInfo, phase: str, module: str, names: Tuple[str, str, str]
    ) -> str:
        """Returns the JSON fields of a call that are the same each time it is repeated."""
        if call.splits_in is not None or call.members is not None:
            return _fields(call, info, phase, module, names)
        key = call[:4], call.peer, call.tag, call.reduce, call.waits, info, phase, module, names
        text = self._repeated.get(key)
        if text is None:
            if len(self._repeated) > _MAX_REPEATED:
                self._repeated.clear()
            text = self._repeated[key] = _fields(call, info, phase, module, names)
        return text

    def _quoted(self, fqn: str) -> str:
        text = self._quotes.get(fqn)
        if text is None:
            text = self._quotes[fqn] = json.dumps(fqn)
        return text

    def done(self, number: int) -> None:
        """Records that operation ``number`` was waited for and completed."""
        self.log.line(f'{{"e":"done","t":{now()},"n":{number}}}')
        self.heartbeat.beat()

    def failed(self, number: int, error: BaseException) -> None:
        """Records that operation ``number`` raised ``error``. Never raises: the caller is about to
        let ``error`` through to the program."""
        with contextlib.suppress(Exception):
            text = masked(" ".join(str(error).split()))[:_MAX_FAILED]
            self.event("failed", n=number, type=type(error).__name__, message=text)

    def phase_of(self, training_state: Any) -> str:
        """The phase that the state of an FSDP unit shows; without one this thread's."""
        name = getattr(training_state, "name", "")
        if "BACKWARD" in name:
            return "backward"
        if name != "FORWARD":
            return self.current_phase()
        return "recompute" if torch._C._current_graph_task_id() != -1 else "forward"

    def current_phase(self) -> str:
        """This thread's phase: forward, backward, recompute, optimizer or other."""
        in_backward = torch._C._current_graph_task_id() != -1
        blocks = self.thread.blocks
        if in_backward:
            return "recompute" if blocks and blocks[-1].recompute else "backward"
        if blocks:
            return "forward"
        return "optimizer" if self.optimizer_running else "other"


def _fields(
    call: Call, info: GroupInfo, phase: str, module: str, names: Tuple[str, str, str]
) -> str:
    carries, of, sizes = names
    return (
        f'"op":"{call.op}","numel_in":{call.numel_in},"numel_out":{call.numel_out},'
        f'"dtype":"{call.dtype}",{_details(call, info)},"phase":"{phase}","module":{module},'
        f'"carries":{carries},"of":{of},"sizes":{sizes},'
        f'"async":{"false" if call.waits else "true"}'
    )


def _details(call: Call, info: GroupInfo) -> str:
    """Returns the JSON fields of splits, peer (its global rank) and reduction."""
    peer: Optional[int] = call.peer
    if peer is not None and 0 <= peer < len(info.ranks):
        peer = info.ranks[peer]
    reduce = "null" if call.reduce is None else f'"{call.reduce}"'
    rare = f',"tag":{call.tag}' if call.tag else ""
    rare += f',"members":{_list(call.members)}' if call.members is not None else ""
    return (
        f'"splits_in":{_list(call.splits_in)},"splits_out":{_list(call.splits_out)},'
        f'"peer":{"null" if peer is None else peer},"reduce":{reduce}{rare}'
    )


def _list(values: Optional[List[int]]) -> str:
    return "null" if values is None else "[" + ",".join(map(str, values)) + "]"
