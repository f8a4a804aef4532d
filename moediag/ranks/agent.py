"""Makes torch's elastic agent report how each rank ended, and wait before it ends the others.

Stock agents kill the peers of a dead rank within milliseconds and keep at most one exit status.
This one reports the first failure, waits until the control side has examined the live ranks (or all
are dead), then ends them in short steps and reports each. Reports go to ``launcher.events.jsonl``;
the file ``launcher.release`` lets the agent continue.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Tuple

from moediag import protocol

HOLD = 30.0  # seconds; the control side bounds its capture far below
Graces = Tuple[Tuple[signal.Signals, float], ...]
GRACES: Graces = ((signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0))
# As in a stock agent: a watched job's ranks may save a checkpoint on SIGTERM.
JOB_GRACES: Graces = ((signal.SIGTERM, 30.0), (signal.SIGKILL, 5.0))


class Observer:
    """Follows the workers of one agent. It reads statuses without reaping them (WNOWAIT); the agent
    does that."""

    def __init__(self, folder: Path, graces: Graces = GRACES) -> None:
        self._graces = graces
        self._events = folder / protocol.AGENT_EVENTS
        self._release = folder / protocol.RELEASE_FILE
        self._ended: Dict[int, int] = {}  # rank -> code, negative: signal
        self._sent: Dict[int, int] = {}  # rank -> last signal sent by the observer
        self._held = False
        self._died: Dict[int, float] = {}  # rank -> epoch seconds, set by the watching thread
        self._watching = False

    def watch(self, pids: Dict[int, int]) -> None:
        """Records when each rank ends, to the millisecond: polling is too slow to distinguish a
        killed rank from a peer that failed because of it. Uses a thread, started after the fork."""
        if self._watching or not hasattr(os, "pidfd_open"):
            return
        self._watching = True
        thread = threading.Thread(target=self._wait, args=(pids,), name="moediag-deaths")
        thread.daemon = True
        thread.start()

    def _wait(self, pids: Dict[int, int]) -> None:
        poll, ranks = select.poll(), {}
        for rank, pid in pids.items():
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(pid)  # Linux 5.3, Python 3.9
                ranks[fd] = rank
                poll.register(fd, select.POLLIN)
        while ranks:
            for fd, _ in poll.poll():
                self._died[ranks.pop(fd)] = time.time()
                poll.unregister(fd)
                os.close(fd)

    def report(self, kind: str, **values: Any) -> None:
        line = json.dumps({"e": kind, **values}) + "\n"
        with self._events.open("a", encoding="utf-8") as file:
            file.write(line)

    def look(self, pids: Dict[int, int]) -> bool:
        """Reports ranks that ended since the last call; returns whether any has failed so far."""
        for rank, pid in pids.items():
            if rank in self._ended:
                continue
            code = peek(pid)
            if code is not None:
                self._report_exit(rank, code)
        return any(code != 0 for code in self._ended.values())

    def _report_exit(self, rank: int, code: int) -> None:
        self._ended[rank] = code
        name = signal_name(-code) if code < 0 else None
        by_us = code < 0 and self._sent.get(rank) == -code
        at = self._died.get(rank, time.time())
        code_only = None if name else code
        self.report("exit", t=at, rank=rank, code=code_only, signal=name, by_us=by_us)

    def hold(self, pids: Dict[int, int]) -> None:
        """Waits for the release file or until all ranks ended, then ends the remaining ones."""
        if self._held:
            return
        self._held = True
        deadline = time.monotonic() + HOLD
        while not self._all_ended(pids) and not self._release.exists():
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
            self.look(pids)
        for sig, grace in self._graces:
            self._send(pids, sig)
            deadline = time.monotonic() + grace
            while not self._all_ended(pids) and time.monotonic() < deadline:
                time.sleep(0.01)
                self.look(pids)

    def reaped(self, codes: Mapping[int, int]) -> None:
        """Reports ranks that the agent reaped before `look` saw them. ``codes``: by rank, as
        :func:`peek` returns them."""
        for rank, code in codes.items():
            if rank not in self._ended:
                self._report_exit(rank, code)

    def _all_ended(self, pids: Dict[int, int]) -> bool:
        return len(self._ended) == len(pids)

    def _send(self, pids: Dict[int, int], sig: signal.Signals) -> None:
        for rank, pid in pids.items():
            if rank in self._ended or not is_child(pid):
                continue
            self._sent[rank] = sig
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # torchrun gives every rank its own session: end its children with it.
                if os.getpgid(pid) == pid:
                    os.killpg(pid, sig)
                else:
                    os.kill(pid, sig)


def is_child(pid: int) -> bool:
    """Whether ``pid`` is a child of this process, running or not yet reaped. After reaping, another
    process may have its pid."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def peek(pid: int) -> Optional[int]:
    """Returns the exit code of the child ``pid`` (negative: a signal); None while it runs or if it
    was already reaped."""
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if info is None or info.si_pid == 0:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def observe(
    folder: Path, started: Callable[[], object] = lambda: None, of_job: bool = False
) -> Observer:
    """Makes the elastic agent of this process report to ``folder``. ``started``: called once all
    workers are started. ``of_job``: the agent of a watched job, which may start its ranks several
    times, each time into a new folder below ``folder``, and which must continue if the observer
    fails.

    Wraps ``_start_workers`` and ``_monitor_workers`` (the same from torch 1.9 to 2.13). If they are
    missing, the agent runs unchanged and the file says so.
    """
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    seat = _Seat(folder, of_job)
    start = getattr(LocalElasticAgent, "_start_workers", None)
    look = getattr(LocalElasticAgent, "_monitor_workers", None)
    if start is None or look is None:
        text = "exit status of every rank (this torch's elastic agent cannot be observed)"
        seat.observer.report("not_seen", text=text)
        started()
        return seat.observer

    @functools.wraps(start)
    def start_all(self: Any, worker_group: Any) -> Any:
        with seat.harmless():
            seat.next()
            seat.meet(getattr(worker_group, "store", None))
        by_local_rank = start(self, worker_group)
        started()
        with seat.harmless():
            ranks = {w.local_rank: w.global_rank for w in worker_group.workers}
            seat.observer.watch({ranks[local]: pid for local, pid in by_local_rank.items()})
        return by_local_rank

    @functools.wraps(look)
    def monitored(self: Any, worker_group: Any) -> Any:
        pids = {w.global_rank: w.id for w in worker_group.workers}
        with seat.harmless():
            if seat.observer.look(pids):
                seat.observer.hold(pids)
        result = look(self, worker_group)
        with seat.harmless():
            if getattr(result.state, "name", "") == "SUCCEEDED":
                seat.observer.reaped(dict.fromkeys(pids, 0))
            seat.observer.reaped({rank: f.exitcode for rank, f in result.failures.items()})
        return result

    # By setattr: mypy refuses to assign methods.
    setattr(LocalElasticAgent, "_start_workers", start_all)  # noqa: B010
    setattr(LocalElasticAgent, "_monitor_workers", monitored)  # noqa: B010
    return seat.observer


