"""Records the machine's state while ranks hang: GPUs by nvidia-smi, communicators by NCCL.

NCCL 2.24 and newer report their state (RAS) on a socket of each node, with a line-based protocol,
by default at localhost:28028. RAS knows which ranks of a communicator lag behind or do not answer.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from moediag.launch.capture.collect import CAPTURE_FOLDER
from moediag.launch.processes import Process

SMI_FILE = "nvidia-smi.txt"
RAS_FILE = "nccl-ras.txt"
RAS_ADDRESS = "localhost:28028"
MOST = 1 << 20  # bytes read of an answer
_PROTOCOL = 2
_USES_NCCL = re.compile(rb'"backend":"[^"]*nccl')
_HEAD = 1 << 18  # bytes of a log that contain its first groups
_GPU_FIELDS = (
    "index", "name", "pstate", "temperature.gpu", "utilization.gpu", "memory.used", "memory.total",
    "power.draw", "ecc.errors.corrected.volatile.total", "ecc.errors.uncorrected.volatile.total",
)  # fmt: skip
_QUESTIONS = (
    ("GPUs", f"--query-gpu={','.join(_GPU_FIELDS)}"),
    ("processes", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"),
)


def look(
    folder: Path, ranks: Mapping[int, Process], seconds: float, backend: str = ""
) -> tuple[str, ...]:
    """Writes both states to ``folder/capture``, each within ``seconds``; returns what is missing.
    ``backend`` is the trial's; "" reads it from the ranks' logs.

    For a job without NCCL, nothing is reported as missing."""
    nccl = backend == "nccl" or (not backend and uses_nccl(folder))
    into = folder / CAPTURE_FOLDER
    into.mkdir(parents=True, exist_ok=True)
    found = [_smi(into / SMI_FILE, ranks, seconds)]
    if nccl:
        found.append(_ras(into / RAS_FILE, ranks.values(), seconds))
    return tuple(text for text in found if text and nccl)


def uses_nccl(folder: Path) -> bool:
    """Whether a rank recorded here has an NCCL group."""
    for path in sorted(folder.glob("rank-*.events.jsonl"))[:4]:
        with suppress(OSError), path.open("rb") as file:
            if _USES_NCCL.search(file.read(_HEAD)):
                return True
    return False


def _smi(path: Path, ranks: Mapping[int, Process], seconds: float) -> str:
    """Writes the GPUs' state; returns why there is none, or ""."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "state of the GPUs (nvidia-smi missing)"
    parts = []
    until = time.monotonic() + seconds
    for title, question in _QUESTIONS:
        try:
            code, printed, said = answer_of([tool, question, "--format=csv"], until)
        except subprocess.TimeoutExpired:
            return "state of the GPUs (nvidia-smi took too long: the driver itself may hang)"
        except OSError as error:
            return f"state of the GPUs (nvidia-smi: {error.strerror})"
        text = printed[:MOST].decode(errors="replace").strip()
        if code != 0:
            last = (text or said.decode(errors="replace").strip()).splitlines()[-1:]
            return f"state of the GPUs (nvidia-smi: {''.join(last)[:200] or 'it failed'})"
        parts.append(f"== {title}\n{text}\n")
    pids = "".join(f"rank {rank}: pid {found.pid}\n" for rank, found in sorted(ranks.items()))
    path.write_text("".join([*parts, f"== ranks\n{pids}"]), encoding="utf-8")
    return ""


def answer_of(command: list[str], until: float) -> tuple[int, bytes, bytes]:
    """Returns exit code, output and errors of ``command`` before ``until`` (time.monotonic()).

    A program that hangs in the driver survives SIGKILL, so this does not wait for its end, as
    subprocess.run would. Raises subprocess.TimeoutExpired and OSError."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        printed, said = process.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        raise
    return process.returncode, printed, said


# ------------------------------------------------------------------------ NCCL's RAS


def _ras(path: Path, ranks: Iterable[Process], seconds: float) -> str:
    enabled, address = _settings(ranks)
    if not enabled:
        return "NCCL's own view (RAS is switched off: NCCL_RAS_ENABLE=0)"
    try:
        answer = ask_ras(address, seconds)
    except ConnectionRefusedError:
        return f"NCCL's own view (nothing listens at {address}; NCCL before 2.24 has no RAS)"
    except TimeoutError:
        return f"NCCL's own view (RAS at {address} took too long)"
    except (OSError, ValueError) as error:
        return f"NCCL's own view (RAS at {address}: {error})"
    path.write_text(answer, encoding="utf-8")
    return ""


def _settings(ranks: Iterable[Process]) -> tuple[bool, str]:
    """Returns whether RAS is on and its address, from the ranks' environment."""
    for process in ranks:
        if not process.alive:
            continue
        with suppress(OSError):
            raw = Path(f"/proc/{process.pid}/environ").read_bytes()
            pairs = (item.partition(b"=") for item in raw.split(b"\0"))
            own = {
                name.decode(errors="replace"): v.decode(errors="replace") for name, _, v in pairs
            }
            return own.get("NCCL_RAS_ENABLE") != "0", own.get("NCCL_RAS_ADDR") or RAS_ADDRESS
    return True, RAS_ADDRESS


def ask_ras(address: str, seconds: float) -> str:
    """Returns the verbose status of NCCL's RAS at ``host:port``, within ``seconds`` in all.

    Raises OSError (ConnectionRefusedError, TimeoutError), and ValueError if it is not RAS."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise ValueError("it is no host:port")
    until = time.monotonic() + seconds

    def left() -> float:
        rest = until - time.monotonic()
        if rest <= 0:
            raise TimeoutError
        return rest

    with socket.create_connection((host.strip("[]") or "localhost", int(port)), left()) as wire:

        def line(sent: str) -> str:
            wire.settimeout(left())
            wire.sendall(f"{sent}\n".encode())
            got = b""
            while not got.endswith(b"\n") and len(got) < 4096:
                wire.settimeout(left())
                more = wire.recv(4096)
                if not more:
                    break
                got += more
            return got.decode(errors="replace").strip()

        hello = line(f"CLIENT PROTOCOL {_PROTOCOL}")
        if not hello.upper().startswith("SERVER PROTOCOL"):
            raise ValueError(f"it answers {hello[:80]!r}, which is not NCCL's protocol")
        # How long RAS waits for other nodes; less than our own wait.
        agreed = line(f"TIMEOUT {max(1, int(left() - 1))}")
        if agreed.upper() != "OK":
            raise ValueError(f"it answers {agreed[:80]!r} to TIMEOUT")
        wire.settimeout(left())
        wire.sendall(b"VERBOSE STATUS\n")
        answer = b""
        while len(answer) < MOST:
            wire.settimeout(left())
            more = wire.recv(65536)
            if not more:
                break
            answer += more
    return answer.decode(errors="replace")
