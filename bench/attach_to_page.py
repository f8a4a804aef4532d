"""Measures the seconds from the command to the page of `moediag attach` for a job whose ranks all
wait, beside `py-spy dump` of the same processes one after the other.

The ranks are tiny: they import a stand-in for torch.distributed and read a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from moediag.launch.capture.py_spy import find_tool

PATIENCE = 2.0
_WAITS = "import os\n\n\ndef barrier():\n    print(flush=True)\n    os.read(os.pipe()[0], 1)\n"
_TRAIN = "from torch.distributed import calls\n\n\ndef main():\n    step = 3\n    calls.barrier()\n"


def attach_to_page(ranks: int) -> tuple[float, str]:
    """Returns the seconds until the page is complete. Raises RuntimeError if it is not the page of
    a hang."""
    with tempfile.TemporaryDirectory(prefix="moediag-bench-") as place:
        with job(Path(place), ranks) as pids:
            command = [sys.executable, "-m", "moediag", "attach", str(pids[0]), "--patience",
                       str(PATIENCE), "--json", "--out", f"{place}/run"]  # fmt: skip
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
            seconds = time.perf_counter() - began
            began = time.perf_counter()
            for pid in pids:
                tool = str(find_tool("py-spy"))
                subprocess.run([tool, "dump", "--json", "-p", str(pid)], capture_output=True,
                               check=True, timeout=60)  # fmt: skip
            serial = time.perf_counter() - began
        trial = json.loads(done.stdout)["trials"][0] if done.stdout else {}
    if trial.get("verdict") != "hang" or trial.get("world_size") != ranks:
        raise RuntimeError(f"not the page of a hang of {ranks} ranks: {done.stderr}")
    return seconds, f"{ranks} ranks; py-spy dump of each, one after the other: {serial:.1f} s"


@contextlib.contextmanager
def job(folder: Path, ranks: int) -> Iterator[list[int]]:
    """A job whose ranks have waited for longer than the patience; yields their pids."""
    package = folder / "torch" / "distributed"
    package.mkdir(parents=True)
    (folder / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "calls.py").write_text(_WAITS)
    script = folder / "train.py"
    script.write_text(f"{_TRAIN}\n\nmain()\n")
    processes = []
    try:
        for rank in range(ranks):
            own = {
                "RANK": rank,
                "WORLD_SIZE": ranks,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": ranks,
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": os.getpid(),
                "PYTHONPATH": folder,
            }
            environment = os.environ | {name: str(value) for name, value in own.items()}
            processes.append(subprocess.Popen([sys.executable, str(script)], env=environment,
                                              stdout=subprocess.PIPE))  # fmt: skip
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        time.sleep(PATIENCE + 0.5)
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    print(attach_to_page(int(sys.argv[1])))  # noqa: T201
