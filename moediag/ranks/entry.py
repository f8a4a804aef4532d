"""What every rank does first and last, under either launcher: output, parent death, error file.

``python -m moediag.ranks.entry TRIAL_JSON`` (torchrun) or ``run(TRIAL_JSON)`` (fork). Everything
that could fail or be lost comes after the output is redirected and the pid is on disk.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Callable, Dict

from moediag import protocol
from moediag.masking import masked
from moediag.ranks import parent

# What a rank runs: "module:function" with one argument, the trial's path. Tests replace it.
ENV_MAIN = "MOEDIAG_RANK_MAIN"
DEFAULT_MAIN = "moediag.lab.ranks.rank:main"
ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def run(trial_path: str) -> None:
    """Runs the trial on this rank. Writes exceptions to the error file and raises them again."""
    rank = int(os.environ["RANK"])
    folder = Path(trial_path).parent
    _redirect(folder / protocol.output_file(rank))
    _lifeline(folder, rank)
    me = {
        "pid": os.getpid(), "started": protocol.start_time(), "host": socket.gethostname(),
        "time": time.time(),
    }  # fmt: skip
    protocol.write_json(folder / protocol.pid_file(rank), me)
    os.environ[protocol.ENV_TRIAL] = trial_path
    os.environ[protocol.ENV_EVIDENCE] = str(folder)
    try:
        find(os.environ.get(ENV_MAIN, DEFAULT_MAIN))(trial_path)
    except Exception as error:
        traceback.print_exc()
        _write_error(folder / protocol.error_file(rank), error)
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def find(name: str) -> Callable[..., object]:
    """Returns the function ``module:function``."""
    module, _, function = name.partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(module), function)
    return found


def _redirect(path: Path) -> None:
    """Redirects standard output and error of this process, native code included, to ``path``."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _lifeline(folder: Path, rank: int) -> None:
    parent.default_signals()
    if protocol.ENV_PARENT in os.environ:
        parent.die_with_parent(int(os.environ[protocol.ENV_PARENT]))
    parent.allow_tracing()
    from moediag.recorder import lifeline

    lifeline.attach(str(folder), rank)


def _write_error(path: Path, error: BaseException) -> None:
    """Writes the error in torch elastic's format with the exact time, to ``path`` and to the
    agent's own error file, so that the agent's summary is correct."""
    content = error_content(error)
    for target in {path, Path(os.environ.get(ENV_ERROR_FILE, str(path)))}:
        try:
            protocol.write_json(target, content)
        except OSError:
            traceback.print_exc()
    # In a forked rank, the agent's own record of the error would round the time.
    os.environ.pop(ENV_ERROR_FILE, None)


def error_content(error: BaseException) -> Dict[str, object]:
    """The content of an error file, without secrets."""
    text = masked(str(error))
    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    stack = masked(stack.replace(str(error), text) if text != str(error) else stack)
    # The agent reads whole seconds only; ``time`` orders the ranks' ends.
    now = time.time()
    extra = {"py_callstack": stack, "timestamp": str(int(now)), "time": now}
    return {"message": {"message": f"{type(error).__name__}: {text}", "extraInfo": extra}}


def main(trial_path: str) -> None:
    """Runs the trial and ends this process as a forked rank ends. It skips the interpreter's
    teardown, in which a live process group may abort ("terminate called without an active
    exception") and hide the exit code of the failure."""
    code = 0
    try:
        run(trial_path)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        code = 1
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
