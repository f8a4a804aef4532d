"""The fork launcher's host: one process per stack that imports torch and transformers once.

``python -m moediag.lab.ranks.host``. Requests are JSON lines on standard input, reports
JSON lines on the original standard output. Each end detects the other's death by the end of the
pipe. For each request it forks a trial process in its own session, which runs torch's elastic agent
with forked ranks (or, for a reference, is the single rank itself). The host never creates a process
group, so gloo is fork-safe in the ranks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

from moediag import protocol
from moediag.ranks import agent, entry, parent

# What to import before forking: "module:function" with one argument, a list of model families.
ENV_WARM = "MOEDIAG_WARM"
DEFAULT_WARM = "moediag.lab.ranks.warm:warm"
MONITOR_INTERVAL = 0.05  # seconds between two polls of the workers by the elastic agent


class Host:
    """``out``: file descriptor for reports."""

    def __init__(self, out: int) -> None:
        self._out = out
        self._control = os.getppid()
        self._warmed: Set[str] = set()
        self._trials: Dict[int, Dict[str, Any]] = {}  # pid -> request
        self._wake, self._wake_in = os.pipe()

    def report(self, kind: str, **values: Any) -> None:
        line = json.dumps({"e": kind, **values}) + "\n"
        try:
            os.write(self._out, line.encode())
        except OSError:
            self.leave()

    def leave(self) -> None:
        """Ends every trial and this process, because the control side has ended."""
        for pid in self._trials:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        os._exit(1)

    def warm(self, families: Sequence[str]) -> None:
        """Imports what the ranks will need. A failure is only logged: the rank that needs the
        missing part fails too and reports it with its trial."""
        new = [f for f in families if f not in self._warmed]
        if not new and self._warmed:
            return
        self._warmed.update(new or [""])
        try:
            entry.find(os.environ.get(ENV_WARM, DEFAULT_WARM))(new)
        except Exception:
            traceback.print_exc()

    def serve(self, families: Sequence[str]) -> None:
        """Serves requests until the control side closes the pipe."""
        self._watch_parent()
        begun = time.monotonic()
        gc.disable()  # imports keep what they make: looking for garbage takes a quarter of the time
        self.warm(families)
        import torch

        torch.set_num_threads(1)
        # A rank's garbage collector would visit, and so copy, every object that the imports made.
        gc.freeze()
        gc.enable()
        self.report("ready", seconds=time.monotonic() - begun, torch=torch.__version__)
        self._listen()

    def _watch_parent(self) -> None:
        """Polls the parent, because the pipe is not read during the imports."""

        def check(*_: object) -> None:
            if os.getppid() != self._control:
                self.leave()

        if os.environ.get(protocol.ENV_MAIN_THREAD) == "1":
            parent.die_with_parent(self._control)
        signal.signal(signal.SIGALRM, check)
        signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)

    def _listen(self) -> None:
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)
        pending = b""
        while True:
            readable, _, _ = select.select([0, self._wake], [], [])
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            if 0 in readable:
                chunk = os.read(0, 65536)
                if not chunk:
                    self.leave()
                pending += chunk
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    self._start(json.loads(line))

    def _reap(self) -> None:
        while self._trials:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if self._trials.pop(pid, None) is not None:
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
                self.report("exited", pid=pid, code=code)

    def _start(self, request: Dict[str, Any]) -> None:
        self.warm(request["families"])
        host = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._become_trial(host, request["folder"])
                code = run_trial(request)
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else int(bool(error.code))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        self._trials[pid] = request
        self.report("started", pid=pid)

    def _become_trial(self, host: int, folder: str) -> None:
        """Gives this process its own session and log, and closes the host's pipes."""
        os.setsid()
        parent.default_signals()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        parent.die_with_parent(host)
        for fd in (self._out, self._wake, self._wake_in):
            os.close(fd)
        null = os.open(os.devnull, os.O_RDONLY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = os.open(str(Path(folder) / protocol.LAUNCHER_LOG), flags, 0o644)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)


