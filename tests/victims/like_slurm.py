"""A stand-in for Slurm: a daemon that starts tasks, and a client like srun.

What it has in common with the real one (tried with Slurm 22.05, see the design note on watched
jobs): tasks are children of the daemon and in sessions of their own, so no process tree leads from
the client to them; the client's environment is theirs, and Slurm's variables say who each is; the
client stays until all have ended, has the worst exit code, and a signal that ends it ends them.

``like_slurm.py daemon SOCKET``; ``like_slurm.py srun SOCKET TASKS COMMAND…``
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType


def daemon(path: str) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    while True:
        client, _ = server.accept()
        threading.Thread(target=serve, args=(client,), daemon=True).start()


def serve(client: socket.socket) -> None:
    raw, ancillary, _, _ = client.recvmsg(1 << 20, socket.CMSG_SPACE(8))
    out, err = array.array("i", ancillary[0][2])
    while not raw.endswith(b"\n"):
        raw += client.recv(1 << 20)
    asked = json.loads(raw)
    tasks = [
        subprocess.Popen(
            asked["command"], cwd=asked["cwd"], stdout=out, stderr=err, start_new_session=True,
            env={**asked["env"], "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n),
                 "SLURM_NODEID": "0", "SLURM_NTASKS": str(asked["tasks"]), "SLURM_JOB_ID": "1"},
        )
        for n in range(asked["tasks"])
    ]  # fmt: skip
    os.close(out)
    os.close(err)

    def gone() -> None:
        if not client.recv(1):
            for task in tasks:
                task.send_signal(signal.SIGKILL)

    threading.Thread(target=gone, daemon=True).start()
    codes = [task.wait() for task in tasks]
    worst = max(128 - code if code < 0 else code for code in codes)
    client.sendall(bytes([worst]))


def srun(path: str, tasks: int, command: list[str]) -> int:
    def end(number: int, _: FrameType | None) -> None:
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    asked = {"command": command, "cwd": str(Path.cwd()), "env": dict(os.environ), "tasks": tasks}
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        text = json.dumps(asked).encode() + b"\n"
        fds = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (1, 2)))
        sent = client.sendmsg([text], [fds])
        client.sendall(text[sent:])
        return client.recv(1)[0]


if __name__ == "__main__":
    if sys.argv[1] == "daemon":
        daemon(sys.argv[2])
    sys.exit(srun(sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
