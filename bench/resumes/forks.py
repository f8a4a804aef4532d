"""Records runs of a program as `moediag resume` does, in forks of one process, which imports torch
and the program's library once:

    PYTHON forks.py PROGRAM LIBRARY

Each line of standard input is a job: the fields of a StateRequest, the ranks, and the program's
arguments. The answer is one line: "" or what failed.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from moediag.protocol.measured import MEASURED_ENOUGH
from moediag.protocol.recorded_state import StateRequest, read_recorded
from moediag.ranks.resume.recording import StateRecording
from moediag.ranks.verify.ending import Ending

_PATIENCE = 300.0


def run(program: str, job: dict[str, Any]) -> str:
    request = StateRequest(**job["request"])
    folder, ranks = Path(request.folder), job["ranks"]
    folder.mkdir(parents=True)
    port = _free_port()
    own = {_fork(program, job, request, rank, port): rank for rank in range(ranks)}
    failed, until = [], time.monotonic() + _PATIENCE
    while own:
        found = read_recorded(folder)
        if sum(one.done for one in found.values()) == ranks:
            (folder / MEASURED_ENOUGH).touch()
        for child in list(own):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                rank = own.pop(child)
                failed += [f"rank {rank}: {status}"] if status else []
        if time.monotonic() > until or failed:
            for child in own:
                os.kill(child, 9)
                os.waitpid(child, 0)
            return ", ".join(failed) or f"not finished in {_PATIENCE:g} s"
        time.sleep(0.02)
    return ""


def _fork(program: str, job: dict[str, Any], request: StateRequest, rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(f"{request.folder}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if job["launched"]:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["ranks"]),
                LOCAL_WORLD_SIZE=str(job["ranks"]), MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="none",
            )  # fmt: skip
        faulthandler.dump_traceback_later(_PATIENCE - 5)
        sys.argv = [program, *job["arguments"]]
        recording = StateRecording(request, Ending(Path(request.folder), lambda: None))
        before = _files()
        recording.install()
        _rebind(before)
        runpy.run_path(program, run_name="__main__")
        recording._at_exit()
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def _files() -> dict[str, Any]:
    """What saves and loads safetensors."""
    module = sys.modules.get("safetensors.torch")
    return {name: getattr(module, name) for name in ("save_file", "load_file") if module}


def _rebind(before: dict[str, Any]) -> None:
    """Gives libraries what the recording has replaced, which a job's own import would find."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            for file, original in before.items():
                if value is original:
                    setattr(module, name, getattr(sys.modules["safetensors.torch"], file))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    program, library = sys.argv[1:3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(program).parent))
    importlib.import_module(library)
    importlib.import_module("parts")
    gc.freeze()  # the recording looks at all objects of a fork
    for line in sys.stdin:
        print(run(program, json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
