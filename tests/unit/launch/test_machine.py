"""nvidia-smi and NCCL's RAS at a stall, replaced by a program on PATH and a server on a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moediag import protocol
from moediag.launch.attach import gpus
from moediag.launch.capture import dumps, machine
from moediag.launch.capture.collect import _Looker
from moediag.launch.processes import Process
from moediag.protocol import write_json

SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo "index, name, utilization.gpu [%]"; echo "0, NVIDIA H200, 100 %" ;;
  --query-compute-apps=*) echo "gpu_uuid, pid, process_name"; echo "GPU-1, 4711, python" ;;
esac
"""
STATUS = "NCCL version 2.29.3 compiled with CUDA 13.0\nComm 0: 1 rank lags behind\n"

Serve = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server for one connection; returns its address."""
    servers: list[socket.socket] = []

    def start(answer: Callable[[socket.socket], None]) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def run() -> None:
            with server.accept()[0] as wire:
                answer(wire)

        threading.Thread(target=run, daemon=True).start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


def ras(asked: list[str], status: str = STATUS, silent: bool = False) -> Callable[..., None]:
    """NCCL's side of the protocol, as its own client (src/ras/client.cc) speaks it."""

    def answer(wire: socket.socket) -> None:
        with wire.makefile("rb") as lines:
            for raw in lines:
                line = raw.decode().strip()
                asked.append(line)
                if line.startswith("CLIENT PROTOCOL"):
                    wire.sendall(b"SERVER PROTOCOL 2\n")
                elif line.startswith("TIMEOUT"):
                    wire.sendall(b"OK\n")
                elif silent:
                    continue
                else:
                    wire.sendall(status.encode())
                    return

    return answer


def put_smi(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(text)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def started(monkeypatch: pytest.MonkeyPatch, **env: str) -> subprocess.Popen[bytes]:
    """A process with this environment."""
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        env={**os.environ, **env},
    )


def test_output_of_both_tools_is_saved_beside_the_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    put_smi(tmp_path / "bin", SMI, monkeypatch)
    asked: list[str] = []
    address = serve(ras(asked))
    with started(monkeypatch, NCCL_RAS_ADDR=address) as rank:
        missing = machine.look(tmp_path, {0: Process.of(rank.pid)}, 20.0, "nccl")
        assert rank.stdin is not None
        rank.stdin.close()
    assert missing == ()
    told = (tmp_path / "capture" / machine.SMI_FILE).read_text()
    assert "NVIDIA H200, 100 %" in told and "4711" in told and f"rank 0: pid {rank.pid}" in told
    assert (tmp_path / "capture" / machine.RAS_FILE).read_text() == STATUS
    assert asked[0] == "CLIENT PROTOCOL 2" and asked[-1] == "VERBOSE STATUS"
    assert asked[1].startswith("TIMEOUT ")


def test_missing_output_is_noted_on_nccl_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = f"127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setattr(machine, "RAS_ADDRESS", free)
    missing = machine.look(tmp_path, {}, 5.0, "nccl")
    assert missing == (
        "state of the GPUs (nvidia-smi missing)",
        f"NCCL's own view (nothing listens at {free}; NCCL before 2.24 has no RAS)",
    )
    assert machine.look(tmp_path, {}, 5.0, "gloo") == ()
    assert list((tmp_path / "capture").iterdir()) == []


def test_gpu_state_is_saved_for_gloo_jobs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_smi(tmp_path / "bin", SMI, monkeypatch)
    assert machine.look(tmp_path, {}, 20.0, "gloo") == ()
    assert (tmp_path / "capture" / machine.SMI_FILE).exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\necho 'Unable to determine the device handle: GPU is lost' >&2\nexit 15\n",
         "state of the GPUs (nvidia-smi: Unable to determine the device handle: GPU is lost)"),
        ("#!/bin/sh\nexec sleep 1000\n",
         "state of the GPUs (nvidia-smi took too long: the driver itself may hang)"),
    ],
)  # fmt: skip
def test_a_failing_nvidia_smi_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    put_smi(tmp_path / "bin", text, monkeypatch)
    monkeypatch.setattr(machine, "_ras", lambda *_: "")
    assert machine.look(tmp_path, {}, 0.5, "nccl") == (said,)


def test_disabled_ras_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_smi(tmp_path / "bin", SMI, monkeypatch)
    with started(monkeypatch, NCCL_RAS_ENABLE="0") as rank:
        (said,) = machine.look(tmp_path, {0: Process.of(rank.pid)}, 20.0, "nccl")
        assert rank.stdin is not None
        rank.stdin.close()
    assert said == "NCCL's own view (RAS is switched off: NCCL_RAS_ENABLE=0)"


