"""Runs a script on Ray actors, one a rank: ``under_ray.py RANKS SCRIPT [ARGUMENT…]``. As under Ray
Train, an actor learns its rank only after its process has started."""

import builtins
import os
import runpy
import socket
import sys
from pathlib import Path

import ray


@ray.remote(num_cpus=0)
class Rank:
    def run(self, rank, size, port, words):
        os.chdir(os.environ["ABROAD_FOLDER"])
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        builtins.bad_shard = str(rank) == os.environ.get("ABROAD_RANK")
        sys.argv = list(words)
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_path(words[0], run_name="__main__")


def start(attempts=4):
    """Starts Ray, which gives up after 30 seconds: too early on a busy machine."""
    try:
        ray.init(num_cpus=1, include_dashboard=False, logging_level="error")
    except Exception:
        ray.shutdown()
        if attempts == 1:
            raise
        start(attempts - 1)


def main():
    size = int(sys.argv[1])
    os.environ["ABROAD_FOLDER"] = str(Path.cwd())
    start()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    ranks = [Rank.remote() for _ in range(size)]
    ray.get([one.run.remote(n, size, port, sys.argv[2:]) for n, one in enumerate(ranks)])


if __name__ == "__main__":
    main()
