"""Records runs of ``resumes.py`` as `moediag resume` does, in forks of one process, which imports
torch once:

    python -m tests.victims.resume_runs FOLDER [FAULT…]

A fork is one rank, without DistributedDataParallel. FOLDER receives the recordings of two
uninterrupted runs, unless it has them, and for each fault those of the interrupted and of the
resumed run.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from moediag.protocol import StateRequest
from moediag.protocol.recorded_state import SAVED
from moediag.ranks.resume.recording import StateRecording
from tests.victims import resumes

STEPS = 3  # compared after the save
HEALTHY = "healthy"


class _Ending:
    """Ends this process where the next step would begin: no other rank needs it."""

    def begin(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def wait(self, _seconds: float = 0.0) -> None:
        os._exit(0)


def record(request: StateRequest, rank: int, *arguments: str) -> None:
    """Runs the program in a fork, and waits for it."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, (request, arguments)
        for mark in Path(request.folder).glob(f"{SAVED}*"):
            mark.unlink()  # the next rank runs after this one, not beside it
        return
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE="1")
        sys.argv = ["resumes.py", *arguments]
        recording = StateRecording(request, _Ending())  # type: ignore[arg-type]
        recording.install()
        resumes.main()
        recording._at_exit()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(folder: Path, faults: Sequence[str]) -> None:
    after = resumes.SAVE_AT
    resumes.Training(0, 1).step()  # imports what a first step imports
    gc.collect()
    for name in ("straight", "again"):
        for rank in (0, 1) if not (folder / name).exists() else ():
            request = StateRequest(str(folder / name), after + 1, STEPS)
            record(request, rank, str(folder / f"{name}-files"))
    for fault in faults:
        ranks = (0, 1) if fault in (HEALTHY, "read-twice") else (0,)
        files = str(folder / f"{fault}-files")
        told = [files, *(("--fault", fault) if fault != HEALTHY else ())]
        for rank in ranks:
            record(StateRequest(str(folder / fault / "interrupted")), rank, *told)
        for rank in ranks:
            request = StateRequest(str(folder / fault / "resumed"), 1, STEPS)
            record(request, rank, *told, "--resume")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or [HEALTHY, *resumes.FAULTS])