def test_another_or_silent_server_is_noted(serve: Serve) -> None:
    other = serve(lambda wire: (wire.recv(100), wire.sendall(b"HTTP/1.1 400 Bad Request\r\n"))[1])
    with pytest.raises(ValueError, match="which is not NCCL's protocol"):
        machine.ask_ras(other, 5.0)
    with pytest.raises(TimeoutError):
        machine.ask_ras(serve(ras([], silent=True)), 1.5)
    with pytest.raises(ValueError, match="no host:port"):
        machine.ask_ras("localhost", 1.0)


def test_the_size_of_an_answer_is_limited(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MOST", 1000)
    assert len(machine.ask_ras(serve(ras([], "x" * 200_000)), 20.0)) < 1000 + 65536


def test_the_groups_of_a_watched_job_show_whether_it_uses_nccl(tmp_path: Path) -> None:
    log = tmp_path / protocol.events_file(0)
    log.write_text('{"e":"group","group":"0","backend":"gloo"}\n')
    assert not machine.uses_nccl(tmp_path)
    log.write_text('{"e":"group","group":"0","backend":"cpu:gloo,cuda:nccl"}\n')
    assert machine.uses_nccl(tmp_path)


# ------------------------------------------------------------------------ torch's own dumps


def test_a_blocked_rank_is_asked_through_the_pipe_of_torch(tmp_path: Path) -> None:
    """A thread here replaces torch's NCCL monitor, which runs without Python."""
    pipe = tmp_path / f"{protocol.WATCHDOG_PIPES}0.pipe"
    os.mkfifo(pipe)
    wire = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    looker = _Looker(0, os.getpid(), tmp_path, 0.0)

    def monitor() -> None:
        while not _readable(wire):
            pass
        (tmp_path / protocol.watchdog_dump(0)).write_bytes(b"a dump")

    thread = threading.Thread(target=monitor, daemon=True)
    thread.start()
    assert looker._by_pipe()
    thread.join()
    os.close(wire)


def _readable(wire: int) -> bytes:
    try:
        return os.read(wire, 1)
    except BlockingIOError:
        return b""


def test_a_pipe_without_a_reader_does_not_block(tmp_path: Path) -> None:
    looker = _Looker(0, os.getpid(), tmp_path, 0.0)
    assert not looker._by_pipe()
    os.mkfifo(tmp_path / f"{protocol.WATCHDOG_PIPES}0.pipe")
    assert not looker._by_pipe()
    (tmp_path / f"{protocol.WATCHDOG_PIPES}1.pipe").write_bytes(b"")
    assert not _Looker(1, os.getpid(), tmp_path, 0.0)._by_pipe()


def test_dumps_that_torch_wrote_elsewhere_are_copied(tmp_path: Path) -> None:
    there, folder = tmp_path / "there", tmp_path / "run"
    there.mkdir()
    folder.mkdir()
    for rank in (0, 1):
        write_json(folder / protocol.pid_file(rank), {"flight_dumps": [str(there / "trace_")]})
        (there / f"trace_{rank}").write_bytes(b"dump %d" % rank)
    os.utime(there / "trace_1", (1, 1))  # of an earlier job
    write_json(folder / protocol.pid_file(2), {"pid": 3})
    dumps.keep(folder, (0, 1, 2, 3), since=1000.0)
    assert (folder / protocol.watchdog_dump(0)).read_bytes() == b"dump 0"
    assert not (folder / protocol.watchdog_dump(1)).exists()


# ------------------------------------------------------------------------ GPUs of running ranks

# A stand-in for nvidia-smi on two GPUs; process 7 computes on both, 8 on the first, 9 on none.
GPUS = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo "GPU-a, 30"; echo "GPU-b, 97"; echo "GPU-c, [N/A]" ;;
  --query-compute-apps=*) echo "GPU-a, 7"; echo "GPU-b, 7"; echo "GPU-a, 8"; echo "GPU-c, 9" ;;
esac
"""


@pytest.mark.parametrize(
    ("script", "found", "why"),
    [
        (GPUS, {7: 0.97, 8: 0.3}, ""),
        (None, {}, "nvidia-smi missing"),
        ("#!/bin/sh\necho 'Failed to initialize NVML' ; exit 9\n", {}, "initialize NVML"),
        ("#!/bin/sh\nexec sleep 60\n", {}, "took too long"),
        (GPUS.replace(" 7", " 17").replace(" 8", " 18"), {}, "none of the ranks"),
    ],
)
def test_how_busy_the_gpus_of_ranks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None,
    found: dict[int, float], why: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}" if script else str(tmp_path))
    if script:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    busy, said = gpus.busy({7, 8, 9}, 0.3 if "sleep" in str(script) else 10.0)
    assert busy == found
    assert (why in said) if why else not said