def run_trial(request: Dict[str, Any]) -> int:
    """Runs the elastic agent, or the single rank, in the trial process; returns the exit code."""
    trial, folder = request["trial"], Path(request["folder"])
    os.environ.update(request.get("environment", {}))
    if request["single"]:
        # The host forked this process, so it is the parent whose death ends it.
        os.environ[protocol.ENV_PARENT] = str(os.getppid())
        entry.run(trial)
        return 0
    os.environ[protocol.ENV_PARENT] = str(os.getpid())
    gate = Gate(request["nproc"])
    agent.observe(folder, started=gate.open)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # torch names each event of a rendezvous by inspect.stack(), which searches every module of the
    # process several times: half a second after transformers was imported.
    setattr(dynamic_rendezvous, "get_method_name", _caller)  # noqa: B010
    _join_at_once(dynamic_rendezvous)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=request["nproc"],
        run_id=folder.name,
        start_method="fork",
        monitor_interval=MONITOR_INTERVAL,
        max_restarts=0,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        logs_specs=_logs(folder),
    )
    # torch keeps the traceback of each forked rank that raised in a temporary file and never
    # removes it: here it at least stays inside the run directory if this process is killed.
    tempfile.tempdir = str(folder)
    try:
        elastic_launch(config, _rank)(trial, gate)
    except ChildFailedError:
        traceback.print_exc()
        return 1
    finally:
        for left in folder.glob("pytorch-errorfile-*"):
            left.unlink()
    return 0


class Gate:
    """Blocks the forked ranks until the last one is forked.

    The agent's TCPStore server is a thread of the forking process. A rank that talks to it during
    the next fork can make it hold a lock of the C++ runtime at that moment, and the child's copy is
    never released. Observed as a rank that waits on a futex inside ``TCPStore()``, once in some
    hundred starts of four ranks, once in ten of eight on a busy machine.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._out, self._in = os.pipe()

    def open(self) -> None:
        """Opens the gate; called in the parent."""
        os.write(self._in, b"." * self._ranks)

    def wait(self) -> None:
        """In a rank: returns once the gate is open; ends the rank if the parent has ended."""
        os.close(self._in)
        passed = os.read(self._out, 1)
        os.close(self._out)
        if not passed:
            os._exit(1)


def _join_at_once(dynamic_rendezvous: Any) -> None:
    """Removes the random delay of up to 0.3 s with which torch's agent joins its first rendezvous:
    it spreads the load of many nodes, and here is one."""
    delay = getattr(dynamic_rendezvous, "_delay", lambda seconds: None)

    def only_fixed(seconds: Any) -> None:
        if not isinstance(seconds, tuple):
            delay(seconds)

    dynamic_rendezvous._delay = only_fixed


def _caller(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name


def _rank(trial: str, gate: Gate) -> None:
    gate.wait()
    tempfile.tempdir = None  # the training code's own files go to their usual place
    entry.run(trial)


def _logs(folder: Path) -> Any:
    """Tells the agent where the ranks' error files are. The ranks redirect their own output, which
    also captures what is printed before and after the agent's redirection."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    from moediag import protocol

    class TrialLogs(LogsSpecs):
        def reify(self, envs: Dict[int, Dict[str, str]]) -> LogsDest:
            files = {
                local: str(folder / protocol.error_file(int(env["RANK"])))
                for local, env in envs.items()
            }
            for local, env in envs.items():
                env[entry.ENV_ERROR_FILE] = files[local]
            none = dict.fromkeys(envs, "")
            return LogsDest(
                stdouts=dict(none), stderrs=dict(none), tee_stdouts={}, tee_stderrs={},
                error_files=files,
            )  # fmt: skip

        @property
        def root_log_dir(self) -> str:
            return str(folder)

    return TrialLogs(log_dir=str(folder))


def main(argv: Optional[List[str]] = None) -> None:
    families = list(sys.argv[1:] if argv is None else argv)
    out = os.dup(1)  # not inheritable by exec; forked processes close it
    os.dup2(2, 1)
    serve: Callable[[Sequence[str]], None] = Host(out).serve
    serve(families)


if __name__ == "__main__":
    main()
