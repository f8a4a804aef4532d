"""Starts a program as ranks, as torchrun does, without importing torch itself: two seconds less.

``plain_launcher.py RANKS PROGRAM ARGUMENTS…``. Its exit code is the worst of the ranks'; SIGTERM
and a rank that fails end them all.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def main(size: str, *command: str) -> int:
    with socket.socket() as held:
        # Rank 0 can listen on the port, and the system gives it to nobody else meanwhile.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        return follow(size, str(held.getsockname()[1]), *command)


def follow(size: str, port: str, *command: str) -> int:
    meeting = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = {}
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        for rank in map(str, range(int(size))):
            own = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
            started = subprocess.Popen([sys.executable, *command], env=os.environ | meeting | own)
            ranks[started.pid] = started
        while ranks:
            pid, status = os.wait()
            if code := os.waitstatus_to_exitcode(status):
                return abs(code)
            ranks.pop(pid, None)
    finally:
        for left in ranks.values():
            left.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
