"""Ranks as they stand on NCCL when their devices are stuck: the main thread spins in a function
called cudaStreamSynchronize, the recorder's thread answers. What they recorded lies in the folder.

    python spins.py FOLDER LIBRARY          the launcher, which starts one process for each answer
    python spins.py FOLDER LIBRARY RANK
"""

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from moediag import protocol

TURN = 0.05  # seconds between two looks


def answer_file(rank: int) -> str:
    """The dump that the rank returns."""
    return f"answer-{rank}.json"


def answer(folder: Path, rank: int) -> None:
    while True:
        request = folder / protocol.dump_request_file(rank)
        if request.exists():
            request.unlink()
            text = (folder / answer_file(rank)).read_text()
            (folder / f"part-{rank}").write_text(text)
            (folder / f"part-{rank}").rename(folder / protocol.flight_file(rank))
        time.sleep(TURN)


def beat(folder: Path, rank: int) -> None:
    record = protocol.Heartbeat.LAYOUT.pack(
        protocol.Heartbeat.MAGIC, 7, -1, protocol.Heartbeat.STATES.index("running"), time.time(), 1
    )
    record = record.ljust(protocol.Heartbeat.SIZE, b"\0")
    (folder / protocol.heartbeat_file(rank)).write_bytes(record)


def clip_grad_norm_(library: ctypes.CDLL) -> None:
    library.cudaStreamSynchronize(None)


def step(folder: Path, rank: int, library: ctypes.CDLL) -> None:
    me = {"pid": os.getpid(), "started": protocol.start_time(), "host": socket.gethostname()}
    me["time"] = time.time()
    beat(folder, rank)
    protocol.write_json(folder / protocol.pid_file(rank), me)
    threading.Thread(target=answer, args=(folder, rank), daemon=True).start()
    clip_grad_norm_(library)


def main() -> None:
    folder, library = Path(sys.argv[1]), sys.argv[2]
    if len(sys.argv) > 3:
        step(folder, int(sys.argv[3]), ctypes.CDLL(library))
        return
    ranks = range(len(list(folder.glob("answer-*.json"))))
    started = [subprocess.Popen([sys.executable, *sys.argv, str(rank)]) for rank in ranks]
    for process in started:
        process.wait()


main()
