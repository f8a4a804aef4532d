"""How busy the GPUs of processes are, as nvidia-smi reports it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Collection

from moediag.launch.capture.machine import answer_of

_UTILISATION = "--query-gpu=uuid,utilization.gpu"
_PROCESSES = "--query-compute-apps=gpu_uuid,pid"


def present() -> bool:
    return shutil.which("nvidia-smi") is not None


def busy(pids: Collection[int], seconds: float) -> tuple[dict[int, float], str]:
    """The share of time that the GPU of each process computed, the busiest if it has several, and
    why that is not known of all. In another pid namespace the driver's pids are not ours: such
    processes are left out."""
    if not present():
        return {}, "use of the GPUs (nvidia-smi missing)"
    until = time.monotonic() + seconds
    try:
        gpus = {uuid: share for uuid, share in _rows(_UTILISATION, until) if share.isdecimal()}
        users = [(int(pid), uuid) for uuid, pid in _rows(_PROCESSES, until) if pid.isdecimal()]
    except subprocess.TimeoutExpired:
        return {}, "use of the GPUs (nvidia-smi took too long: the driver itself may hang)"
    except OSError as error:
        return {}, f"use of the GPUs (nvidia-smi: {error.strerror or error})"
    found: dict[int, float] = {}
    for pid, uuid in users:
        if pid in pids and uuid in gpus:
            found[pid] = max(found.get(pid, 0.0), int(gpus[uuid]) / 100)
    return found, "" if found else "use of the GPUs (nvidia-smi names none of the ranks' processes)"


def _rows(question: str, until: float) -> list[tuple[str, str]]:
    """Raises subprocess.TimeoutExpired and OSError."""
    command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
    code, output, said = answer_of(command, until)
    text = output.decode(errors="replace")
    if code != 0:
        raise OSError((text or said.decode(errors="replace")).strip()[:200] or "it failed")
    cells = (tuple(map(str.strip, line.split(","))) for line in text.splitlines())
    return [(row[0], row[1]) for row in cells if len(row) == 2]
