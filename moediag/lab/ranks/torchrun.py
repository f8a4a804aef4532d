"""The torchrun launcher's own process: ``torch.distributed.run`` that ends with moediag.

``python -m moediag.lab.ranks.torchrun TRIAL_JSON NPROC [torchrun options…]``. It runs torch's
launcher in this process with an observer (see agent), and ends its whole session when the control
side closes its end of standard input.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import List

from moediag import protocol
from moediag.ranks import agent, parent

ELASTIC_FOLDER = "elastic"


def main(argv: List[str]) -> int:
    trial, nproc, options = argv[0], argv[1], argv[2:]
    folder = Path(trial).parent
    if os.environ.get(protocol.ENV_MAIN_THREAD) == "1":
        parent.die_with_parent(int(os.environ[protocol.ENV_PARENT]))
    _end_with_stdin()
    os.environ[protocol.ENV_PARENT] = str(os.getpid())
    agent.observe(folder)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = [
        f"--nproc-per-node={nproc}", "--max-restarts=0", "--monitor-interval=0.05",
        f"--log-dir={folder / ELASTIC_FOLDER}", *options,
        "-m", "moediag.ranks.entry", trial,
    ]  # fmt: skip
    try:
        run.main(arguments)
    except ChildFailedError:
        traceback.print_exc()
        return 1
    finally:
        # The ranks' error files are in the trial's folder; the agent's copies are not needed.
        shutil.rmtree(folder / ELASTIC_FOLDER, ignore_errors=True)
    return 0


def _end_with_stdin() -> None:
    """Ends this session when standard input is closed. A thread is safe because torchrun starts
    ranks by exec; ranks in their own sessions end by their parent-death signal."""
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        while os.read(pipe, 4096):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="moediag-lifeline", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