class _Seat:
    """Holds the observer of the most recently started ranks."""

    def __init__(self, folder: Path, of_job: bool) -> None:
        self._folder = folder
        self._of_job = of_job
        self._attempt = -1
        self._silenced = False
        self.observer = Observer(folder, JOB_GRACES if of_job else GRACES)

    def next(self) -> None:
        """Prepares for a start of the ranks, which may be a restart."""
        if not self._of_job:
            return
        self._attempt += 1
        os.environ[protocol.ENV_ATTEMPT] = str(self._attempt)  # the ranks inherit it
        folder = self._folder / protocol.attempt_folder(self._attempt)
        folder.mkdir(parents=True, exist_ok=True)
        self.observer = Observer(folder, JOB_GRACES)
        self.observer.report("agent", pid=os.getpid())

    def meet(self, store: Any) -> None:
        """Sets the token of this start, which the ranks inherit. ``store``: where the agents of all
        nodes have just met; new for each start."""
        os.environ.pop(protocol.ENV_JOB, None)
        if self._of_job and store is not None:
            from moediag.ranks import job_token

            os.environ[protocol.ENV_JOB] = job_token.token(store)

    @contextlib.contextmanager
    def harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # torchrun turns SIGTERM into an exception, which must not be suppressed here.
            if not self._of_job or type(error).__name__ == "SignalException":
                raise
            if not self._silenced:
                self._silenced = True
                with contextlib.suppress(Exception):
                    text = f"exit status of every rank (the agent's observer failed: {error!r})"
                    self.observer.report("not_seen", text=text)
